"""AWQ: columns that matter are scaled up before rounding, and ranges are clipped where that pays.

The factors of a point are s = mean|x|^a / mean|w|^(1-a), normalised by sqrt(max * min); a is the one of
a grid whose rounded weights change the outputs least over the calibration tokens (measured with the
Gram matrix). All columns keep the same width. The clip search then shrinks the range of each group to
what changes its own part of the output least; like the original it leaves q and k alone.

Source: arXiv:2306.00978, and AutoAWQ for the normalisation. Differs: the error is exact for the tokens
seen; v to o is folded with grouped queries too, heads that share a head of v sharing its factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.grid import CodeGrid
from trivet.models import ModelSpec
from trivet.quant.blas import Workers
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.folds import shared, spread
from trivet.quant.methods.gptq import Hessian, output_error, quantize_nearest, row_runs
from trivet.quant.methods.rtn import assign, find_scales
from trivet.quant.observe import InputStats

STEPS = 20  # exponents tried, from 0 to below 1
_CLIPS = tuple(np.linspace(1.0, 0.55, 10, dtype=np.float32))
_FLOOR = 1e-4
_SPREAD = 64.0  # factors stay within this of one, so that fp16 holds the norms they fold into


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors float32 [free width] of a point; the exponent; squared output error without and with."""

    values: Float32
    exponent: float
    error_before: float
    error_after: float


def search_factors(
    weights: Mapping[str, Float32],
    grids: Mapping[str, Grid],
    stats: InputStats,
    spec: ModelSpec,
    point: str,
    workers: Workers,
    steps: int = STEPS,
) -> Factors:
    """The factors of one point. weights: float32 [N, K] of every role that reads it and is rounded."""
    activity = (stats.abs_sum / max(stats.tokens, 1)).astype(np.float32)
    x = np.maximum(shared(activity, spec, point), np.float32(_FLOOR))
    size = np.zeros(len(activity), np.float32)
    for weight in weights.values():
        rows = np.abs(weight)
        size += (rows / np.maximum(rows.mean(axis=1, keepdims=True), 1e-12)).mean(axis=0)
    mean_size = (size / np.float32(len(weights))).astype(np.float32)
    w = np.maximum(shared(mean_size, spec, point), np.float32(_FLOOR))
    gram = (stats.gram / max(stats.tokens, 1)).astype(np.float32)

    def attempt(step: int) -> tuple[float, Float32]:
        exponent = step / steps
        factors = x**exponent / w ** (1 - exponent) if step else np.ones_like(x)
        factors = factors / np.sqrt(factors.max() * factors.min())
        factors = factors.clip(1 / _SPREAD, _SPREAD).astype(np.float32)
        columns = spread(factors, spec, point)
        total = 0.0
        for role, weight in weights.items():
            rounded = dequantize(quantize_nearest(weight * columns, grids[role]))
            total += output_error(rounded / columns - weight, gram)
        return total, factors

    tried = list(workers.map(attempt, range(steps)))
    errors = [error for error, _ in tried]
    best = int(np.argmin(errors))
    return Factors(tried[best][1], best / steps, errors[0], errors[best])


def quantize_clipped(
    weight: Float32, grid: Grid, hessian: Hessian, workers: Workers, *, clip: bool
) -> CodeGrid:
    """Round a weight [N, K] with the range of each group shrunk to what changes its output least."""
    if not clip:
        return quantize_nearest(weight, grid)
    columns = weight.shape[1]
    group = grid.group_of(columns)
    count = columns // group
    blocks = hessian.gram.reshape(count, group, count, group)
    own = np.stack([blocks[g, :, g] for g in range(count)]).astype(np.float32)  # [G, g, g]

    def solve(run: tuple[int, int]) -> tuple[NDArray[np.float16], NDArray[np.uint8] | None]:
        return _clip_search(weight[run[0] : run[1]], grid, own)

    parts = list(workers.map(solve, row_runs(len(weight))))
    scales = np.concatenate([scales for scales, _ in parts])
    shifts = [zeros for _, zeros in parts if zeros is not None]
    return assign(weight, grid, scales, np.concatenate(shifts) if shifts else None)


def _clip_search(
    weight: Float32, grid: Grid, own: Float32
) -> tuple[NDArray[np.float16], NDArray[np.uint8] | None]:
    """Scales [N, G] and zero points of rows. own [G, g, g]: each group's part of the Gram matrix."""
    count, group = own.shape[:2]

    def errors(scales: NDArray[np.float16], zeros: NDArray[np.uint8] | None) -> Float32:
        change = dequantize(assign(weight, grid, scales, zeros)) - weight
        by_group = change.reshape(-1, count, group).swapaxes(0, 1)
        result: Float32 = ((by_group @ own) * by_group).sum(axis=2).T
        return result

    scales, zeros = find_scales(weight, grid, search=False)
    error = errors(scales, zeros)
    for share in _CLIPS[1:]:
        limits = _clipped(weight, group, float(share))
        tried_scales, tried_zeros = find_scales(limits, grid, search=False)
        tried = errors(tried_scales, tried_zeros)
        better = tried < error
        error = np.where(better, tried, error)
        scales = np.where(better, tried_scales, scales)
        if zeros is not None and tried_zeros is not None:
            zeros = np.where(better, tried_zeros, zeros)
    return scales, zeros


def _clipped(weight: Float32, group: int, share: float) -> Float32:
    """The weight with each group's values limited to a share of its range."""
    blocks = weight.reshape(len(weight), -1, group)
    low = blocks.min(axis=2, keepdims=True) * np.float32(share)
    high = blocks.max(axis=2, keepdims=True) * np.float32(share)
    limited = np.minimum(np.maximum(blocks, low), high)
    result: Float32 = limited.reshape(weight.shape)
    return result
