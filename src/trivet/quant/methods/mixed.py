"""Mixed precision: each unit gets the format in which its bytes save most, as far as a budget goes.

A unit is what engines run as one matrix: q, k, v; o; gate, up; down of a layer. Its sensitivity is
measured: the divergence of the model's next-token distribution when this unit alone is in the plan's
own format. All units are measured in one pass over the layers: every variant is a copy of the hidden
states that leaves the common path at its layer, so one layer's weights are in memory at a time.

The divergence in another format is the measured one scaled by the ratio of the squared weight errors,
and those of several units are taken to add up; what a mix really costs the gate measures. Of the sum's
least value under the budget the choice is within one unit's step: formats of a unit off the lower
convex hull of bytes and divergence never pay, and the steps along the hulls are taken by what they
save per byte (the fractional relaxation of the multiple-choice knapsack; Sinha and Zoltners 1979).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from trivet.errors import ConfigError
from trivet.models import Model
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float
from trivet.quant.blas import Workers
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.rtn import quantize_rtn
from trivet.quant.observe import LayerWeights, Stream
from trivet.quant.plan import FUSED, Plan, Target, target_bytes, unit_name

_HEAD_COLUMNS = 8192  # of the vocabulary at a time


@dataclasses.dataclass(frozen=True)
class Option:
    """A unit in one format: divergence in nats per token, and bytes."""

    target: Grid
    kl: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class Unit:
    """One fused unit, first in the plan's own format, then in the others."""

    layer: int
    roles: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def name(self) -> str:
        return unit_name(self.layer, self.roles)

    def hull(self) -> list[Option]:
        """The options that may pay, fewest bytes first: each step saves less per byte than the last."""
        found: list[Option] = []
        for option in sorted(self.options, key=lambda o: (o.bytes, o.kl)):
            if found and option.kl >= found[-1].kl:
                continue
            while len(found) > 1 and _gain(found[-1], option) >= _gain(found[-2], found[-1]):
                found.pop()
            found.append(option)
        return found


def _gain(below: Option, above: Option) -> float:
    """Divergence saved per byte."""
    return (below.kl - above.kl) / max(above.bytes - below.bytes, 1)


def measure_units(
    model: Model,
    sequences: Sequence[Sequence[int]],
    own: Grid,
    others: Sequence[Grid],
    workers: Workers,
) -> list[Unit]:
    """The sensitivity of every unit on the given token ids. Call it with BLAS on one thread."""
    stream = Stream(model, sequences, [], workers)
    num_base = len(stream.batches)
    base_batches = list(stream.batches)
    grids = (own, *others)
    found: list[tuple[int, tuple[str, ...], list[float]]] = []
    for layer in range(model.spec.num_layers):
        weights = LayerWeights.read(model, layer)
        start = list(stream.hidden[:num_base])
        stream.advance(weights)
        common, common_batches = stream.hidden, stream.batches
        for roles in FUSED:
            changed = weights.copy()
            errors = [0.0] * len(grids)
            for role in roles:
                weight = weights.matrices[role]
                for at, grid in enumerate(grids):
                    values = dequantize(quantize_rtn(weight, grid))
                    errors[at] += float(np.square(values - weight).sum(dtype=np.float64))
                    if at == 0:
                        changed.matrices[role] = values
            stream.hidden, stream.batches = list(start), list(base_batches)
            stream.advance(changed)
            common = common + stream.hidden
            common_batches = common_batches + base_batches
            found.append((layer, roles, errors))
        stream.hidden, stream.batches = common, common_batches
    shapes = matrix_shapes(model.spec)
    units = []
    for (layer, names, errors), kl in zip(
        found, _divergences(model, stream, num_base), strict=True
    ):
        options = tuple(
            Option(
                grid,
                kl * (error / errors[0] if errors[0] else 1.0),
                sum(target_bytes(grid, *shapes[role]) for role in names),
            )
            for grid, error in zip(grids, errors, strict=True)
        )
        units.append(Unit(layer, names, options))
    return units


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


def choose(units: Sequence[Unit], budget_bytes: int) -> dict[str, Option]:
    """The option of each unit, by name, within a budget that the smallest of all fit."""
    hulls = {unit.name: unit.hull() for unit in units}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = budget_bytes - sum(option.bytes for option in chosen.values())
    steps = [
        (-_gain(below, above), order, unit.name, below, above)
        for order, unit in enumerate(units)
        for below, above in itertools.pairwise(hulls[unit.name])
    ]
    for _, _, name, below, above in sorted(steps, key=lambda step: step[:2]):
        cost = above.bytes - below.bytes
        if cost <= left and chosen[name] == below:
            chosen[name] = above
            left -= cost
    return chosen


def mixed_plan(plan: Plan, units: Sequence[Unit], max_bytes: int) -> Plan:
    """The plan with the chosen formats; linears that are kept by hand stay as they are.

    Raises ConfigError: the smallest formats are above the budget.
    """
    free = [unit for unit in units if _is_own(plan, unit)]
    fixed = plan.bytes - sum(unit.options[0].bytes for unit in free)
    least = fixed + sum(min(option.bytes for option in unit.options) for unit in free)
    if least > max_bytes:
        raise ConfigError("max_bytes", max_bytes, f"at least the {least} bytes of the smallest mix")
    chosen = choose(free, max_bytes - fixed)
    targets: dict[tuple[int, str], Target] = dict(plan.targets)
    for unit in free:
        targets |= {(unit.layer, role): chosen[unit.name].target for role in unit.roles}
    return dataclasses.replace(plan, targets=targets)


def _is_own(plan: Plan, unit: Unit) -> bool:
    return all(plan.targets[unit.layer, role] == unit.options[0].target for role in unit.roles)
