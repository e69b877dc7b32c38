"""`trivet bench engine`: speeds of one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trivet.cli import options
from trivet.cli.commands import Command, Group
from trivet.cli.output import Output, number


@click.group(cls=Group)
def bench() -> None:
    """Measure speed."""


@bench.command("engine", cls=Command)
@options.model
@options.weights
@options.kv
@click.option("--batch", metavar="B", default=1, help="Requests at the same time.")
@click.option(
    "--prompt-tokens", metavar="P", default=128, help="Tokens of each prompt, of natural text."
)
@click.option("--output-tokens", metavar="N", default=128, help="Tokens produced each.")
@click.option("--repeat", metavar="R", default=5, help="Runs; medians are reported.")
@click.option(
    "--prompts",
    metavar="FILE",
    type=options.PATH,
    help="JSONL with prompt, messages or turns, instead of --prompt-tokens; requests then stop at the "
    "end token.",
)
@options.draft
@click.option(
    "--draft-tokens",
    "--num-speculative-tokens",
    metavar="K",
    help="Most draft tokens of a request in one step; auto: up to 8, as they pay.",
)
@click.option("--temperature", metavar="T", default=0.0)
@click.option("--seed", metavar="S", default=0)
@click.option(
    "--rows", metavar="N,N,...", help="Step time of n rows of one request over one row's."
)
@options.threads
@options.max_model_len
@click.option(
    "--max-num-seqs", metavar="N", type=int, help="Requests that run at once.  [default: B]"
)
@options.max_step_tokens
@options.max_prefill_chunk
@options.memory_utilization
@options.kv_bytes
@options.json
@click.pass_context
def engine(
    context: click.Context,
    /,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
    repeat: int,
    prompts: Path | None,
    draft_tokens: str | None,
    temperature: float,
    seed: int,
    rows: str | None,
    json: bool,
    **others: object,
) -> int:
    """Measure one configuration alone on the machine: medians over --repeat runs."""
    from trivet.bench.engine import AUTO_DRAFT_TOKENS, EngineBench, bench_engine
    from trivet.config import KVFormat, ModelConfig
    from trivet.errors import ConfigError
    from trivet.sizing import format_bytes

    name, chosen = options.settings_of(context)
    config = ModelConfig(
        model=name,
        kv=KVFormat.parse(chosen.pop("kv", "bf16")),
        **{
            key: chosen.pop(key) for key in ("weights", "threads", "max_model_len") if key in chosen
        },
    )
    if draft_tokens == "auto":
        chosen["draft_tokens"] = AUTO_DRAFT_TOKENS
    elif draft_tokens is not None:
        if not draft_tokens.isdigit():
            raise ConfigError("draft_tokens", draft_tokens, "auto, or an integer >= 1")
        chosen["draft_tokens"] = int(draft_tokens)
    if chosen.get("draft", "off") not in ("off", "ngram"):
        raise ConfigError("draft", chosen["draft"], "off, ngram")
    if chosen.get("max_prefill_chunk") == 0:
        chosen["max_prefill_chunk"] = None
    asked = EngineBench(
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeat=repeat,
        prompts_file=None if prompts is None else str(prompts),
        temperature=temperature,
        seed=seed,
        rows=None if rows is None else _parse_rows(rows),
        **chosen,
    )
    out = Output(json)
    with out.progress("bench engine", 1.0, at_once=True) as bar:
        result = bench_engine(config, asked, loading=bar.loading, progress=bar.advance)
    spread = result["spread"]
    rates = [
        ("decode", "decode_tok_s", "tok/s"),
        ("prefill", "prefill_tok_s", "tok/s"),
        ("output, prefill included", "out_tok_s", "tok/s"),
        ("first token", "ttft_s", "s"),
        ("per output token", "tpot_s", "s"),
        ("start, cached", "start_s", "s"),
    ]
    rows_shown: list[tuple[object, ...]] = [
        (
            label,
            number(result[key], 4),
            unit,
            "" if not spread[key] else " to ".join(str(number(v, 4)) for v in spread[key]),
        )
        for label, key, unit in rates
    ]
    rows_shown += [
        ("peak memory", format_bytes(result["peak_rss_bytes"]), "", ""),
        ("weights", format_bytes(result["weight_bytes"]), "", ""),
        ("KV per token", format_bytes(result["kv_bytes_per_token"]), "", ""),
    ]
    if "speedup" in result:
        rows_shown += [
            (
                label,
                number(result[key]) if not isinstance(result[key], bool) else result[key],
                "",
                "",
            )
            for label, key in (
                ("speedup of speculation", "speedup"),
                ("predicted", "predicted_speedup"),
                ("same text", "identical"),
                ("alpha", "alpha"),
                ("mean accepted length", "mean_accepted_length"),
                ("looped share", "looped_share"),
            )
        ]
    if "step_time_ratio" in result:
        unit = "one row" if result["row_times"]["floor"] == "one row" else "reading its bytes"
        for count, ratio in result["step_time_ratio"].items():
            rows_shown.append((f"step of {count} rows over {unit}", number(ratio), "", ""))
    out.table(
        f"{name}  weights {result['weights']}  kv {result['kv']}  {result['threads']} threads  "
        f"{result['isa']}  batch {result['batch']}  {number(result['prompt_tokens'], 4)} in  "
        f"{result['output_tokens']} out  {result['repeat']} runs",
        ("", "median", "", "low to high"),
        rows_shown,
    )
    _phase_table(out, result["phases"])
    out.result(result)
    return 0


def _phase_table(out: Output, phases: dict[str, dict[str, Any] | None]) -> None:
    """Where the time of each phase goes."""
    from trivet.bench.ceiling import CEILING_TOO_LOW

    labels = {
        "linears": "linears",
        "attention": "attention",
        "head": "head",
        "preparation": "norms, gates, quantizing",
        "sampling": "sampling",
        "waiting": "waiting for threads",
        "other": "rest of the model's calls",
        "python": "Python",
    }
    shown = {name: phase for name, phase in phases.items() if phase is not None}
    rows: list[list[object]] = []
    for part, label in labels.items():
        row: list[object] = [label]
        for phase in shown.values():
            milliseconds = 1e3 * phase["parts_s"][part] / phase["steps"]
            row += [number(milliseconds), f"{phase['shares'][part]:.1%}"]
        rows.append(row)
    for label, key, scale in (("step", "wall_s", 1e3), ("steps", "steps", 1.0)):
        row = [label]
        for phase in shown.values():
            value = phase[key] * scale / (phase["steps"] if key == "wall_s" else 1)
            row += [number(value, 4), ""]
        rows.append(row)
    for label, key in (("bandwidth used (mbu)", "mbu"), ("arithmetic used (mfu)", "mfu")):
        row = [label]
        for phase in shown.values():
            row += ["", f"{phase[key]:.1%}{'*' if phase[key] > 1 else ''}"]
        rows.append(row)
    columns = ["where the time goes"]
    for name in shown:
        columns += [f"{name}, ms", "share"]
    out.table("", columns, rows)
    if any(phase["note"] for phase in shown.values()):
        out.note(f"* {CEILING_TOO_LOW}")


def _parse_rows(text: str) -> tuple[int, ...]:
    from trivet.errors import ConfigError

    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError("rows", text, "integers with commas between them, e.g. 1,2,4,8,16")
    return tuple(int(part) for part in parts)
