"""Mixed precision: each unit gets the format in which its bytes save most, as far as a budget goes.

A unit is what engines run as one matrix: q, k, v; o; gate, up; down of a layer. Its sensitivity is
measured: the divergence of the model's next-token distribution when this unit alone is in the plan's
own format, made by the method itself. (What rounding to nearest costs says little of what GPTQ
leaves.) All units are measured in one pass over the layers: every variant is a copy of the hidden
states that leaves the common path at its layer, so one layer's weights are in memory at a time.

The method also makes every other format of a unit, and its divergence is taken to be the measured one
times the ratio of the squared output errors. On reference B the ratio is right on average (0.81 against
0.80 measured from groups of 64 to 32, 0.91 against 0.91 to zero points), and what single units differ
from it in a measurement is mostly noise, which a choice would follow. Those of several units are taken
to add up; `predicted_kl` in the proof says what the mix then comes to, on the texts measured on. Of the
sum's least value under the budget the choice is within one unit's step: formats of a unit off the
lower convex hull of bytes and divergence never pay, and the steps along the hulls are taken by what
they save per byte (the fractional relaxation of the multiple-choice knapsack; Sinha and Zoltners 1979).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trivet.errors import ConfigError
from trivet.models import Model
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float
from trivet.quant.blas import Workers
from trivet.quant.calibrate import CalibrationSet
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.awq import quantize_clipped
from trivet.quant.methods.gptq import Hessian, output_error, quantize_gptq
from trivet.quant.methods.rtn import quantize_rtn
from trivet.quant.observe import POINTS, Inputs, LayerWeights, Stream
from trivet.quant.plan import FUSED, Plan, Target, target_bytes, target_name, unit_name
from trivet.quant.recipe import Recipe

_HEAD_ROWS = 256  # whose log-probabilities are in memory at a time
_VARIANT_BYTES = 1 << 30  # of hidden states, of all variants together
_MIN_TOKENS, _MAX_TOKENS = 128, 2048  # that divergence is measured on


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
    texts: CalibrationSet,
    grids: Sequence[Grid],
    recipe: Recipe,
    workers: Workers,
    progress: Callable[[int, int], None] | None = None,
) -> list[Unit]:
    """The sensitivity of every unit in every format, the plan's own first.

    texts  what the units are calibrated on; divergence is measured on held-out tokens
    Call it with BLAS on one thread.
    """
    seen = Stream(model, texts.train, [], workers)
    measured = _measured(texts.held_out or texts.train, model)
    stream = Stream(model, measured, [], workers)
    num_base = len(stream.batches)
    base_batches = list(stream.batches)
    variants: list[tuple[int, tuple[str, ...], list[float]]] = []
    for layer in range(model.spec.num_layers):
        if progress is not None:
            progress(layer, model.spec.num_layers)
        weights = LayerWeights.read(model, layer)
        hessians = _hessians(seen, weights, recipe)
        start = list(stream.hidden[:num_base])
        stream.advance(weights)
        common, common_batches = stream.hidden, stream.batches
        for roles in FUSED:
            changed = weights.copy()
            errors = [0.0] * len(grids)
            for role in roles:
                weight, hessian = weights.matrices[role], hessians[role]
                size = output_error(weight, hessian.gram) or 1.0
                for at, grid in enumerate(grids):
                    values = _rounded(weight, role, hessian, grid, recipe, workers)
                    errors[at] += output_error(values - weight, hessian.gram) / size
                    if at == 0:
                        changed.matrices[role] = values
            stream.hidden, stream.batches = list(start), list(base_batches)
            stream.advance(changed)
            common = common + stream.hidden
            common_batches = common_batches + base_batches
            variants.append((layer, roles, errors))
        stream.hidden, stream.batches = common, common_batches
    divergences = _divergences(model, stream, num_base)
    shapes = matrix_shapes(model.spec)
    return [
        Unit(
            layer,
            roles,
            tuple(
                Option(
                    grid,
                    kl * (error / errors[0] if errors[0] else 1.0),
                    sum(target_bytes(grid, *shapes[role]) for role in roles),
                )
                for grid, error in zip(grids, errors, strict=True)
            ),
        )
        for (layer, roles, errors), kl in zip(variants, divergences, strict=True)
    ]


def _measured(sequences: Sequence[Sequence[int]], model: Model) -> list[Sequence[int]]:
    """Of the sequences as many tokens as every variant may hold in memory."""
    spec = model.spec
    per_token = 4 * spec.hidden_size * spec.num_layers * len(FUSED)
    most = min(max(_VARIANT_BYTES // per_token, _MIN_TOKENS), _MAX_TOKENS)
    found: list[Sequence[int]] = []
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(sequences))
    for sequence in (sequences[at] for at in order):  # they come by domain and by length
        left = most - sum(map(len, found))
        if left > 0:
            found.append(sequence[:left])
    return found


def _hessians(stream: Stream, weights: LayerWeights, recipe: Recipe) -> dict[str, Hessian]:
    """Of the input of every linear of a layer; the stream goes through the layer."""
    found: dict[str, Hessian] = {}

    def look(point: str, inputs: Inputs, width: int) -> None:
        stats = stream.observe(inputs, width, sizes=False)[0]
        found.update(
            dict.fromkeys(POINTS[point], Hessian.of(stats.gram, stats.tokens, recipe.gptq))
        )

    spec = stream.spec
    look("attn_in", stream.normed(weights.attn_norm), spec.hidden_size)
    mixed = stream.attention(weights)
    look("o_in", mixed, spec.q_size)
    stream.add_linear(mixed, weights, "o")
    look("ffn_in", stream.normed(weights.mlp_norm), spec.hidden_size)
    gated = stream.gated(weights)
    look("down_in", gated, spec.ffn_size)
    stream.add_linear(gated, weights, "down")
    return found


def _rounded(
    weight: Float32, role: str, hessian: Hessian, grid: Grid, recipe: Recipe, workers: Workers
) -> Float32:
    """A weight as the method leaves it, factors that it folds in left out."""
    if "gptq" in recipe.method:
        return dequantize(quantize_gptq(weight, hessian, grid, recipe.gptq, workers))
    if recipe.method == "awq":
        clip = recipe.clip and role not in ("q", "k")
        return dequantize(quantize_clipped(weight, grid, hessian, workers, clip=clip))
    return dequantize(quantize_rtn(weight, grid))


def _divergences(model: Model, stream: Stream, num_base: int) -> list[float]:
    """Mean KL(base || variant) of every variant, each ``num_base`` batches after the base's own.

    A few rows of all variants at a time: log-probabilities are as wide as the vocabulary.
    """
    spec = model.spec
    head = to_float(model.matrix("embed" if spec.tied_embeddings else "head"))
    inputs = stream.normed(model.norm("final_norm"))

    def log_probabilities(index: int, begin: int) -> Float32:
        logits: Float32 = inputs(index)[begin : begin + _HEAD_ROWS] @ head.T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(
            np.float32
        )
        return logits

    totals = [0.0] * (len(stream.hidden) // num_base - 1)
    for place in range(num_base):
        for begin in range(0, stream.batches[place].num_rows, _HEAD_ROWS):
            base = log_probabilities(place, begin)
            weights = np.exp(base)

            def divergence(
                variant: int,
                place: int = place,
                begin: int = begin,
                base: Float32 = base,
                weights: Float32 = weights,
            ) -> float:
                own = log_probabilities((1 + variant) * num_base + place, begin)
                terms = (weights * (base - own)).sum(axis=1, dtype=np.float64)
                return float(np.maximum(terms, 0).sum())

            for variant, part in enumerate(stream.workers.map(divergence, range(len(totals)))):
                totals[variant] += part
    tokens = sum(batch.num_rows for batch in stream.batches[:num_base])
    return [total / tokens for total in totals]


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


def require_room(plan: Plan, grids: Sequence[Grid], max_bytes: int) -> None:
    """Raises ConfigError: the smallest of the formats, the plan's own first, are above the budget."""
    shapes = matrix_shapes(plan.spec)
    least = plan.bytes
    for layer, roles in itertools.product(range(plan.spec.num_layers), FUSED):
        if _is_free(plan, layer, roles, grids[0]):
            sizes = [sum(target_bytes(g, *shapes[role]) for role in roles) for g in grids]
            least += min(sizes) - sizes[0]
    if least > max_bytes:
        raise ConfigError("max_bytes", max_bytes, f"at least the {least} bytes of the smallest mix")


