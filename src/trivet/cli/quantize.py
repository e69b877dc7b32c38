"""`trivet quantize`: weights into fewer bits, proved before they get their name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from trivet.cli import options
from trivet.cli.commands import Command
from trivet.cli.output import Output, number

if TYPE_CHECKING:
    from trivet.quantization import Prediction, Quantized


@click.command(cls=Command)
@options.model
@click.option(
    "--output",
    "-o",
    metavar="DIR",
    type=options.PATH,
    required=True,
    help="Folder to write; must not exist.",
)
@click.option(
    "--method",
    metavar="M",
    default="gptq",
    help="none, rtn, gptq, awq, awq+gptq, smoothquant, fp8 or kquant.",
)
@click.option("--bits", metavar="B", default=4, help="2, 3, 4 or 8.")
@click.option(
    "--group-size",
    metavar="G",
    default="64",
    help="Columns that share a scale: 32, 64, 128, 256 or row.",
)
@click.option("--sym/--no-sym", default=True, help="Symmetric codes, or with a zero point.")
@click.option(
    "--act-order",
    metavar="O",
    default="static",
    help="static (columns by importance, groups in place), desc_act (groups by importance) or none.",
)
@click.option(
    "--damp",
    metavar="X",
    default=0.01,
    help="Share of the Hessian's mean diagonal added to it.",
)
@click.option("--fp8", metavar="S", default="channel", help="Scale per tensor, channel or block.")
@click.option(
    "--format",
    metavar="F",
    default="native",
    help="native, gptq, gptq_v2, awq, compressed-tensors, fp8 or gguf:TYPE. native is what Trivet "
    "reads best.",
)
@click.option(
    "--traffic",
    metavar="FILE",
    type=options.PATH,
    help="Calibrate on these prompts or chats (JSONL) or this text.  [default: prose and code]",
)
@click.option(
    "--samples",
    metavar="N",
    type=int,
    help="Windows to calibrate on.  [default: 128; 32 for kquant]",
)
@click.option("--window", metavar="N", default=512, help="Tokens of one window at most.")
@click.option(
    "--general-share",
    metavar="X",
    default=0.25,
    help="Share of prose and code mixed into the traffic.",
)
@click.option("--seed", metavar="S", default=0, help="Seed of what is drawn.")
@click.option("--max-bytes", metavar="BYTES", type=int, help="Refuse a result above this.")
@options.several(
    "--keep",
    metavar="REGEX=FORMAT",
    help="Another format for linears whose name matches: bf16, w8-g64, w4-g32-zp, w8-row, "
    "fp8-channel; once for each, the last that matches decides. With a GGUF type: tensors by their "
    "GGUF names (blk.0.attn_q.weight), and ggml types.",
)
@click.option(
    "--gate",
    metavar="G",
    default="fast",
    help="fast, full or off: DIR appears only on pass, or with off.",
)
@click.option(
    "--auto", is_flag=True, help="8 bits first, then down to 4 bits until the gate passes."
)
@click.option(
    "--mixed",
    metavar="FORMATS",
    help="With --max-bytes: formats that linears may have instead (w4-g32,w8-g64), where bytes "
    "save most.",
)
@click.option(
    "--activations",
    metavar="RULE",
    help="Of 8-bit rows (smoothquant, or --bits 8 --group-size row): row, hadamard64, static, "
    "outliersM or hadamard64+outliersM.  [default: scaled in groups of 128]",
)
@click.option("--requantize", is_flag=True, help="Accept a model that is quantized already.")
@click.option("--dry-run", is_flag=True, help="Say what it would come to, and stop.")
@options.threads
@options.json
def quantize(
    model: str,
    output: Path,
    method: str,
    bits: int,
    group_size: str,
    sym: bool,
    act_order: str,
    damp: float,
    fp8: str,
    format: str,
    traffic: Path | None,
    samples: int | None,
    window: int,
    general_share: float,
    seed: int,
    max_bytes: int | None,
    keep: list[str] | None,
    gate: str,
    auto: bool,
    mixed: str | None,
    activations: str | None,
    requantize: bool,
    dry_run: bool,
    threads: int | None,
    json: bool,
) -> int:
    """Quantize a model and judge it against itself in bf16.

    A run that was stopped goes on where it was. The folder holds quantization.json: what was done to
    every layer, on how many tokens, with what error.
    """
    from trivet.errors import ConfigError
    from trivet.evaluate import default_ledger
    from trivet.quantization import quantize as run

    out = Output(json)
    _refuse_unused(method, format, is_auto=auto, activations=activations, mixed=mixed)
    if group_size != "row" and not group_size.isdecimal():
        raise ConfigError("group_size", group_size, "32, 64, 128, 256 or row")
    with _progress(out) as progress:
        done = run(
            model,
            output,
            method=method,
            bits=bits,
            group_size=None if group_size == "row" else int(group_size),
            sym=sym,
            act_order=act_order,
            damp=damp,
            format=format,
            traffic=traffic,
            samples=samples,
            window=window,
            general_share=general_share,
            seed=seed,
            max_bytes=max_bytes,
            keep=keep or (),
            gate=gate,
            fp8=fp8,
            requantize=requantize,
            dry_run=dry_run,
            auto=auto,
            mixed=mixed,
            activations=activations,
            threads=threads,
            evaluate={"ledger_path": default_ledger()},
            progress=progress,
            announce=lambda prediction: _announce(out, prediction),
        )
    _show(out, done)
    out.result(done.as_json())
    return 0 if dry_run or done.verdict in (None, "pass") else 1


def _refuse_unused(
    method: str, format: str, *, is_auto: bool, activations: str | None, mixed: str | None
) -> None:
    """Raises ConfigError: an option is given that the method does not look at."""
    from trivet.errors import ConfigError

    context = click.get_current_context()
    values: dict[str, object] = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    is_solved = is_auto or method in ("gptq", "awq+gptq")
    reads_texts = method not in ("none", "rtn", "fp8") or is_auto or bool(activations or mixed)
    is_file = format.startswith("gguf:") or method == "kquant"
    has_grid = method not in ("none", "smoothquant", "fp8") and not is_file
    without: dict[str, tuple[bool, str]] = {
        "method": (is_auto, "nothing with --auto, which walks its own order"),
        "act_order": (not is_solved, "nothing without --method gptq or awq+gptq"),
        "damp": (not is_solved, "nothing without --method gptq or awq+gptq"),
        "fp8": (method != "fp8", "nothing without --method fp8"),
    }
    for name in ("traffic", "samples", "window", "general_share"):
        without[name] = (not reads_texts, f"nothing with --method {method}, which reads no texts")
    for name, own in (("bits", 8), ("group_size", "row"), ("sym", True)):
        allowed = f"nothing with {'a GGUF type' if is_file else f'--method {method}'}"
        is_own = method == "smoothquant" and values.get(name) == own
        without[name] = (not has_grid and not is_own, f"{allowed}, which says it itself")
        if is_auto:
            without[name] = (True, "nothing with --auto, which walks its own order")
    for name, (is_unused, allowed) in without.items():
        if name in values and is_unused:
            raise ConfigError(name, values[name], allowed)


@contextmanager
def _progress(out: Output) -> Iterator[Callable[[str, float, float], None]]:
    """A bar with the time left, from the speed since the part of the work began."""
    started: dict[str, tuple[float, float]] = {}
    with out.progress("quantize", 1.0, at_once=True) as bar:

        def report(what: str, done: float, total: float) -> None:
            now = time.monotonic()
            since, first = started.setdefault(what, (now, done))
            label = what
            if done > first and total > done:
                left = (now - since) / (done - first) * (total - done)
                label = f"{what} {done:.0f}/{total:.0f}, about {_time(left)} left"
            bar.label(label)
            bar.set(done / total if total else 0.0)

        yield report


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _announce(out: Output, prediction: Prediction) -> None:
    """What is known before the hours of work."""
    share = prediction.bytes / prediction.source_bytes
    stored = prediction.bytes / prediction.stored_bytes
    rows: list[tuple[str, object]] = [
        ("bytes", f"{prediction.bytes:,} ({share:.0%} of bf16)"),
        (
            "source",
            f"{prediction.stored_bytes:,} bytes as stored, {prediction.stored_dtype};"
            f" the result is {stored:.0%} of them",
        ),
        ("memory", f"about {prediction.memory_bytes / 2**20:,.0f} MiB"),
    ]
    if prediction.targets:
        counts = ", ".join(f"{count} x {name}" for name, count in prediction.targets.items())
        rows.append((prediction.counted, counts))
    for name, answer in prediction.loaders.items():
        if isinstance(answer, dict):
            said = f"{'yes' if answer['loads'] else 'no'}: {answer['because']}"
            rows.append((name, said if answer["tried"] else f"{said} (by its code)"))
    if "max_tensor_parallel" in prediction.loaders:
        rows.append(("tensor parallel", f"up to {prediction.loaders['max_tensor_parallel']}"))
    out.note("predicted")
    for label, value in rows:
        out.note(f"  {label:<16}{value}")


def _show(out: Output, done: Quantized) -> None:
    if done.outcome is None:
        return
    linears = done.outcome.proof["linears"]
    ratios = [p["error_after"] / p["error_before"] for p in linears if p["error_before"]]
    rows: list[tuple[str, object]] = [
        ("path", done.path),
        ("bytes", f"{done.outcome.bytes:,}"),
        ("seconds", number(done.seconds, 4)),
        ("verdict", done.verdict or "not asked for"),
    ]
    if ratios:
        mean = number(sum(ratios) / len(ratios))
        is_measured = any(linear["tokens"] for linear in linears)
        name = "output error" if is_measured else "weight error"
        rows.append((name, f"{mean} of round to nearest's, mean over {len(ratios)} linears"))
    if done.gate is not None:
        rows += [("reason", reason) for reason in done.gate.get("reasons", [])[:4]]
        if done.verdict != "pass" and done.gate.get("next_step"):
            rows.append(("next", done.gate["next_step"]))
    rows += [("warning", warning) for warning in done.outcome.warnings]
    rows += [(attempt["name"], attempt["verdict"]) for attempt in done.attempts]
    out.facts("quantized", rows)
