"""`trivet info`: what a model is, how it is stored, whether it fits; or what this machine can do."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from trivet.cli import options
from trivet.cli.commands import Argument, Command
from trivet.cli.output import Output, number

if TYPE_CHECKING:
    from trivet.bench.ceiling import StepCosts
    from trivet.loader import LoadedModel


@click.command(cls=Command)
@click.argument(
    "model", cls=Argument, metavar="[MODEL]", required=False, help="Without it: the machine."
)
@options.weights
@options.kv
@options.threads
@options.max_model_len
@options.max_num_seqs
@options.memory_utilization
@options.kv_bytes
@click.option(
    "--roofline",
    is_flag=True,
    help="Measure memory bandwidth, matrix rate of every level and the cost of handing work to "
    "threads; measured once and kept in the user's cache folder.",
)
@click.option("--fresh", is_flag=True, help="With --roofline: measure again.")
@options.json
@click.pass_context
def info(
    context: click.Context,
    /,
    model: str | None,
    threads: int | None,
    roofline: bool,
    fresh: bool,
    json: bool,
    **others: object,
) -> int:
    """Describe a model, or the machine."""
    from trivet import __version__
    from trivet.errors import ConfigError
    from trivet.native import isa_report
    from trivet.sizing import available_threads, cpu_quota, format_bytes, machine_memory

    if fresh and not roofline:
        raise ConfigError("fresh", True, "--fresh together with --roofline")
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError("threads", threads, "1 to 1024")
    if model is None:  # the options left are about a model
        for name, value in others.items():
            if value is not None:
                raise ConfigError(name, value, f"--{name.replace('_', '-')} together with MODEL")
    out = Output(json)
    memory = machine_memory()
    report = isa_report()
    machine: dict[str, Any] = {
        "version": __version__,
        "isa": report.active,
        "isa_forced": report.forced,
        "isa_levels": {level: report.refused.get(level, "available") for level in report.levels},
        "threads": available_threads() if threads is None else threads,
        "cpu_quota": cpu_quota(),
        "memory": dataclasses.asdict(memory),
    }
    result: dict[str, Any] = {"machine": machine}
    if model is not None:
        described, loaded = _model(out, *options.settings_of(context))
        result |= described
        if roofline:
            from trivet.bench.ceiling import step_costs

            result["roofline"] = _roofline(out, loaded.threads, step_costs(loaded), fresh)
    elif roofline:
        result["roofline"] = _roofline(out, machine["threads"], None, fresh)
    rows = [
        ("trivet", __version__),
        ("ISA level", report.active + (" (forced)" if report.forced else "")),
        *((f"  {level}", reason) for level, reason in machine["isa_levels"].items()),
        ("threads", machine["threads"]),
        (
            "memory",
            f"{format_bytes(memory.available_bytes)} left of {format_bytes(memory.total_bytes)}"
            f" ({memory.source})",
        ),
    ]
    out.facts("machine", rows)
    out.result(result)
    return 0


def _model(out: Output, name: str, chosen: dict[str, Any]) -> tuple[dict[str, Any], LoadedModel]:
    """Print the tables of a model; returns its part of the JSON object, and the model."""
    from trivet.config import KVFormat, MemoryConfig, ModelConfig
    from trivet.loader import load_model
    from trivet.sizing import format_bytes, render_plan

    memory = MemoryConfig(
        **{key: chosen[key] for key in ("memory_utilization", "kv_bytes") if key in chosen}
    )
    chosen_kv = KVFormat.parse(chosen.get("kv", "bf16"))
    config = ModelConfig(
        model=name,
        kv=chosen_kv,
        **{key: chosen[key] for key in ("weights", "threads", "max_model_len") if key in chosen},
    )
    with out.loading() as loading:
        loaded = load_model(config, loading)
    packed, spec = loaded.packed, loaded.packed.spec
    out.facts(
        name,
        [
            ("family", spec.family),
            ("parameters", f"{spec.num_parameters:,}"),
            ("layers", spec.num_layers),
            ("hidden, ffn", f"{spec.hidden_size}, {spec.ffn_size}"),
            (
                "heads, KV heads, head dim",
                f"{spec.num_heads}, {spec.num_kv_heads}, {spec.head_dim}",
            ),
            ("vocabulary", spec.vocab_size),
            ("context", spec.max_positions),
            ("weights", loaded.weights_form),
            ("weight bytes", format_bytes(packed.weight_bytes)),
            ("KV", f"{config.kv.value}, {format_bytes(loaded.kv_bytes_per_token)} per token"),
            ("packed cache", packed.path),
        ],
    )
    tensors = [dataclasses.asdict(tensor) for tensor in packed.report]
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for tensor in packed.report:
        key = (_role(tensor.name), tensor.source, tensor.form, tensor.exact)
        groups.setdefault(key, []).append(tensor)
    out.table(
        "",
        ("tensors", "count", "source", "packed as", "", "error"),
        [
            (
                role,
                len(members),
                source,
                form,
                "exact" if exact else "requantized",
                f"{max(tensor.rel_error for tensor in members):.4f}",
            )
            for (role, source, form, exact), members in groups.items()
        ],
    )
    for note in packed.notes:
        out.note(note)
    plan = loaded.plan(memory, max_num_seqs=chosen.get("max_num_seqs", 32), max_step_tokens=512)
    print(render_plan(plan), file=sys.stderr if out.as_json else sys.stdout)
    described = {
        "model": name,
        "spec": spec.to_json(),
        "num_parameters": spec.num_parameters,
        "weights": loaded.weights_form,
        "kv": config.kv.value,
        "weight_bytes": packed.weight_bytes,
        "kv_bytes_per_token": loaded.kv_bytes_per_token,
        "numerics_id": loaded.runner.numerics_id,
        "packed_cache": str(packed.path),
        "tensors": tensors,
        "is_exact": all(tensor.exact for tensor in packed.report),
        "notes": list(packed.notes),
        "memory_plan": plan.as_json(),
    }
    return described, loaded


def _roofline(out: Output, threads: int, costs: StepCosts | None, fresh: bool) -> dict[str, Any]:
    """Print this machine's roofline, with a model's limits; returns its part of the JSON object."""
    import msgspec

    from trivet.bench.roofline import DEFAULT_BYTES, measure
    from trivet.sizing import format_bytes

    num_bytes = DEFAULT_BYTES if costs is None else costs.step_bytes
    with out.progress("roofline", 1.0) as bar:
        measured = measure(num_bytes, threads, fresh=fresh, progress=bar.advance)
    if measured.not_kept is not None:
        out.note(f"roofline not kept, measured again next time: {measured.not_kept}")
    line = measured.roofline
    rows: list[tuple[str, int, float, str]] = [
        (
            f"stream of {format_bytes(stream.num_bytes)}",
            stream.threads,
            stream.bytes_s / 1e9,
            "GB/s",
        )
        for stream in line.streams
        if stream.num_bytes == num_bytes
    ]
    rows += [
        (f"{rate.level} {rate.arithmetic}", rate.threads, rate.macs_s / 1e9, "GMAC/s")
        for rate in line.matrices
    ]
    for handover in line.handovers:
        if handover.threads == 1:
            continue  # nobody to hand anything to
        rows.append(
            ("hand-over to running threads", handover.threads, handover.running_s * 1e6, "us")
        )
        rows.append(
            ("hand-over to sleeping threads", handover.threads, handover.asleep_s * 1e6, "us")
        )
    limits = None if costs is None else line.limits(costs)
    if limits is not None:
        rows += [
            (label, threads, limits[key] * scale, unit)
            for label, key, scale, unit in (
                ("limit of decode, batch 1", "decode_tok_s", 1, "tok/s"),
                ("limit of prefill", "prefill_tok_s", 1, "tok/s"),
                ("hand-overs of a decode step", "handover_s", 1e6, "us"),
            )
        ]
    out.table(
        f"roofline, measured {line.conditions.date}"
        + (" and kept (--fresh measures again)" if measured.is_cached else ""),
        ("", "threads", "", ""),
        [(label, count, number(value, 4), unit) for label, count, value, unit in rows],
    )
    return {
        **msgspec.to_builtins(line),
        "is_cached": measured.is_cached,
        "path": None if measured.path is None else str(measured.path),
        "not_kept": measured.not_kept,
        "num_bytes": num_bytes,
        "bandwidth_bytes_s": line.bytes_s(num_bytes),
        "limits": limits,
    }


def _role(name: str) -> str:
    """``layers.3.qkv`` -> ``layers.*.qkv``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
