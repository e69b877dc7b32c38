"""What steps must read and multiply, and the shares of this machine's ceilings that they reached.

mbu  bytes that the steps must read / (their time x stream bandwidth)
mfu  seconds that their multiply-adds take at the kernels' own rate with weights in cache / their time:
     matrices at the rate of the weights' arithmetic, attention at that of bf16

Both rates are measured beside the steps. The nominal peak of the processor is given too, because a
slow kernel makes its own rate a low ceiling: operations per cycle of the ISA level times the highest
clock times the threads, an orientation and not a measurement.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trivet import native
from trivet.bench.matrix_rate import matrix_rate
from trivet.bench.profile import PARTS, PHASES, Phase
from trivet.loader import LoadedModel

CEILING_TOO_LOW = "ceiling too low: measured busy"  # said of a share above 1

# Operations per cycle and core (one multiply-add is two), for 16-bit and for integer weights. On
# levels without bf16 products the fp32 rate counts. Two vector units are assumed.
_OPS_PER_CYCLE = {
    "generic": (8, 8),
    "avx2": (32, 64),
    "avx512": (64, 256),
    "amx": (1024, 2048),
}


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """What a model's steps must read and multiply.

    layer_bytes     weights read by every step
    head_bytes      weights read by a step that computes logits
    kv_bytes        KV of one token, all layers
    layer_macs      multiply-adds of the layers' matrices, per row
    head_macs       multiply-adds of the head, per row with logits
    attention_macs  multiply-adds of the attention, per pair of a row and a token it attends
    num_layers      of the model
    arithmetic      what the matrices are multiplied in: ``int8`` or ``bf16``
    """

    layer_bytes: int
    head_bytes: int
    kv_bytes: int
    layer_macs: int
    head_macs: int
    attention_macs: int
    num_layers: int
    arithmetic: str

    @property
    def step_bytes(self) -> int:
        """Weight bytes of a decode step: all but an embedding table that is not also the head."""
        return self.layer_bytes + self.head_bytes

    def bytes_of(self, work: Phase) -> int:
        """Bytes that the steps must read: weights once a step, and the KV of their context."""
        return (
            work.steps * self.layer_bytes
            + work.logit_steps * self.head_bytes
            + work.context * self.kv_bytes
        )

    def macs_of(self, work: Phase) -> tuple[int, int]:
        """Multiply-adds of the matrices, and of the attention."""
        matrices = work.rows * self.layer_macs + work.logit_rows * self.head_macs
        return matrices, work.pairs * self.attention_macs


def step_costs(model: LoadedModel) -> StepCosts:
    """What the steps of a loaded model cost."""
    spec, tensors = model.packed.spec, model.packed.tensors
    matrices = [tensor for tensor in tensors.values() if tensor.kind != "f32"]
    layers = [tensor for tensor in matrices if tensor.name.startswith("layers.")]
    embed, head = tensors.get("embed"), tensors["head"]
    not_read = head.num_bytes + (embed.num_bytes if embed is not None else 0)
    return StepCosts(
        layer_bytes=model.packed.weight_bytes - not_read,
        head_bytes=head.num_bytes,
        kv_bytes=model.kv_bytes_per_token,
        layer_macs=sum(tensor.n * tensor.k for tensor in layers),
        head_macs=head.n * head.k,
        attention_macs=2 * spec.num_layers * spec.num_heads * spec.head_dim,
        num_layers=spec.num_layers,
        arithmetic="bf16"
        if all(tensor.kind in ("bf16", "int4_bf16", "fp8") for tensor in layers)
        else "int8",
    )


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine did at one moment: bytes and multiply-adds per second.

    bytes_s       median of several passes over memory, as a step's time is one of many steps
    best_bytes_s  the fastest pass
    """

    bytes_s: float
    best_bytes_s: float
    int8_macs_s: float
    bf16_macs_s: float

    def between(self, later: Ceilings) -> Ceilings:
        """The mean of this one and a later one, for what ran between them."""
        return Ceilings(
            (self.bytes_s + later.bytes_s) / 2,
            (self.best_bytes_s + later.best_bytes_s) / 2,
            (self.int8_macs_s + later.int8_macs_s) / 2,
            (self.bf16_macs_s + later.bf16_macs_s) / 2,
        )

    def seconds_of(self, costs: StepCosts, work: Phase) -> tuple[float, float]:
        """Seconds that work takes at least: to read, and to multiply."""
        matrices, attention = costs.macs_of(work)
        rate = self.bf16_macs_s if costs.arithmetic == "bf16" else self.int8_macs_s
        reading = costs.bytes_of(work) / self.bytes_s
        return reading, matrices / rate + attention / self.bf16_macs_s


