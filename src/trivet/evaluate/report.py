"""The files a gate leaves: `gate.json` for machines, `gate.html` for people."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from trivet import files
from trivet.errors import CheckpointError
from trivet.evaluate.run import Evaluation
from trivet.json_values import plain

GATE_FILE = "gate.json"
REPORT_FILE = "gate.html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; }
td, th { padding: .2em .7em; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #ddd; } pre { white-space: pre-wrap; margin: 0; }
.pass { color: #060; } .reject { color: #a00; } .undecided { color: #850; } mark { background: #fd8; }
"""


def write_gate(evaluation: Evaluation, folder: Path) -> Path:
    """Write the gate file and the report of an evaluation into a folder, which is made if needed.

    Raises CheckpointError when it cannot be written.
    """
    found = plain(evaluation.gate_json())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / GATE_FILE, json.dumps(found, indent=2, allow_nan=False) + "\n")
        files.write(folder / REPORT_FILE, render_html(found))
    except OSError as error:
        raise CheckpointError(folder, f"cannot be written: {error.strerror}") from None
    return folder / GATE_FILE


def render_html(found: dict[str, Any]) -> str:
    """The report of a gate file: one page without scripts; all texts are escaped."""
    verdict = str(found.get("verdict"))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>Gate: {_text(verdict)}</title><style>{_STYLE}</style>",
        f"<h1 class={_text(verdict)}>{_text(verdict)}</h1>",
        f"<p>{_text(found.get('model'))} <code>{_text(found.get('weights'))}</code>, KV"
        f" <code>{_text(found.get('kv'))}</code>, against {_text(found.get('baseline'))}"
        f" <code>{_text(found.get('baseline_weights'))}</code></p><ul>",
        *(f"<li>{_text(reason)}</li>" for reason in found.get("reasons", [])),
        f"</ul><p>Next: {_text(found.get('next_step'))}</p><h2>Checks</h2>",
        "<table><tr><th>check<th>kind<th>finding<th>why</tr>",
    ]
    for check in found.get("checks", []):
        finding = str(check["finding"])
        parts.append(
            f"<tr><td>{_text(check['name'])}<td>{_text(check['kind'])}"
            f"<td class='{_text(finding)}'>{_text(finding)}<td>{_text(check['reason'])}</tr>"
        )
    parts.append("</table>")
    texts = found.get("side_by_side", [])
    if texts:
        same = sum(bool(text["identical"]) for text in texts)
        parts.append(f"<h2>Side by side: {same} of {len(texts)} texts identical</h2><table>")
        parts.append("<tr><th>prompt<th>baseline<th>candidate<th>first difference</tr>")
    for text in texts:
        common = len(text["common"])
        cells = [
            f"<td><pre>{_text(text[name][:common])}{_marked(text[name][common:])}</pre>"
            for name in ("baseline", "candidate")
        ]
        first = "none" if text["identical"] else f"token {text['first_difference']}"
        parts.append(f"<tr><td><pre>{_text(text['prompt'])}</pre>{''.join(cells)}<td>{first}</tr>")
    if texts:
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _marked(rest: str) -> str:
    """What follows the common text, its first word marked."""
    word = re.match(r"\s*\S*", rest)
    length = word.end() if word is not None else 0
    return f"<mark>{_text(rest[:length])}</mark>{_text(rest[length:])}" if rest else ""
