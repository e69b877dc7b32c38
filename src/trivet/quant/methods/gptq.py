"""GPTQ: codes chosen column by column, each error passed on to the columns not yet chosen.

H is the Gram matrix of the layer's inputs over the tokens seen, so that tr(E H Eᵀ) is the squared
change of its output. Groups stay in natural order (no ``g_idx``, no cost at inference); ``static``
act-order visits columns by falling diagonal of H within that. Afterwards scales and codes are refined
in turns: scales by least squares in the metric of H, codes by cyclic coordinate descent. Neither can
raise the error, and the file format does not change.

Rows are independent given H: they are worked on in runs that depend on their number alone, so that
the bits do not depend on the number of threads.

Source: arXiv:2210.17323, Algorithm 1 (lazy updates); arXiv:2309.01885 for coordinate descent.
Differs: static groups, scale search weighted by the diagonal, the refinement; H shrinks beside its
diagonal (`GptqConfig.shrink`); damp is raised only when the factorization fails, and what was used is
returned.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.grid import CodeGrid
from trivet.errors import ConfigError, QuantError
from trivet.native.rounding import ColumnGrid, descend_panel, gptq_panel
from trivet.quant.blas import Workers
from trivet.quant.grid import Float32, Grid, code_grid, dequantize
from trivet.quant.methods.rtn import assign, find_scales

Float64 = NDArray[np.float64]
ACT_ORDERS = ("static", "desc_act", "none")
MAX_DAMP = 1.0
SHRINK = 0.15
_PANEL = 64  # columns between two lazy updates
_ROWS = 320  # rows worked on at once, at most
_INVERSE_ROWS = 128  # a triangle of so many rows is inverted whole
_RIDGE = 1e-3  # pull of the refined scales towards the ones before, relative


@dataclasses.dataclass(frozen=True)
class GptqConfig:
    """damp: share of the mean diagonal added to H. refine: rounds of scales and codes in turns.

    shrink: share taken off H beside its diagonal: correlations of columns are less alike from text to
    text than their sizes
    """

    damp: float = 0.01
    shrink: float = SHRINK
    act_order: str = "static"
    refine: int = 2
    search: bool = True

    def __post_init__(self) -> None:
        if self.act_order not in ACT_ORDERS:
            raise ConfigError("act_order", self.act_order, ", ".join(ACT_ORDERS))
        if not 0 < self.damp <= MAX_DAMP:
            raise ConfigError("damp", self.damp, "a number above 0, up to 1")
        if not 0 <= self.shrink < 1:
            raise ConfigError("shrink", self.shrink, "0 to below 1")


@dataclasses.dataclass(frozen=True)
class Hessian:
    """A damped Gram matrix, factored once for all weights that read the same input.

    gram     float64 [K, K], mean over tokens, dead columns set to 1 on the diagonal, damped
    upper    float32 [K, K], upper triangular: gram^-1 = upperᵀ upper, columns in ``order``
    order    int [K]: the column visited at each step        dead  bool [K]: input always zero
    damp     share of the mean diagonal that was added       raised  how often it had to be raised
    """

    gram: Float64
    upper: Float32
    order: NDArray[np.intp]
    dead: NDArray[np.bool_]
    damp: float
    raised: int

    @classmethod
    def of(cls, gram: Float64, tokens: int, config: GptqConfig) -> Hessian:
        """Factor the sum of x xᵀ over tokens. Raises QuantError: no damp up to 1 makes it definite."""
        if tokens < 1:
            raise QuantError("no token reached this layer: it cannot be calibrated")
        if not np.isfinite(gram).all():
            raise QuantError("the Gram matrix of a layer's inputs is not finite")
        mean = gram * ((1 - config.shrink) / tokens)
        diagonal = np.einsum("ii->i", mean)  # a view
        diagonal /= 1 - config.shrink
        dead = diagonal <= 0
        diagonal[dead] = 1.0
        base = float(diagonal[~dead].mean()) if not dead.all() else 1.0
        order = np.arange(len(mean))
        if config.act_order != "none":
            order = np.argsort(-diagonal, kind="stable")
        damp, raised = config.damp, 0
        while True:
            damped = mean + np.eye(len(mean)) * (damp * base)
            upper = _inverse_factor(damped[np.ix_(order, order)])
            if upper is not None:
                return cls(damped, upper, order, dead, damp, raised)
            damp, raised = damp * 2, raised + 1
            if damp > MAX_DAMP:
                raise QuantError(
                    "the Hessian of a layer is not positive definite at any damp up to 1"
                )


def _inverse_factor(matrix: Float64) -> Float32 | None:
    """Upper triangular U with matrix^-1 = Uᵀ U; None when the matrix is not positive definite."""
    try:
        # matrix = Lᵀ L with L lower (Cholesky of the reversed matrix), so U = L^-T reversed in place.
        flipped = np.linalg.cholesky(matrix[::-1, ::-1])
        upper_root = flipped[::-1, ::-1]  # upper triangular R with matrix = R Rᵀ
        inverse = _invert_upper(upper_root)
    except np.linalg.LinAlgError:
        return None
    if not np.isfinite(inverse).all() or (np.einsum("ii->i", inverse) <= 0).any():
        return None
    return inverse.astype(np.float32)


def _invert_upper(matrix: NDArray[np.floating]) -> Float64:
    """The inverse of an upper triangular matrix, by halves: a third of a general one's work."""
    size = len(matrix)
    if size <= _INVERSE_ROWS:
        return np.triu(np.linalg.inv(matrix))
    half = size // 2
    result = np.zeros_like(matrix)
    result[:half, :half] = first = _invert_upper(matrix[:half, :half])
    result[half:, half:] = last = _invert_upper(matrix[half:, half:])
    result[:half, half:] = -(first @ matrix[:half, half:] @ last)
    return result