def mixed_plan(plan: Plan, units: Sequence[Unit], max_bytes: int) -> Plan:
    """The plan with the chosen formats; linears that are kept by hand stay as they are.

    Raises ConfigError: the smallest formats are above the budget.
    """
    require_room(plan, [option.target for option in units[0].options], max_bytes)
    free = [u for u in units if _is_free(plan, u.layer, u.roles, u.options[0].target)]
    fixed = plan.bytes - sum(unit.options[0].bytes for unit in free)
    chosen = choose(free, max_bytes - fixed)
    targets: dict[tuple[int, str], Target] = dict(plan.targets)
    for unit in free:
        targets |= {(unit.layer, role): chosen[unit.name].target for role in unit.roles}
    return dataclasses.replace(plan, targets=targets, sensitivity=_report(free, chosen, max_bytes))


def _report(units: Sequence[Unit], chosen: dict[str, Option], max_bytes: int) -> dict[str, Any]:
    """What was measured and what was chosen, for the proof."""
    names = [target_name(option.target) for option in units[0].options] if units else []
    totals = {name: sum(unit.options[at].kl for unit in units) for at, name in enumerate(names)}
    return {
        "max_bytes": max_bytes,
        "predicted_kl": sum(option.kl for option in chosen.values()),
        "predicted_kl_uniform": totals,
        "units": {
            unit.name: {
                "chosen": target_name(chosen[unit.name].target),
                "kl": {name: o.kl for name, o in zip(names, unit.options, strict=True)},
            }
            for unit in units
        },
    }


def _is_free(plan: Plan, layer: int, roles: Sequence[str], own: Grid) -> bool:
    return all(plan.targets[layer, role] == own for role in roles)
