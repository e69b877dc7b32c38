"""`trivet info`: what a model is, how it is stored, whether it fits; or what this machine can do."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer

from trivet.cli import options
from trivet.cli.output import Output


def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Without it: the machine.", show_default=False),
    ] = None,
    weights: options.Weights = None,
    kv: options.KV = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    memory_utilization: options.MemoryUtilization = None,
    kv_bytes: options.KVBytes = None,
    json: options.Json = False,
) -> int:
    """Describe a model, or the machine."""
    from trivet import __version__
    from trivet.native import isa_report
    from trivet.sizing import available_threads, cpu_quota, format_bytes, machine_memory

    out = Output(json)
    memory = machine_memory()
    report = isa_report()
    machine: dict[str, Any] = {
        "version": __version__,
        "isa": report.active,
        "isa_forced": report.forced,
        "isa_levels": {level: report.refused.get(level, "available") for level in report.levels},
        "threads": threads or available_threads(),
        "cpu_quota": cpu_quota(),
        "memory": dataclasses.asdict(memory),
    }
    result: dict[str, Any] = {"machine": machine}
    if model is not None:
        result |= _model(
            out,
            model,
            weights=weights,
            kv=kv,
            threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            memory_utilization=memory_utilization,
            kv_bytes=kv_bytes,
        )
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


def _model(out: Output, model: str, **given: Any) -> dict[str, Any]:
    """Print the tables of a model; returns its part of the JSON object."""
    from trivet.config import KVFormat, MemoryConfig, ModelConfig
    from trivet.loader import load_model
    from trivet.sizing import format_bytes, render_plan

    name, chosen = options.settings(model, **given)
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
    return {
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


def _role(name: str) -> str:
    """``layers.3.qkv`` -> ``layers.*.qkv``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