def output_error(change: Float32, gram: Float64 | Float32) -> float:
    """tr(E H Eᵀ) of a change of weights [N, K]: the squared change of the outputs."""
    total = 0.0
    small = gram.astype(np.float32)
    for begin, end in row_runs(len(change)):
        part = change[begin:end]
        total += float(np.einsum("ij,ij->i", part @ small, part).sum(dtype=np.float64))
    return max(total, 0.0)


def quantize_gptq(
    weight: Float32, hessian: Hessian, grid: Grid, config: GptqConfig, workers: Workers
) -> CodeGrid:
    """Quantize one linear weight with GPTQ.

    weight   float32 [N, K], not modified
    Returns codes and scales; ``g_idx`` only with act_order ``desc_act``.
    Raises QuantError: K is not a multiple of the group size; a scale is too large for fp16.
    """
    rows, columns = weight.shape
    group = grid.group_of(columns)
    clean = np.where(hessian.dead[None, :], np.float32(0), weight)
    importance = np.einsum("ii->i", hessian.gram).astype(np.float32)
    by_order = config.act_order == "desc_act"
    if by_order:  # groups are runs of the visiting order
        clean = np.ascontiguousarray(clean[:, hessian.order])
        importance = importance[hessian.order]
        gram = hessian.gram[np.ix_(hessian.order, hessian.order)]
        order = np.arange(columns)
    else:
        gram, order = hessian.gram, hessian.order
    small = np.ascontiguousarray(gram, np.float32)

    def solve(run: tuple[int, int]) -> CodeGrid:
        part = clean[run[0] : run[1]]
        scales, zeros = find_scales(part, grid, search=config.search, importance=importance)
        codes = _columns(part, hessian.upper, order, grid, group, scales, zeros)
        return _refined(part, small, grid, code_grid(grid, codes, scales, zeros), config)

    parts = list(workers.map(solve, row_runs(rows)))
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])
    zeros = None
    if not grid.symmetric:
        zeros = np.concatenate([part.zeros for part in parts if part.zeros is not None])
    if not by_order or grid.group_size is None:
        if by_order:
            codes = codes[:, np.argsort(hessian.order)]
        return code_grid(grid, np.ascontiguousarray(codes), scales, zeros)
    places = np.argsort(hessian.order)
    g_idx = (places // group).astype(np.int32)
    return code_grid(grid, np.ascontiguousarray(codes[:, places]), scales, zeros, g_idx)


def row_runs(rows: int) -> list[tuple[int, int]]:
    """Rows in equal runs, at least two where there are enough: the borders depend on nothing else."""
    count = max(-(-rows // _ROWS), 2 if rows >= _ROWS // 2 else 1)
    edges = [rows * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _column_grid(
    scales: NDArray[np.float16] | Float32,
    zeros: NDArray[np.uint8] | None,
    grid: Grid,
    groups: NDArray[np.intp],
) -> ColumnGrid:
    """A grid as the kernels take it. groups [K]: of each column, in the order of the steps."""
    wide = np.ascontiguousarray(scales.astype(np.float32).T)
    safe = np.where(wide == 0, np.float32(1), wide)
    inverse = np.where(wide == 0, np.float32(0), np.float32(1) / safe)
    shift = None if zeros is None else np.ascontiguousarray(zeros.astype(np.float32).T)
    low, high, middle = int(grid.min_code), int(grid.max_code), float(grid.middle)
    return ColumnGrid(wide, inverse, shift, middle, low, high, groups.astype(np.int32))


def _panels(columns: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, columns, _PANEL):
        yield begin, min(begin + _PANEL, columns)


def _columns(
    weight: Float32,
    upper: Float32,
    order: NDArray[np.intp],
    grid: Grid,
    group: int,
    scales: NDArray[np.float16],
    zeros: NDArray[np.uint8] | None,
) -> NDArray[np.uint8]:
    """The codes [N, K]. One pass over the columns in ``order``."""
    rows, columns = weight.shape
    left = np.ascontiguousarray(weight.T[order])  # [K, N]: a column of the weight is contiguous
    codes = np.empty((columns, rows), np.uint8)
    columns_of = _column_grid(scales, zeros, grid, order // group)
    places = order.astype(np.int32)
    errors = np.empty((_PANEL, rows), np.float32)
    for begin, end in _panels(columns):
        gptq_panel(columns_of, upper, left, places, begin, end, codes, errors)
        left[end:] -= upper[begin:end, end:].T @ errors[: end - begin]
    return np.ascontiguousarray(codes.T)


def _refined(
    weight: Float32, gram: Float32, grid: Grid, start: CodeGrid, config: GptqConfig
) -> CodeGrid:
    """Scales and codes in turns; a row keeps a turn's result only if its error fell."""
    best = start
    if config.refine == 0:
        return best
    errors = _row_errors(weight, gram, best)
    for _ in range(config.refine):
        scales = _fit_scales(weight, gram, best)
        codes = _descend(weight, gram, grid, dataclasses.replace(best, scales=scales))
        tried = dataclasses.replace(best, scales=scales, codes=codes)
        own = _row_errors(weight, gram, tried)
        better = (own < errors)[:, None]
        best = dataclasses.replace(
            best,
            codes=np.where(better, tried.codes, best.codes),
            scales=np.where(better, tried.scales, best.scales),
        )
        errors = np.minimum(own, errors)
    return best


def _row_errors(weight: Float32, gram: Float32, quantized: CodeGrid) -> Float32:
    change = dequantize(quantized) - weight
    result: Float32 = np.einsum("nk,nk->n", change @ gram, change)
    return result


def _fit_scales(weight: Float32, gram: Float32, quantized: CodeGrid) -> NDArray[np.float16]:
    """Least-squares scales of all groups of a row together, for its codes, as fp16 holds them."""
    rows, columns = weight.shape
    old = quantized.scales.astype(np.float64)
    num_groups = old.shape[1]
    group = columns // num_groups
    shift = np.float32(quantized.middle)
    blocks = quantized.codes.reshape(rows, num_groups, group).astype(np.float32)
    blocks -= shift if quantized.zeros is None else quantized.zeros[:, :, None].astype(np.float32)
    left = np.empty((rows, num_groups, num_groups))
    right = np.empty((rows, num_groups))
    for g in range(num_groups):
        product = blocks[:, g] @ gram[g * group : (g + 1) * group]
        left[:, g] = np.einsum("ngk,ngk->ng", product.reshape(blocks.shape), blocks)
        right[:, g] = np.einsum("nk,nk->n", product, weight)
    left = (left + left.swapaxes(1, 2)) / 2
    diagonal = np.einsum("ngg->ng", left)
    ridge = np.where(diagonal > 0, diagonal * _RIDGE, 1.0)
    diagonal += ridge
    right += ridge * old
    solved = np.linalg.solve(left, right[:, :, None])[:, :, 0]
    sound = np.isfinite(solved) & (np.abs(solved) < 4 * np.abs(old) + 1e-12)
    return np.where(sound, solved, old).astype(np.float16)


def _descend(weight: Float32, gram: Float32, grid: Grid, quantized: CodeGrid) -> NDArray[np.uint8]:
    """One sweep of coordinate descent over the codes, columns in natural order."""
    rows, columns = weight.shape
    group = columns // quantized.scales.shape[1]
    columns_of = _column_grid(quantized.scales, quantized.zeros, grid, np.arange(columns) // group)
    values = np.ascontiguousarray(dequantize(quantized).T)
    codes = np.ascontiguousarray(quantized.codes.T)
    slope = gram @ (np.ascontiguousarray(weight.T) - values)  # [K, N]: H (w - q)
    changes = np.empty((_PANEL, rows), np.float32)
    for begin, end in _panels(columns):
        descend_panel(columns_of, gram, slope, values, begin, end, codes, changes)
        if end < columns:
            slope[end:] -= gram[end:, begin:end] @ changes[: end - begin]
    return np.ascontiguousarray(codes.T)


def quantize_nearest(weight: Float32, grid: Grid) -> CodeGrid:
    """Plain round to nearest, what every method is compared with."""
    scales, zeros = find_scales(weight, grid, search=False)
    return assign(weight, grid, scales, zeros)
