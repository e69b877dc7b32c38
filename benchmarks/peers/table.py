"""Reports of run.py as Markdown: speeds beside bytes and quality, and the ratios.

    python benchmarks/peers/table.py benchmarks/results/peers.json [MORE.json ...] [--into README.md]
                                     [--cases decode_128 batch_32 ...]

Several reports of one model (one for each group of cases, say) make one table: each case is taken from
the last report that has it, whole, so that its ratios stay those of one run.
--cases keeps these columns. --into replaces what stands between the lines ``<!-- peers MODEL -->``
and ``<!-- /peers MODEL -->``.
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


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report with every case of all; raises ValueError when the models differ."""
    models = {report["model"] for report in reports}
    if len(models) != 1:
        raise ValueError(f"reports of several models: {', '.join(sorted(models))}")
    result: dict[str, Any] = {"model": models.pop(), "cases": {}, "ratios": {}, "engines": {}}
    for report in reports:
        for case, found in report["cases"].items():
            if found:
                result["cases"][case] = found
                result["ratios"][case] = report["ratios"][case]
        result["engines"] |= report["engines"]
    return result


def kept(report: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The report with these of its cases only."""
    not_run = []
    for entry in report["not_run"]:
        which = entry["cases"]
        left = which if which == "all" else [case for case in which if case in cases]
        if left:
            not_run.append(entry | {"cases": left})
    return report | {
        "cases": {case: found for case, found in report["cases"].items() if case in cases},
        "ratios": {case: found for case, found in report["ratios"].items() if case in cases},
        "not_run": not_run,
    }


def markdown(reports: list[dict[str, Any]], only: list[str] | None = None) -> str:
    """Both tables, what they were measured on, and what did not run.

    ``only``: cases to show. Raises ValueError for one that no report has.
    """
    if only is not None:
        missing = set(only).difference(*(report["cases"] for report in reports))
        if missing:
            raise ValueError(f"no report has the case {', '.join(sorted(missing))}")
        reports = [report for report in (kept(r, only) for r in reports) if report["cases"]]
    whole = merged(reports)
    cases = sorted(whole["cases"], key=_order)
    lines = _speeds(whole, cases)
    ratios = _ratios(whole, cases)
    if len(ratios) > 2:
        lines += ["", *ratios]
    for index, report in enumerate(reports):
        later = {
            case
            for other in reports[index + 1 :]
            for case, found in other["cases"].items()
            if found
        }
        own = [case for case, found in report["cases"].items() if found and case not in later]
        if own:
            lines += ["", _origin(report, own)]
    # A case that one report could not run and another did is there.
    measured = {(name, case) for case in cases for name in whole["cases"][case]}
    lines_not_run: dict[str, None] = {}
    for report in reports:
        for entry in report["not_run"]:
            name, which = entry["engine"], entry["cases"]
            missing = [
                case
                for case in (report["cases"] if which == "all" else which)
                if (name, case) not in measured
            ]
            if missing:
                shown = which if which == "all" else ", ".join(missing)
                lines_not_run[f"- {name}: {entry['reason']} ({shown})"] = None
    if lines_not_run:
        lines += ["", "Not run:", "", *lines_not_run]
    return "\n".join(lines)


def _origin(report: dict[str, Any], cases: list[str]) -> str:
    machine = report["machine"]
    versions = sorted(
        {f"{e['peer'].replace('_', '.')} {e['version']}" for e in report["engines"].values()}
    )
    names = ", ".join(case.replace("_", " ") for case in sorted(cases, key=_order))
    return (
        f"{names}: model {report['model']}, {machine['cpu']}, level {machine['isa']}, "
        f"{report['threads']} threads, {report['rounds']} interleaved rounds, medians, half the range "
        f"as spread; {', '.join(versions)}; commit {report['commit'][:10]}, {report['date']}."
    )


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
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--cases", nargs="+", help="columns to show; without it all")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.reports]
    try:
        text = markdown(reports, arguments.cases)
    except ValueError as mistake:
        parser.error(str(mistake))
    if arguments.into is None:
        print(text)
        return 0
    try:
        changed = insert(arguments.into.read_text(), reports[0]["model"], text)
    except ValueError as mistake:
        parser.error(f"{arguments.into}: {mistake}")
    temporary = arguments.into.with_suffix(".tmp")
    temporary.write_text(changed)
    temporary.rename(arguments.into)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
