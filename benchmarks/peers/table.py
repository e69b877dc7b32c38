"""The report of run.py as Markdown: speeds beside bytes and quality, and the ratios.

    python benchmarks/peers/table.py benchmarks/results/peers.json [--into README.md]

--into replaces what stands between the lines ``<!-- peers MODEL -->`` and ``<!-- /peers MODEL -->``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _order(case: str) -> tuple[int, int]:
    kind, number = case.rsplit("_", 1)
    return ("decode", "prefill", "batch").index(kind), int(number)


def _rows(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _speeds(report: dict[str, Any], cases: list[str]) -> list[str]:
    rows = []
    for name, engine in report["engines"].items():
        measured = [report["cases"][case].get(name) for case in cases]
        if not any(measured):
            continue
        deltas = engine.get("delta_ppl", {})
        row = [name, f"{engine['weight_bytes'] / 1e6:.0f}"]
        if report["model"] == "demo":
            row += [_cell(deltas.get(label), "+.2f") for label in ("A", "B")]
        for entry in measured:
            if entry is None:
                row.append("-")
            else:
                spread = (entry["max"] - entry["min"]) / entry["median"] / 2
                row.append(f"{entry['median']:.0f} ±{100 * spread:.0f}%")
        rows.append(row)
    quality = ["Δppl A", "Δppl B"] if report["model"] == "demo" else []
    titles = [case.replace("_", " ") for case in cases]
    return _rows(["tok/s", "weights MB", *quality, *titles], rows)


def _ratios(report: dict[str, Any], cases: list[str]) -> list[str]:
    names = dict.fromkeys(name for case in cases for name in report["ratios"][case])
    rows = []
    for name in names:
        for key, label in (("best_same_width", "same width"), ("best_peer", "any width")):
            row = [f"{name}, {label}"]
            for case in cases:
                entry = report["ratios"][case].get(name, {})
                peer = entry.get(key)
                row.append("-" if peer is None else f"{entry['to'][peer]['median']:.2f}x {peer}")
            if set(row[1:]) != {"-"}:
                rows.append(row)
    return _rows(["Trivet to the best peer", *(c.replace("_", " ") for c in cases)], rows)


def markdown(report: dict[str, Any]) -> str:
    """Both tables, what they were measured on, and what did not run."""
    cases = sorted((c for c, found in report["cases"].items() if found), key=_order)
    machine = report["machine"]
    versions = sorted(
        {f"{e['peer'].replace('_', '.')} {e['version']}" for e in report["engines"].values()}
    )
    lines = _speeds(report, cases)
    ratios = _ratios(report, cases)
    if len(ratios) > 2:
        lines += ["", *ratios]
    lines += [
        "",
        f"Model {report['model']}, {machine['cpu']}, level {machine['isa']}, "
        f"{report['threads']} threads, {report['rounds']} interleaved rounds, medians, half the range "
        f"as spread; {', '.join(versions)}; commit {report['commit'][:10]}, {report['date']}.",
    ]
    reasons: dict[str, list[str]] = {}
    for entry in report["not_run"]:
        cases_text = (
            entry["cases"] if isinstance(entry["cases"], str) else ", ".join(entry["cases"])
        )
        reasons.setdefault(f"{entry['engine']}: {entry['reason']}", []).append(cases_text)
    if reasons:
        lines += ["", "Not run:", ""]
        lines += [f"- {what} ({'; '.join(which)})" for what, which in reasons.items()]
    return "\n".join(lines)


def insert(text: str, model: str, content: str) -> str:
    """``text`` with ``content`` between the model's markers. Raises ValueError without them."""
    begin, end = f"<!-- peers {model} -->", f"<!-- /peers {model} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{begin} and {end} are not both there")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("report", type=Path)
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text())
    text = markdown(report)
    if arguments.into is None:
        print(text)
        return 0
    try:
        changed = insert(arguments.into.read_text(), report["model"], text)
    except ValueError as mistake:
        parser.error(f"{arguments.into}: {mistake}")
    temporary = arguments.into.with_suffix(".tmp")
    temporary.write_text(changed)
    temporary.rename(arguments.into)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
