"""Round to nearest, with and without a search for the scale of each group.

`plain` takes the scale from the range of a group; `search` tries scales around the one that maps the
value of largest magnitude, with its sign, to the lowest code (so that all codes of the grid are used),
then fits the scale to the chosen codes by least squares. With an importance per column (the diagonal of
the Hessian) errors count by it.

Source: signed maximum as in llama.cpp's Q4_0; the search is ours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.grid import CodeGrid
from trivet.errors import QuantError
from trivet.quant.grid import F16_MAX, Float32, Grid, code_grid, to_f16_scales

_SHARES = (1.0, 0.96, 1.04, 0.92, 1.08, 0.88, 1.14, 0.84, 1.2, 0.8, 0.76, 0.72)
_LOW_BIT_SHARES = (0.66, 0.6, 0.54, 0.48, 0.42)  # two and three bits: clipping pays
_CHUNK = 1 << 16  # values worked on at once: they stay in the cache
_ROUNDS = 2  # fits of the scale to the codes


def quantize_rtn(
    weight: Float32,
    grid: Grid,
    *,
    search: bool = True,
    importance: Float32 | None = None,
) -> CodeGrid:
    """A weight float32 [N, K] on a grid. importance: float32 [K], weight of squared errors."""
    scales, zeros = find_scales(weight, grid, search=search, importance=importance)
    return assign(weight, grid, scales, zeros)


def assign(
    weight: Float32,
    grid: Grid,
    scales: NDArray[np.float16],
    zeros: NDArray[np.uint8] | None,
) -> CodeGrid:
    """The nearest codes of a weight [N, K] for given scales and zero points [N, G]."""
    rows, columns = weight.shape
    group = grid.group_of(columns)
    codes = np.empty((rows, columns), np.uint8)
    for begin, end in _runs(rows, columns):
        blocks = weight[begin:end].reshape(end - begin, -1, group)
        shift = grid.middle if zeros is None else zeros[begin:end, :, None].astype(np.float32)
        wide = scales[begin:end].astype(np.float32)
        codes[begin:end] = _codes(blocks, wide, shift, grid).reshape(end - begin, columns)
    return code_grid(grid, codes, scales, zeros)


def find_scales(
    weight: Float32,
    grid: Grid,
    *,
    search: bool = True,
    importance: Float32 | None = None,
) -> tuple[NDArray[np.float16], NDArray[np.uint8] | None]:
    """Scales float16 [N, G] and, of grids with zero points, zeros uint8 [N, G] of a weight [N, K]."""
    rows, columns = weight.shape
    group = grid.group_of(columns)
    scales = np.empty((rows, columns // group), np.float16)
    zeros = None if grid.symmetric else np.empty(scales.shape, np.uint8)
    weights = None
    if importance is not None:
        weights = importance.reshape(1, -1, group).astype(np.float32)
    solve = _symmetric if grid.symmetric else _zero_point
    if not np.isfinite(weight).all():
        raise QuantError("a weight holds NaN or infinite values")
    if float(np.abs(weight).max(initial=0)) / 2 ** (grid.bits - 1) > F16_MAX / 4:
        raise QuantError("a scale is too large for fp16")
    for begin, end in _runs(rows, columns):
        blocks = weight[begin:end].reshape(end - begin, -1, group)
        found, shift = solve(blocks, grid, search, weights)
        scales[begin:end] = to_f16_scales(found)
        if zeros is not None and shift is not None:
            zeros[begin:end] = shift
    return scales, zeros


def _runs(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK // max(columns, 1))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _stored(scales: Float32) -> Float32:
    """Scales as fp16 holds them, so that codes are chosen for what will be read."""
    return scales.astype(np.float16).astype(np.float32)


def _inverse(scales: Float32) -> Float32:
    safe = np.where(scales == 0, np.float32(1), scales)
    return np.where(scales == 0, np.float32(0), np.float32(1) / safe).astype(np.float32)


def _codes(blocks: Float32, scales: Float32, shift: object, grid: Grid) -> Float32:
    codes: Float32 = np.rint(blocks * _inverse(scales)[:, :, None])
    codes += np.asarray(shift, np.float32)
    codes.clip(grid.min_code, grid.max_code, out=codes)
    return codes


def _error(
    blocks: Float32, codes: Float32, scales: Float32, shift: object, weights: Float32 | None
) -> Float32:
    change = (codes - np.asarray(shift, np.float32)) * scales[:, :, None] - blocks
    np.square(change, out=change)
    if weights is not None:
        change *= weights
    result: Float32 = change.sum(axis=2)
    return result


def _fitted(
    blocks: Float32, codes: Float32, shift: object, weights: Float32 | None, before: Float32
) -> Float32:
    """Scales that fit given codes best (least squares); the one before where nothing is there."""
    steps = codes - np.asarray(shift, np.float32)
    weighted = steps if weights is None else steps * weights
    below = (weighted * steps).sum(axis=2)
    above = (weighted * blocks).sum(axis=2)
    return np.where(below > 0, above / np.where(below > 0, below, 1), before).astype(np.float32)


def _symmetric(
    blocks: Float32, grid: Grid, search: bool, weights: Float32 | None
) -> tuple[Float32, None]:
    middle, lowest = grid.middle, grid.min_code - grid.middle
    place = np.abs(blocks).argmax(axis=2)
    largest = np.take_along_axis(blocks, place[:, :, None], axis=2)[:, :, 0]
    best = _stored(largest / np.float32(lowest))
    if not search:
        return best, None
    codes = _codes(blocks, best, middle, grid)
    error = _error(blocks, codes, best, middle, weights)
    shares = _SHARES[1:] + (_LOW_BIT_SHARES if grid.bits < 4 else ())
    other = np.float32(-lowest / max(middle - 1, 1))  # the largest value at the other end
    flipped = [-float(other) * share for share in (1.0, *shares)]
    for share in (*shares, *flipped):
        scales = _stored(largest * np.float32(share) / np.float32(lowest))
        best, error = _better(blocks, grid, scales, middle, weights, best, error)
    for _ in range(_ROUNDS):
        codes = _codes(blocks, best, middle, grid)
        scales = _stored(_fitted(blocks, codes, middle, weights, best))
        best, error = _better(blocks, grid, scales, middle, weights, best, error)
    return best, None


def _better(
    blocks: Float32,
    grid: Grid,
    scales: Float32,
    shift: object,
    weights: Float32 | None,
    best: Float32,
    error: Float32,
) -> tuple[Float32, Float32]:
    codes = _codes(blocks, scales, shift, grid)
    own = _error(blocks, codes, scales, shift, weights)
    return np.where(own < error, scales, best), np.minimum(own, error)


def _zero_point(
    blocks: Float32, grid: Grid, search: bool, weights: Float32 | None
) -> tuple[Float32, Float32]:
    low = np.minimum(blocks.min(axis=2), 0)
    high = np.maximum(blocks.max(axis=2), 0)
    best = zero = error = None
    shares = _SHARES + (_LOW_BIT_SHARES if grid.bits < 4 else ())
    for share in shares if search else (1.0,):
        if share > 1.05:
            continue
        scales = _stored((high - low) * np.float32(share / grid.max_code))
        inverse = _inverse(scales)
        middle = np.rint(-low * np.float32(share) * inverse)
        for move in (0, -1, 1) if search and share < 1 else (0,):
            zeros = (middle + np.float32(move)).clip(0, grid.max_code)
            codes = _codes(blocks, scales, zeros[:, :, None], grid)
            own = _error(blocks, codes, scales, zeros[:, :, None], weights)
            if best is None or zero is None or error is None:
                best, zero, error = scales, zeros, own
                continue
            better = own < error
            best, zero = np.where(better, scales, best), np.where(better, zeros, zero)
            error = np.minimum(own, error)
    assert best is not None
    assert zero is not None
    assert error is not None
    if search:
        for _ in range(_ROUNDS):
            codes = _codes(blocks, best, zero[:, :, None], grid)
            fitted = _stored(_fitted(blocks, codes, zero[:, :, None], weights, best))
            best, error = _better(blocks, grid, fitted, zero[:, :, None], weights, best, error)
    return best, zero
