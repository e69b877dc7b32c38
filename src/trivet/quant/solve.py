"""One layer quantized: each linear by its method, on inputs that the ones before it already shaped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from trivet.checkpoint.formats import CodeGrid, Fp8Weight
from trivet.checkpoint.formats import fp8 as fp8_format
from trivet.checkpoint.source import float_to_bf16
from trivet.models import Model
from trivet.quant.blas import Workers
from trivet.quant.finished import FinishedLayer, Result, values_of
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.activations import ROW, InputRule
from trivet.quant.methods.awq import quantize_clipped, search_factors
from trivet.quant.methods.folds import fold, free_width
from trivet.quant.methods.gptq import (
    GptqConfig,
    Hessian,
    output_error,
    quantize_gptq,
    quantize_nearest,
)
from trivet.quant.methods.rtn import quantize_rtn
from trivet.quant.methods.smoothquant import POINTS as SMOOTH_POINTS
from trivet.quant.methods.smoothquant import smoothing_factors
from trivet.quant.observe import POINTS, Inputs, InputStats, LayerWeights, Stream
from trivet.quant.plan import INT8_ROWS, Fp8, Plan, Target, module_name, target_name
from trivet.quant.proof import LinearProof
from trivet.quant.recipe import Recipe

_RETRY_DAMPS = (0.05, 0.2)  # tried where a linear's held-out error is above round to nearest's


def quantize_layer(
    model: Model,
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream | None,
    workers: Workers,
) -> FinishedLayer:
    weights = LayerWeights.read(model, layer)
    done = FinishedLayer({}, {}, {}, [], {})
    if stream is None:
        for role in weights.matrices:
            name = module_name(layer, role)
            target = plan.targets[layer, role]
            result = _uncalibrated(weights.matrices[role], target)
            done.results[role] = result
            done.proofs.append(
                _weight_proof(name, target, recipe.method, result, weights.matrices[role])
            )
    else:
        _calibrated_layer(layer, plan, recipe, stream, weights, done, workers)
    done.norms = {"attn_norm": weights.attn_norm, "mlp_norm": weights.mlp_norm}
    done.biases = weights.biases
    return done


def _uncalibrated(weight: Float32, target: Target) -> Result:
    if target is None:
        return float_to_bf16(weight)
    if isinstance(target, Fp8):
        return fp8_format.quantize(weight, target.block)
    return quantize_rtn(weight, target)


def _weight_proof(
    name: str, target: Target, method: str, result: Result, weight: Float32
) -> LinearProof:
    norm = float(np.linalg.norm(weight)) or 1.0
    before = 0.0
    if isinstance(target, Grid):
        before = float(np.linalg.norm(dequantize(quantize_nearest(weight, target)) - weight)) / norm
    after = float(np.linalg.norm(values_of(result) - weight)) / norm
    if not isinstance(target, Grid):
        before = after
    how = "kept" if target is None else "fp8" if isinstance(target, Fp8) else method
    size = _bytes_of(result)
    return LinearProof(name, target_name(target), how, 0, None, 0, before, after, size)


def _bytes_of(result: Result) -> int:
    rows, columns = int(result.shape[0]), int(result.shape[1])
    if isinstance(result, CodeGrid):
        return Grid(result.bits, result.group_size, result.zeros is None).num_bytes(rows, columns)
    if isinstance(result, Fp8Weight):
        return rows * columns + 4 * result.scales.size
    return 2 * rows * columns


def _calibrated_layer(
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream,
    weights: LayerWeights,
    done: FinishedLayer,
    workers: Workers,
) -> None:
    """All linears of a layer, each seeing inputs that the ones before it already shaped."""
    if recipe.method in ("awq", "awq+gptq", "smoothquant"):
        done.notes["folds"] = _fold_layer(layer, plan, recipe, stream, weights, workers)
    source = weights.copy()

    def solve(point: str, width: int, inputs: Inputs, *, keep: bool = False) -> list[Float32]:
        sizes = recipe.activations is not None
        stats, held_out, kept = stream.observe(inputs, width, keep=keep, sizes=sizes)
        seen = _Seen(stats, held_out)
        rules = _input_rules(recipe, stats)
        changes = _rounding(stream, kept or inputs, width, rules)
        for role in POINTS[point]:
            target = plan.targets[layer, role]
            result, proof = _solve(
                source.matrices[role], target, recipe, seen, workers,
                module_name(layer, role), clip=recipe.clip and role not in ("q", "k"),
            )  # fmt: skip
            if rules and target == INT8_ROWS:
                facts = _activation_facts(source.matrices[role], seen.held_out, rules, changes)
                proof = dataclasses.replace(proof, activations=facts)
            done.results[role] = result
            done.proofs.append(proof)
            weights.matrices[role] = values_of(result)
        return kept

    spec = stream.spec
    solve("attn_in", spec.hidden_size, stream.normed(weights.attn_norm))
    mixed = stream.attention(weights)
    solve("o_in", spec.q_size, mixed)
    stream.add_linear(mixed, weights, "o")
    del mixed
    solve("ffn_in", spec.hidden_size, stream.normed(weights.mlp_norm))
    gated = solve("down_in", spec.ffn_size, stream.gated(weights), keep=True)
    stream.add_linear(gated, weights, "down")


def _input_rules(recipe: Recipe, stats: InputStats) -> list[InputRule]:
    """The rule that was asked for at a point, then plain rows to compare it with; empty: none was."""
    form = recipe.activation_form
    if form is None:
        return []
    forms = (form,) if form == ROW else (form, ROW)
    return [InputRule.of(form, stats) for form in forms]


def _rounding(stream: Stream, inputs: Inputs, width: int, rules: list[InputRule]) -> list[Float32]:
    """Of each rule the sum of d dᵀ over held-out rows [K, K]; d is what rounding changes in a row."""
    held_out = [index for index, batch in enumerate(stream.batches) if batch.is_held_out]

    def change(index: int) -> list[Float32]:
        x = inputs(index) if callable(inputs) else inputs[index]
        changes = [rule.rounded(x) - x for rule in rules]
        return [d.T @ d for d in changes]

    sums = [np.zeros((width, width)) for _ in rules]
    if rules:
        for parts in stream.workers.map(change, held_out):
            for total, part in zip(sums, parts, strict=True):
                total += part
    return [total.astype(np.float32) for total in sums]


def _activation_facts(
    weight: Float32, held_out: Float32, rules: list[InputRule], changes: list[Float32]
) -> dict[str, Any]:
    """`LinearProof.activations` of one linear."""
    norm = output_error(weight, held_out) or 1.0
    errors = {
        rule.form.full_form.removeprefix("w8a8+"): math.sqrt(output_error(weight, change) / norm)
        for rule, change in zip(rules, changes, strict=True)
    }
    return {**rules[0].as_json(), "error": errors}


def _fold_layer(
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream,
    weights: LayerWeights,
    workers: Workers,
) -> dict[str, Any]:
    """Search factors on the layer as it is and fold them in; returns what was chosen, by point."""
    spec = stream.spec
    before = list(stream.hidden)
    seen: dict[str, InputStats] = {}
    seen["attn_in"] = stream.observe(stream.normed(weights.attn_norm), spec.hidden_size)[0]
    mixed = stream.attention(weights)
    seen["o_in"] = stream.observe(mixed, spec.q_size)[0]
    stream.add_linear(mixed, weights, "o")
    seen["ffn_in"] = stream.observe(stream.normed(weights.mlp_norm), spec.hidden_size)[0]
    seen["down_in"] = stream.observe(stream.gated(weights), spec.ffn_size)[0]
    stream.hidden = before
    chosen: dict[str, Any] = {}
    for point, roles in POINTS.items():
        grids: dict[str, Grid] = {}
        for role in roles:
            grid = plan.targets[layer, role]
            if isinstance(grid, Grid):
                grids[role] = grid
        if not grids:
            continue
        matrices = {role: weights.matrices[role] for role in grids}
        if recipe.method == "smoothquant":
            if point not in SMOOTH_POINTS:
                continue
            factors = smoothing_factors(matrices, seen[point], spec, point, recipe.smooth_alpha)
            chosen[point] = {"alpha": recipe.smooth_alpha}
        else:
            found = search_factors(matrices, grids, seen[point], spec, point, workers)
            factors = found.values
            chosen[point] = {
                "exponent": found.exponent,
                "error_ratio": found.error_after / found.error_before
                if found.error_before
                else 1.0,
            }
        assert len(factors) == free_width(spec, point)
        fold(weights, spec, point, factors)
    return chosen


class _Seen:
    """What passed one point: sums, their factor (made once for all roles), the held-out part.

    Factors of other settings are rarely asked for and are not kept: each is as large as the sums.
    """

    def __init__(self, stats: InputStats, held_out: InputStats) -> None:
        self.stats = stats
        self.held_out = held_out.gram.astype(np.float32)
        self._kept: tuple[GptqConfig, Hessian] | None = None  # of the first settings asked for

    def hessian(self, config: GptqConfig) -> Hessian:
        if self._kept is not None and self._kept[0] == config:
            return self._kept[1]
        hessian = Hessian.of(self.stats.gram, self.stats.tokens, config)
        if self._kept is None:
            self._kept = config, hessian
        return hessian


def _solve(
    weight: Float32,
    target: Target,
    recipe: Recipe,
    seen: _Seen,
    workers: Workers,
    name: str,
    *,
    clip: bool,
) -> tuple[Result, LinearProof]:
    """One linear; its error on held-out tokens before (round to nearest) and after."""
    norm = output_error(weight, seen.held_out) or 1.0
    tokens = seen.stats.tokens

    def error_of(values: Float32) -> float:
        return math.sqrt(output_error(values - weight, seen.held_out) / norm)

    if target is None or isinstance(target, Fp8):
        kept = _uncalibrated(weight, target)
        error = error_of(values_of(kept))
        how = "kept" if target is None else "fp8"
        size = _bytes_of(kept)
        return kept, LinearProof(
            name, target_name(target), how, tokens, None, 0, error, error, size
        )
    before = error_of(dequantize(quantize_nearest(weight, target)))
    hessian = seen.hessian(recipe.gptq)
    importance = np.einsum("ii->i", hessian.gram).astype(np.float32)
    method, replaced = recipe.method, ""
    if method in ("gptq", "awq+gptq"):
        result = quantize_gptq(weight, hessian, target, recipe.gptq, workers)
    elif method == "awq":
        result = quantize_clipped(weight, target, hessian, workers, clip=clip)
    elif method == "smoothquant":
        result = quantize_nearest(weight, target)
    else:
        result = quantize_rtn(weight, target, importance=importance)
    after = error_of(dequantize(result))
    if after > before and method in ("gptq", "awq+gptq"):
        for damp in _RETRY_DAMPS:
            config = dataclasses.replace(recipe.gptq, damp=max(damp, recipe.gptq.damp))
            other = seen.hessian(config)
            tried = quantize_gptq(weight, other, target, config, workers)
            error = error_of(dequantize(tried))
            if error < after:
                result, after, hessian = tried, error, other
    if after > before:
        searched = quantize_rtn(weight, target, importance=importance)
        options = [(error_of(dequantize(searched)), searched)]
        options.append((before, quantize_nearest(weight, target)))
        after, result = min(options, key=lambda option: option[0])
        replaced = f"{method} was no better than round to nearest on held-out tokens"
        method = "rtn"
    uses_hessian = "gptq" in method
    proof = LinearProof(
        name, target.name, method, tokens, hessian.damp if uses_hessian else None,
        hessian.raised if uses_hessian else 0, before, after, _bytes_of(result), replaced,
    )  # fmt: skip
    return result, proof
