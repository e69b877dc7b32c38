"""Writes a ladder down: one self-contained HTML page, the JSON file, the recipe.

The page holds its styles and its plots (SVG) and refers to nothing outside itself.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivet.bench.gain import LEAST_GAIN, LEAST_KV_GAIN, LEAST_ROUNDS
from trivet.bench.rung import CHAT_GAP, Ladder, Rung
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate.gate import MAX_DELTA_PPL
from trivet.json_values import plain
from trivet.sizing import format_bytes

_STYLE = """
:root { color-scheme: light; --ink: #1d2430; --faint: #667085; --line: #d9dee7; --good: #177245;
  --bad: #b42318; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 2rem auto; max-width: 84rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, li { max-width: 60rem; } .faint { color: var(--faint); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: right;
  vertical-align: top; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
.yes { color: var(--good); } .no { color: var(--bad); } .undecided { color: #9a6700; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
.plots svg { width: 100%; height: auto; } pre { background: #f5f7fa; padding: .8rem; overflow: auto; }
"""
_COLORS = {True: "#2e7d5b", False: "#8b94a3"}
_BEFORE_COLOR = "#d9dee7"


def write_report(ladder: Ladder, folder: Path) -> dict[str, Path]:
    """Write report.html, report.json and recipe.toml into ``folder``; returns their paths by name.

    Raises ConfigError: the folder cannot be made; CheckpointError: a file cannot be written.
    """
    check_folder(folder)
    page = render_html(ladder)
    paths = {name: folder / name for name in ("report.html", "report.json", "recipe.toml")}
    texts = {
        "report.html": page,
        "report.json": json.dumps(plain(ladder.as_json()), indent=1, ensure_ascii=False) + "\n",
        "recipe.toml": ladder.recipe.to_toml(),
    }
    for name, path in paths.items():
        try:
            path.write_text(texts[name], encoding="utf-8")
        except OSError as error:
            raise CheckpointError(path, f"cannot be written: {error.strerror}") from None
    return paths


def check_folder(folder: Path) -> None:
    """Make the output folder, before hours are spent. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", str(folder), f"a folder ({error.strerror})") from None


def render_html(ladder: Ladder) -> str:
    """The page."""
    title = f"Ladder of {html.escape(ladder.model)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        _facts(ladder),
        f"<p>{_summary(ladder)}</p>",
        "<h2>Rungs</h2>",
        _rung_table(ladder.rungs),
        _table_notes(ladder),
        '<div class="plots">',
        *_plots(ladder),
        "</div>",
        *_quality_section(ladder),
        *_mixed_section(ladder.rungs),
        "<h2>How it was measured</h2>",
        _method(ladder),
        "<h2>Recipe</h2>",
        f"<pre>{html.escape(ladder.recipe.to_toml())}</pre>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def summary_line(ladder: Ladder) -> str:
    """What the recipe is and what it gains, in one sentence."""
    kept = [rung for rung in ladder.rungs if rung.in_recipe]
    recipe = ladder.recipe
    parts = [f"weights {kept[-1].weights}", f"KV {recipe.kv}"]
    if recipe.draft not in (None, "off"):
        parts.append(f"speculation {recipe.draft}")
    if recipe.max_prefill_chunk:
        parts.append(f"prefill chunks of {recipe.max_prefill_chunk}")
    line = f"Recipe: {', '.join(parts)}"
    timed = [rung for rung in kept if rung.gain_over_baseline is not None]
    if timed:
        low, high = timed[-1].spread["gain_over_baseline"]
        line += (
            f"; x{timed[-1].gain_over_baseline:.2f} over the bf16 baseline in {timed[-1].gain_of}"
            f" ({low:.2f} to {high:.2f} in {timed[-1].rounds} rounds)"
        )
    return line + "."


def _facts(ladder: Ladder) -> str:
    """Date, build, machine and what was asked for."""
    run, machine = ladder.run, ladder.machine
    build = f"trivet {run['trivet']}"
    if run["commit"]:
        changed = " with uncommitted changes" if run["uncommitted_changes"] else ""
        build += f", commit {run['commit'][:10]}{changed}"
    rounds = [count for count in run["rounds"].values() if count]
    few, many = (min(rounds), max(rounds)) if rounds else (0, 0)
    gate = "off, quality was not measured" if run["gate"] == "off" else run["gate"]
    lines = [
        f"{run['date']}. {build}; Python {machine['python']}, numpy {machine['numpy']}, "
        f"{machine['kernel']}.",
        f"{machine['cpu']}, {run['threads']} threads of {machine['threads']} that the process may "
        f"use, ISA level {machine['isa']}, {format_bytes(machine['memory_bytes'])} of memory.",
        f"Gate {gate}; seed {run['seed']}; {few}{f' to {many}' * (many > few)} rounds a rung; "
        f"budget {run['budget_s']:.0f} s, took {ladder.seconds:.0f} s.",
    ]
    return '<p class="faint">' + "<br>".join(html.escape(line) for line in lines) + "</p>"


def _summary(ladder: Ladder) -> str:
    kept = [rung for rung in ladder.rungs if rung.in_recipe]
    quality = kept[-1].quality
    line = html.escape(summary_line(ladder))
    if quality is not None and quality.overall.delta_ppl is not None:
        line += (
            f" Perplexity {quality.overall.delta_ppl:+.3f}, mean KL {_figure(quality.overall.mean_kl)}"
            " against the baseline, over all corpora."
        )
    return line


def _figure(value: float | None, digits: int = 3, unit: float = 1.0) -> str:
    if value is None:
        return "-"
    value *= unit
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def _range(rung: Rung, name: str) -> str:
    """A gain with its lowest and highest round beneath."""
    shown = _gain(getattr(rung, name))
    spread = rung.spread.get(name)
    if spread and rung.rounds > 1:
        shown += f'<br><span class="faint">{spread[0]:.2f} to {spread[1]:.2f}</span>'
    return shown


def _pair(rung: Rung, name: str, unit: float = 1.0) -> str:
    """A rung's figure, and beneath it that of the configuration before in the same rounds."""
    shown = _figure(getattr(rung, name), unit=unit)
    if rung.before is not None:
        shown += f'<br><span class="faint">{_figure(rung.before[name], unit=unit)}</span>'
    return shown


def _rung_table(rungs: Sequence[Rung]) -> str:
    heads = (
        "rung", "change", "TTFT ms", "TPOT ms", "out tok/s", "workload s", "peak memory",
        "max delta ppl", "mean KL", "gain over previous", "gain of", "gain over baseline", "rounds",
        "in recipe",
    )  # fmt: skip
    texts = ("change", "gain of", "in recipe")
    rows = []
    for rung in rungs:
        deltas = [q.delta_ppl for q in rung.quality.corpora] if rung.quality is not None else []
        known = [delta for delta in deltas if delta is not None]
        kl = rung.quality.overall.mean_kl if rung.quality is not None else None
        before = "" if rung.before is None else '<br><span class="faint">before</span>'
        cells = [
            html.escape(rung.name) + before,
            html.escape(rung.change),
            _pair(rung, "ttft_s", 1000),
            _pair(rung, "tpot_s", 1000),
            _pair(rung, "out_tok_s"),
            _pair(rung, "wall_s"),
            format_bytes(rung.peak_rss_bytes) if rung.peak_rss_bytes else "-",
            f"{max(known):+.3f}" if known else "-",
            _figure(kl),
            _range(rung, "gain_over_previous"),
            html.escape(rung.gain_of) if rung.ratios else "-",
            _range(rung, "gain_over_baseline"),
            str(rung.rounds),
            f'<span class="{rung.outcome}">{rung.outcome}</span><br>'
            f'<span class="faint">{html.escape(rung.reason.removeprefix("undecided: "))}</span>',
        ]
        row = "".join(
            f'<td class="text">{cell}</td>' if head in texts else f"<td>{cell}</td>"
            for head, cell in zip(heads, cells, strict=True)
        )
        rows.append(f"<tr>{row}</tr>")
    head = "".join(
        f'<th class="text">{head}</th>' if head in texts else f"<th>{head}</th>" for head in heads
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _table_notes(ladder: Ladder) -> str:
    notes = [
        "The second line of a rung is the configuration that it is held against, in the same rounds; "
        "of a gain, the lowest and highest round. Two rungs were measured at different times: compare "
        "a rung with its second line, not with the row above. In the plots the second line is the "
        "light bar, and what is in the recipe is green.",
    ]
    if any(rung.gain_of == CHAT_GAP for rung in ladder.rungs):
        notes.append(
            "Chunked prefill is measured under a load of its own, further down: its TTFT, TPOT and "
            "out tok/s belong to that load."
        )
    return '<p class="faint">' + " ".join(notes) + "</p>"


def _quality_section(ladder: Ladder) -> list[str]:
    measured = [rung for rung in ladder.rungs if rung.quality is not None]
    if not measured:
        return []
    rows = [
        f"<tr><td>{html.escape(rung.name)}</td><td class='text'>{html.escape(q.corpus)}</td>"
        f"<td>{_figure(q.perplexity, 5)}</td><td>{_signed(q.delta_ppl)}</td>"
        f"<td>{_figure(q.mean_kl)}</td><td>{_percent(q.top1_agreement)}</td><td>{q.tokens}</td></tr>"
        for rung in measured
        if rung.quality is not None
        for q in [*rung.quality.corpora, rung.quality.overall]
    ]
    return [
        "<h2>Quality</h2>",
        "<table><thead><tr><th>rung</th><th class='text'>corpus</th><th>perplexity</th>"
        "<th>delta</th><th>mean KL</th><th>top-1</th><th>tokens</th></tr></thead><tbody>",
        *rows,
        "</tbody></table>",
    ]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mixed_section(rungs: Sequence[Rung]) -> list[str]:
    rung = next((rung for rung in rungs if rung.name == "chunked-prefill"), None)
    if rung is None or "load" not in rung.details:
        return []
    names = {
        "ttft_s": "chat TTFT ms",
        "tpot_s": "chat TPOT ms",
        "chat_gap_p99_s": "chat gap p99 ms",
        "long_ttft_s": "long prompt TTFT ms",
    }
    head = "".join(f"<th>{label}</th>" for label in names.values())
    rows = [
        f"<tr><td>{label}</td>"
        + "".join(f"<td>{_figure(rung.details[label][name], unit=1000)}</td>" for name in names)
        + f"<td>{_figure(rung.details[label]['out_tok_s'])}</td></tr>"
        for label in ("off", "on")
    ]
    load = rung.details["load"]
    speculation = "" if rung.draft == "off" else f", speculation {html.escape(rung.draft)}"
    return [
        "<h2>Chunked prefill under a mixed load</h2>",
        f"<p>Weights {html.escape(rung.weights)}, KV {html.escape(rung.kv)}{speculation}.",
        f"{load['streams']} streams of chats ({load['chat_prompt_tokens']} tokens in, "
        f"{load['chat_output_tokens']} out) with a prompt of {load['long_prompt_tokens']} tokens "
        f"every {load['long_every_s']:.1f} s, {load['duration_s']:.1f} s a run.</p>",
        f"<table><thead><tr><th>chunks</th>{head}<th>out tok/s</th></tr></thead><tbody>",
        *rows,
        "</tbody></table>",
    ]


def _method(ladder: Ladder) -> str:
    work = ladder.workload
    corpora = "".join(
        f"<li>{html.escape(c['corpus'])}: {html.escape(c['source'])}, {c['tokens']} tokens scored, "
        f"sha256 <code>{c['sha256'][:16]}</code></li>"
        for c in ladder.corpora
    )
    quality = {
        "fast": f"perplexity rises by at most {MAX_DELTA_PPL} on every corpus and ",
        "full": "every check of the gate passes against the baseline and ",
        "off": "",  # the heading says so
    }[ladder.run["gate"]]
    read = (
        "<p>Perplexity counts every token once, in windows that do not overlap; KL is in nats, from "
        f"the baseline.</p><ul>{corpora}</ul>"
    )
    return (
        "<p>Every rung changes one thing of the configuration accepted so far. Baseline, accepted and "
        "new configuration run the same work in turns, each in a process of its own; a gain is the "
        "median over the rounds of the ratio of wall times, before over after. One round is one "
        f"request of prose and one of code ({work['single_prompt_tokens']} tokens in, "
        f"{work['single_output_tokens']} out; TTFT and TPOT are their means) and a batch of "
        f"{work['batch']} ({work['batch_prompt_tokens']} in, {work['batch_output_tokens']} out; "
        "out tok/s: output tokens over wall time, prefill included); workload s is the wall time of "
        "all of it. Prompts are distinct, the prefix cache is off, sampling is greedy. Peak memory is "
        "the process's since its start, shared mappings included; speculation and chunked prefill run "
        "in the process of the rung before.</p>"
        f"<p>A rung enters the recipe when {quality}its gain is sound: the median is at least "
        f"{LEAST_GAIN}, and above 1 in every round while there are fewer than five, in four of five "
        f"beyond (int8 KV, which is there for memory: {LEAST_KV_GAIN} and above that). It is rejected "
        "when as many rounds say the contrary, and undecided in between or with fewer than "
        f"{LEAST_ROUNDS} rounds.</p>"
    ) + (read if ladder.corpora else "")


def _plots(ladder: Ladder) -> list[str]:
    plain = [rung for rung in ladder.rungs if rung.name != "chunked-prefill"]
    plots = [
        _bars("Output tokens per second (batch)", plain, *_values(plain, "out_tok_s")),
        _bars(
            "Milliseconds per output token (one request)", plain, *_values(plain, "tpot_s", 1000)
        ),
        _bars(
            "Milliseconds to the first token (one request)", plain, *_values(plain, "ttft_s", 1000)
        ),
        _bars(
            "Peak memory, MiB",
            plain,
            [None if r.peak_rss_bytes is None else r.peak_rss_bytes / 2**20 for r in plain],
        ),
    ]
    scored = [rung for rung in plain if rung.quality is not None]
    if scored:
        deltas = [
            max((q.delta_ppl or 0.0 for q in r.quality.corpora), default=0.0)
            for r in scored
            if r.quality is not None
        ]
        title = f"Rise of perplexity, worst corpus (allowed {MAX_DELTA_PPL})"
        plots.append(_bars(title, scored, deltas, limit=MAX_DELTA_PPL))
    return plots


def _values(
    rungs: Sequence[Rung], name: str, unit: float = 1.0
) -> tuple[list[float | None], list[float | None]]:
    """A figure of every rung, and of the configuration before it in the same rounds."""
    own = [getattr(rung, name) for rung in rungs]
    before = [None if rung.before is None else rung.before[name] for rung in rungs]
    return [_scaled(value, unit) for value in own], [_scaled(value, unit) for value in before]


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else unit * value


def _bars(
    title: str,
    rungs: Sequence[Rung],
    values: Sequence[float | None],
    befores: Sequence[float | None] | None = None,
    limit: float | None = None,
) -> str:
    """A horizontal bar chart as an SVG element; rungs in the recipe are green.

    befores  drawn in light grey beneath: the configuration before, in the same rounds
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 0.7 + 0.45 * len(rungs)), layout="constrained")
    axes: Any = figure.add_subplot()
    height = 0.8 if befores is None else 0.4
    for shown, shift, colors in (
        (values, 0.0 if befores is None else -0.2, [_COLORS[rung.in_recipe] for rung in rungs]),
        (befores, 0.2, [_BEFORE_COLOR] * len(rungs)),
    ):
        if shown is None:
            continue
        bars = axes.barh(
            [place + shift for place in range(len(rungs))],
            [0.0 if value is None else value for value in shown],
            height,
            color=colors,
        )
        labels = ["" if value is None else _figure(value) for value in shown]
        axes.bar_label(bars, labels=labels, padding=3, fontsize=7)
    axes.set_yticks(range(len(rungs)), [rung.name for rung in rungs])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if limit is not None:
        axes.axvline(limit, color="#b42318", linewidth=1, linestyle="--")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inline_svg(buffer.getvalue(), title)


def _inline_svg(text: str, title: str) -> str:
    """An SVG file as an element of an HTML page: without prolog, metadata and namespace addresses."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)
    label = html.escape(title, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
