"""`trivet ladder`: make a model faster, rung by rung, with quality beside speed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trivet.cli import options
from trivet.cli.commands import Command
from trivet.cli.output import Output, number

if TYPE_CHECKING:
    from trivet.bench.rung import Rung


@click.command(cls=Command)
@options.model
@click.option(
    "-o",
    "--out",
    "out_folder",
    metavar="OUT",
    type=options.PATH,
    required=True,
    help="Folder for the report and the recipe.",
)
@click.option(
    "--rungs",
    metavar="LIST",
    help="Out of bf16,w8a8,w4,int8-kv,ngram,chunked-prefill.  [default: all]",
)
@click.option(
    "--gate",
    metavar="G",
    default="fast",
    help="fast: perplexity; full: every check of evaluate; off: quality is not measured.",
)
@click.option(
    "--budget",
    metavar="SECONDS",
    default=600.0,
    help="Time for all rungs; packing comes on top.",
)
@options.several(
    "--corpus",
    metavar="FILE",
    help="Text file; once for each.  [default: pydoc-topics and stdlib-source]",
)
@click.option(
    "--max-tokens",
    metavar="M",
    type=int,
    help="Tokens scored of each corpus.  [default: by budget]",
)
@options.threads
@options.json
def ladder(
    model: str,
    out_folder: Path,
    rungs: str | None,
    gate: str,
    budget: float,
    corpus: list[str] | None,
    max_tokens: int | None,
    threads: int | None,
    json: bool,
) -> int:
    """Make a model faster, rung by rung, with quality beside speed.

    Writes report.html, report.json and recipe.toml, which `trivet serve` takes in the place of MODEL.
    """
    from trivet.bench.ladder import climb
    from trivet.bench.report import check_folder, summary_line, write_report
    from trivet.bench.rung import RUNGS, LadderOptions

    name, chosen = options.settings(model, threads=threads)
    wanted = RUNGS if rungs is None else tuple(part.strip() for part in rungs.split(","))
    asked = LadderOptions(
        model=name,
        rungs=wanted,
        gate=gate,
        budget_s=budget,
        threads=chosen.get("threads"),
        corpora=tuple(corpus or ()),
        max_tokens=max_tokens,
    )
    check_folder(out_folder)
    out = Output(json)
    shown: list[Rung] = []
    with out.progress("packing", 1.0, at_once=True) as bar:

        def progress(label: str, share: float) -> None:
            bar.label(label)
            bar.set(share)

        def on_rung(rung: Rung) -> None:
            shown.append(rung)
            out.note(_line(rung))

        result = climb(asked, loading=bar.loading, progress=progress, on_rung=on_rung)
    paths = write_report(result, out_folder)
    _print_table(out, result.model, shown, gate)
    out.note(summary_line(result))
    recipe = shlex.quote(str(paths["recipe.toml"]))
    out.note(f"Report:    {paths['report.html']}")
    out.note(f"Serve it:  trivet serve {recipe}")
    out.note(f"Try it:    trivet chat {recipe}")
    out.result(
        {
            **result.as_json(),
            "recipe": str(paths["recipe.toml"]),
            "report": str(paths["report.html"]),
        }
    )
    return 0


_MARKS = {"yes": "+", "no": "-", "undecided": "?"}


def _line(rung: Rung) -> str:
    return f"{_MARKS[rung.outcome]} {rung.name:<16} {rung.change}: {rung.reason}"


def _print_table(out: Output, model: str, rungs: list[Rung], gate: str) -> None:
    """Two lines a rung: its figures, and those of the configuration before in the same rounds."""
    from trivet.bench.rung import SHORT_NAMES

    rows: list[tuple[str | None, ...]] = []
    for rung in rungs:
        before = rung.before
        deltas = [q.delta_ppl for q in rung.quality.corpora] if rung.quality is not None else []
        known = [delta for delta in deltas if delta is not None]
        overall = rung.quality.overall if rung.quality is not None else None
        gain = _gain(rung.gain_over_previous)
        rows.append(
            (
                rung.name,
                number(_scaled(rung.ttft_s, 1000)),
                number(_scaled(rung.tpot_s, 1000)),
                number(rung.out_tok_s),
                number(_scaled(rung.peak_rss_bytes, 2**-20)),
                f"{max(known):+.3f}" if known else None,
                number(overall.mean_kl) if overall is not None else None,
                None if gain is None else f"{SHORT_NAMES[rung.gain_of]} {gain}",
                _gain(rung.gain_over_baseline),
                "?" if rung.outcome == "undecided" else rung.outcome,
            )
        )
        if before is not None:
            rows.append(
                (
                    "  before",
                    number(_scaled(before["ttft_s"], 1000)),
                    number(_scaled(before["tpot_s"], 1000)),
                    number(before["out_tok_s"]),
                    *("",) * 3,
                    _spread(rung, "gain_over_previous"),
                    *("",) * 2,
                )
            )
    heads = (
        "rung", "TTFT\nms", "TPOT\nms", "tok/s", "MiB", "+ppl", "KL", "gain", "total", "in",
    )  # fmt: skip
    out.table(model, heads, rows)
    notes = [
        "before: the configuration that the rung is held against, in the same rounds; rows of two "
        "rungs are of different times.",
        "gain: before over after, with the lowest and highest round below; total: over bf16.",
    ]
    notes += [
        f"{short}: {name}{' under a load of its own, as are its figures' * (short != 'time')}."
        for name, short in SHORT_NAMES.items()
        if any(rung.ratios and rung.gain_of == name for rung in rungs)
    ]
    if any(rung.outcome == "undecided" for rung in rungs):
        notes.append("?: undecided, and not in the recipe.")
    if gate == "off":
        notes.append("The gate is off: quality was not measured.")
    for note in notes:
        out.note(note)


def _gain(value: float | None) -> str | None:
    return None if value is None else f"x{value:.2f}"


def _spread(rung: Rung, name: str) -> str:
    """The lowest and highest round."""
    low, high = rung.spread.get(name, (0.0, 0.0))
    return f"{low:.2f}..{high:.2f}" if rung.rounds > 1 else f"{rung.rounds} round"


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
