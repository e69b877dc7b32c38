"""`trivet quantize`: weights into fewer bits, proved before they get their name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trivet.cli import options
from trivet.cli.output import Output, number

if TYPE_CHECKING:
    from trivet.quantization import Prediction, Quantized


def quantize(
    model: options.ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; must not exist.")
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="M", help="none, rtn, gptq, awq, awq+gptq, smoothquant, fp8 or kquant."
        ),
    ] = "gptq",
    bits: Annotated[int, typer.Option(metavar="B", help="2, 3, 4 or 8.")] = 4,
    group_size: Annotated[
        str, typer.Option(metavar="G", help="Columns that share a scale: 32, 64, 128, 256 or row.")
    ] = "64",
    sym: Annotated[bool, typer.Option(help="Symmetric codes, or with a zero point.")] = True,
    act_order: Annotated[
        str,
        typer.Option(
            metavar="O",
            help="static (columns by importance, groups in place), desc_act (groups by importance) or "
            "none.",
        ),
    ] = "static",
    damp: Annotated[
        float, typer.Option(metavar="X", help="Share of the Hessian's mean diagonal added to it.")
    ] = 0.01,
    fp8: Annotated[
        str, typer.Option("--fp8", metavar="S", help="Scale per tensor, channel or block.")
    ] = "channel",
    format: Annotated[
        str,
        typer.Option(
            metavar="F",
            help="native, gptq, gptq_v2, awq, compressed-tensors, fp8 or gguf:TYPE. native is what "
            "Trivet reads best.",
        ),
    ] = "native",
    traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibrate on these prompts or chats (JSONL) or this text.  [default: prose and code]",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Windows to calibrate on.")] = 128,
    window: Annotated[int, typer.Option(metavar="N", help="Tokens of one window at most.")] = 512,
    general_share: Annotated[
        float,
        typer.Option(metavar="X", help="Share of prose and code mixed into the traffic."),
    ] = 0.25,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of what is drawn.")] = 0,
    max_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Refuse a result above this.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=FORMAT",
            help="Another format for linears whose name matches: bf16, w8-g64, w4-g32-zp, w8-row, "
            "fp8-channel; once for each.",
        ),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(metavar="G", help="fast, full or off: DIR appears only on pass, or with off."),
    ] = "fast",
    auto: Annotated[
        bool,
        typer.Option("--auto", help="8 bits first, then down to 4 bits until the gate passes."),
    ] = False,
    mixed: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="With --max-bytes: linears that hurt most get this format (w8-g64) while bytes last.",
        ),
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Accept a model that is quantized already.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would come to, and stop.")
    ] = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> int:
    """Quantize a model and judge it against itself in bf16.

    A run that was stopped goes on where it was. The folder holds quantization.json: what was done to
    every layer, on how many tokens, with what error.
    """
    from trivet.errors import ConfigError
    from trivet.evaluate import default_ledger
    from trivet.quantization import quantize as run

    out = Output(json)
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
            threads=threads,
            evaluate={"ledger_path": default_ledger()},
            progress=progress,
            announce=lambda prediction: _announce(out, prediction),
        )
    _show(out, done)
    out.result(done.as_json())
    return 0 if dry_run or done.verdict in (None, "pass") else 1


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
    rows: list[tuple[str, object]] = [
        ("bytes", f"{prediction.bytes:,} ({share:.0%} of bf16)"),
        ("memory", f"about {prediction.memory_bytes / 2**20:,.0f} MiB"),
        ("linears", ", ".join(f"{count} x {name}" for name, count in prediction.targets.items())),
    ]
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
        rows.append(
            ("output error", f"{mean} of round to nearest's, mean over {len(ratios)} linears")
        )
    if done.gate is not None:
        rows += [("reason", reason) for reason in done.gate.get("reasons", [])[:4]]
        if done.verdict != "pass" and done.gate.get("next_step"):
            rows.append(("next", done.gate["next_step"]))
    rows += [("warning", warning) for warning in done.outcome.warnings]
    rows += [(attempt["name"], attempt["verdict"]) for attempt in done.attempts]
    out.facts("quantized", rows)