def measure_ceilings(num_bytes: int, isa: str, threads: int) -> Ceilings:
    """Stream ``num_bytes`` and multiply with the kernels of a level, now; about 0.3 s."""
    rates = native.stream_rates(num_bytes, threads)
    return Ceilings(
        statistics.median(rates),
        max(rates),
        matrix_rate(isa, "int8", threads),
        matrix_rate(isa, "bf16", threads),
    )


def phase_figures(
    costs: StepCosts, runs: Sequence[Mapping[str, Phase]], ceilings: Sequence[Ceilings]
) -> dict[str, dict[str, Any] | None]:
    """The phases of all runs as JSON values; None for one that had no steps.

    ceilings  of each run

    Seconds, bytes and multiply-adds are means over the runs, so that they add up; ``shares`` are those
    of ``parts_s`` in ``wall_s``. mbu and mfu are medians over the runs; ``note`` names those above 1.
    """
    return {name: _figures(costs, [run[name] for run in runs], ceilings) for name in PHASES}


def _figures(
    costs: StepCosts, runs: Sequence[Phase], ceilings: Sequence[Ceilings]
) -> dict[str, Any] | None:
    if not all(run.steps for run in runs):
        return None
    total = Phase()
    for run in runs:
        total.add(run)
    floors = [ceiling.seconds_of(costs, run) for run, ceiling in zip(runs, ceilings, strict=True)]
    mbus = [reading / run.wall_s for (reading, _), run in zip(floors, runs, strict=True)]
    mfus = [multiplying / run.wall_s for (_, multiplying), run in zip(floors, runs, strict=True)]
    matrices, attention = costs.macs_of(total)
    shares = {"mbu": statistics.median(mbus), "mfu": statistics.median(mfus)}
    return {
        "steps": total.steps / len(runs),
        "rows": total.rows / len(runs),
        "wall_s": total.wall_s / len(runs),
        "parts_s": {part: total.parts_s[part] / len(runs) for part in PARTS},
        "shares": {part: total.parts_s[part] / total.wall_s for part in PARTS},
        "moved_bytes": costs.bytes_of(total) / len(runs),
        "matrix_macs": matrices / len(runs),
        "attention_macs": attention / len(runs),
        **shares,
        "spread": {"mbu": [min(mbus), max(mbus)], "mfu": [min(mfus), max(mfus)]},
        "note": note_of_shares(shares),
    }


def note_of_shares(shares: Mapping[str, float | None]) -> str | None:
    """What must be said beside shares of ceilings by name; None: nothing, all are possible."""
    above = [name for name, share in shares.items() if share is not None and share > 1]
    return f"{', '.join(above)}: {CEILING_TOO_LOW}" if above else None


def nominal_peak_ops(isa: str, weights: str, threads: int) -> float | None:
    """Operations per second the cores could do at best; None when the clock is unknown."""
    import psutil

    frequency = psutil.cpu_freq()
    if frequency is None:
        return None
    megahertz = float(frequency.max or frequency.current or 0.0)
    level = next((name for name in sorted(_OPS_PER_CYCLE, reverse=True) if name in isa), "generic")
    ops = _OPS_PER_CYCLE[level][0 if weights == "bf16" else 1]
    return megahertz * 1e6 * ops * threads if megahertz > 0 else None


def nominal_mfu(phase: Mapping[str, Any], peak_ops: float | None) -> float | None:
    """Share of the nominal peak that a phase of `phase_figures` reached."""
    if peak_ops is None:
        return None
    return float(2 * (phase["matrix_macs"] + phase["attention_macs"]) / phase["wall_s"] / peak_ops)
