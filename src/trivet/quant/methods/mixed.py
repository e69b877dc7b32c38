"""Mixed precision: the linears that hurt most get more bits, as far as a byte budget goes.

A unit is what engines run as one matrix: q, k, v; o; gate, up; down of a layer. Its sensitivity is
measured: the divergence of the model's next-token distribution when this unit alone is in the low
format. All units are measured in one pass over the layers: every variant is a copy of the hidden
states that leaves the common path at its layer, so one layer's weights are in memory at a time.

The divergence in the high format is the low one scaled by the ratio of the squared weight errors, and
those of several units are taken to add up; what a mix really costs the gate measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trivet.models import Model
from trivet.models.reference import to_float
from trivet.quant.blas import Workers
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.rtn import quantize_rtn
from trivet.quant.observe import LayerWeights, Stream
from trivet.quant.plan import FUSED, Plan, Target, target_bytes, unit_name

_HEAD_COLUMNS = 8192  # of the vocabulary at a time


@dataclasses.dataclass(frozen=True)
class Unit:
    """One fused unit: divergence in nats per token and bytes, low and high."""

    layer: int
    roles: tuple[str, ...]
    low_kl: float
    high_kl: float
    low_bytes: int
    high_bytes: int

    @property
    def name(self) -> str:
        return unit_name(self.layer, self.roles)

    @property
    def gain(self) -> float:
        """Divergence saved per byte by going up."""
        return (self.low_kl - self.high_kl) / max(self.high_bytes - self.low_bytes, 1)


def measure_units(
    model: Model, sequences: Sequence[Sequence[int]], low: Grid, high: Grid, workers: Workers
) -> list[Unit]:
    """The sensitivity of every unit on the given token ids. Call it with BLAS on one thread."""
    stream = Stream(model, sequences, [], workers)
    num_base = len(stream.batches)
    base_batches = list(stream.batches)
    found: list[tuple[int, tuple[str, ...], float, int, int]] = []
    for layer in range(model.spec.num_layers):
        weights = LayerWeights.read(model, layer)
        start = list(stream.hidden[:num_base])
        stream.advance(weights)
        common, common_batches = stream.hidden, stream.batches
        for roles in FUSED:
            changed = weights.copy()
            below = above = 0.0
            low_bytes = high_bytes = 0
            for role in roles:
                weight = weights.matrices[role]
                values = dequantize(quantize_rtn(weight, low))
                changed.matrices[role] = values
                finer = dequantize(quantize_rtn(weight, high))
                below += float(np.square(values - weight).sum(dtype=np.float64))
                above += float(np.square(finer - weight).sum(dtype=np.float64))
                low_bytes += target_bytes(low, *weight.shape)
                high_bytes += target_bytes(high, *weight.shape)
            stream.hidden, stream.batches = list(start), list(base_batches)
            stream.advance(changed)
            common = common + stream.hidden
            common_batches = common_batches + base_batches
            ratio = above / below if below else 1.0
            found.append((layer, roles, ratio, low_bytes, high_bytes))
        stream.hidden, stream.batches = common, common_batches
    divergences = _divergences(model, stream, num_base)
    return [
        Unit(layer, roles, kl, kl * ratio, low_bytes, high_bytes)
        for (layer, roles, ratio, low_bytes, high_bytes), kl in zip(found, divergences, strict=True)
    ]


def _divergences(model: Model, stream: Stream, num_base: int) -> list[float]:
    """Mean KL(base || variant) of every variant, each ``num_base`` batches after the base's own."""
    spec = model.spec
    head = to_float(model.matrix("embed" if spec.tied_embeddings else "head"))
    inputs = stream.normed(model.norm("final_norm"))

    def log_probabilities(index: int) -> Float32:
        x = inputs(index)
        logits = np.empty((len(x), len(head)), np.float32)
        for begin in range(0, len(head), _HEAD_COLUMNS):
            logits[:, begin : begin + _HEAD_COLUMNS] = x @ head[begin : begin + _HEAD_COLUMNS].T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(
            np.float32
        )
        return logits

    base = [log_probabilities(index) for index in range(num_base)]
    weights = [np.exp(rows) for rows in base]
    tokens = sum(len(rows) for rows in base)

    def divergence(index: int) -> float:
        own = log_probabilities(index)
        place = index % num_base
        terms = (weights[place] * (base[place] - own)).sum(axis=1, dtype=np.float64)
        return float(np.maximum(terms, 0).sum())

    sums = list(stream.workers.map(divergence, range(num_base, len(stream.hidden))))
    return [sum(sums[begin : begin + num_base]) / tokens for begin in range(0, len(sums), num_base)]


def choose(units: Sequence[Unit], budget_bytes: int) -> set[str]:
    """Names of the units that go up: most divergence saved per byte first, while bytes are left."""
    chosen: set[str] = set()
    left = budget_bytes - sum(unit.low_bytes for unit in units)
    for unit in sorted(units, key=lambda u: (-u.gain, u.layer, u.roles)):
        cost = unit.high_bytes - unit.low_bytes
        if unit.gain > 0 and cost <= left:
            chosen.add(unit.name)
            left -= cost
    return chosen


def mixed_plan(plan: Plan, units: Sequence[Unit], high: Grid, max_bytes: int) -> Plan:
    """The plan with the chosen units in ``high``; linears that are kept by hand stay as they are."""
    free = [unit for unit in units if _is_low(plan, unit)]
    fixed = plan.bytes - sum(unit.low_bytes for unit in free)
    chosen = choose(free, max_bytes - fixed)
    targets: dict[tuple[int, str], Target] = dict(plan.targets)
    for unit in free:
        if unit.name in chosen:
            targets |= {(unit.layer, role): high for role in unit.roles}
    return Plan(plan.spec, targets)


def _is_low(plan: Plan, unit: Unit) -> bool:
    return sum(plan.num_bytes(unit.layer, role) for role in unit.roles) == unit.low_bytes
