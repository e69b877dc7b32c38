"""A weight on an integer grid, as the formats of the field store it, and its way into the engine.

`CodeGrid` is wider than `WeightTensor`: 2 to 8 bits, any group, columns of a group anywhere. What the
kernels can hold becomes a `WeightTensor` with the same values; the rest stays what it is, as float
rows with the format that loses least (`FloatMatrix`), and packing reports the error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.source import FloatMatrix
from trivet.config import Scheme, WeightFormat
from trivet.errors import QuantError
from trivet.native.weights import WeightTensor, in_input_order

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

ENGINE_GROUPS = (128, 64, 32, 16)  # of the grouped kernels, the widest first
_REQUANTIZED = WeightFormat(8, 32)  # for values on no grid of the engine: 8 bits, little loss


@dataclasses.dataclass(frozen=True)
class CodeGrid:
    """One linear weight [N out, K in]: scale * (code - zero).

    bits         2 to 8
    group_size   input columns of one scale; None: the whole row
    codes        uint8 [N, K], 0 .. 2^bits - 1
    scales       float16 or float32 [N, G], G = ceil(K / group_size)
    zeros        uint8 [N, G]; None: symmetric, 2^(bits - 1) everywhere
    group_index  int32 [K], the group of each column (act-order); None: column k is in group
                 k // group_size
    """

    bits: int
    group_size: int | None
    codes: UInt8
    scales: NDArray[np.float16] | Float32
    zeros: UInt8 | None = None
    group_index: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def num_groups(self) -> int:
        return num_groups(self.shape[1], self.group_size)

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << self.bits - 1

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        assert 2 <= self.bits <= 8, self.bits
        assert self.codes.dtype == np.uint8, self.codes.dtype
        assert self.scales.shape == (n, self.num_groups), (self.scales.shape, self.num_groups)
        assert self.scales.dtype in (np.float16, np.float32), self.scales.dtype
        if self.zeros is not None:
            assert self.zeros.shape == self.scales.shape, self.zeros.shape
            assert self.zeros.dtype == np.uint8, self.zeros.dtype
        if self.group_index is not None:
            assert self.group_index.shape == (k,), self.group_index.shape
        limit = 1 << self.bits
        assert not self.codes.size or int(self.codes.max()) < limit, "codes fit their bits"
        assert self.zeros is None or int(self.zeros.max(initial=0)) < limit, "zeros fit their bits"

    def column_groups(self) -> NDArray[np.intp]:
        """The group of each column, [K]."""
        k = self.shape[1]
        if self.group_index is not None:
            return self.group_index.astype(np.intp)
        return np.arange(k) // (self.group_size or max(k, 1))

    def values(self) -> Float32:
        """The values the grid stands for, each rounded once to float32, [N, K]."""
        groups = self.column_groups()
        zeros: NDArray[np.int16] | int = self.middle
        if self.zeros is not None:
            zeros = self.zeros.astype(np.int16)[:, groups]
        # At most 9 bits times at most 24: the product rounds once, in float32 already.
        steps = (self.codes.astype(np.int16) - zeros).astype(np.float32)
        result: Float32 = self.scales.astype(np.float32)[:, groups] * steps
        return result


def num_groups(k: int, group_size: int | None) -> int:
    """Groups of a row of k columns; the last may be shorter."""
    return 1 if group_size is None else -(-k // group_size)


def normalized(grid: CodeGrid) -> CodeGrid:
    """The same values said as plainly as they can be.

    Zero points that all are the middle become symmetric, an index that is the natural order goes,
    a group as wide as the row is the row.
    """
    k = grid.shape[1]
    if grid.zeros is not None and (grid.zeros == grid.middle).all():
        grid = dataclasses.replace(grid, zeros=None)
    if grid.group_size is not None and grid.group_size >= k:
        grid = dataclasses.replace(grid, group_size=None)
    if grid.group_index is not None:
        natural = dataclasses.replace(grid, group_index=None)
        if np.array_equal(natural.column_groups(), grid.group_index):
            grid = natural
    return grid


def to_source(grid: CodeGrid, source: str) -> WeightTensor | FloatMatrix:
    """A grid as the engine's own form where that holds every value, else as float rows.

    2 and 3 bits widen to 4, 5 to 7 bits to 8; a group of 256, and beyond 4 bits one of the row, becomes
    groups of 128 that share a scale. Of act-order the columns are sorted by group, stably, and the
    weight keeps their order. Not on the engine's grids: groups of unequal sizes, groups that are no
    multiple of 16, and 8-bit zero points that put a code beyond int8.

    source  names the file's format in reports
    """
    grid = normalized(grid)
    k = grid.shape[1]

    stored = grid

    def requantized(note: str) -> FloatMatrix:
        return FloatMatrix(stored.values(), _REQUANTIZED, source, note)

    own = grid.group_size
    order: NDArray[np.int32] | None = None
    if grid.group_index is not None:
        order = np.argsort(grid.group_index, kind="stable").astype(np.int32)
        assert own is not None, "an index of one group is the natural order"
        if not np.array_equal(grid.group_index[order], np.arange(k) // own):
            return requantized("act-order with groups of unequal sizes")
    group = next((g for g in ENGINE_GROUPS if own is None or own % g == 0), None)
    if group is None:
        return requantized(f"groups of {own} are no multiple of 16")
    if own is None and grid.bits <= 4 and k > ENGINE_GROUPS[0]:
        group = None  # a narrower row is one group
    count = num_groups(k, group)

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        if group is None:
            return values
        if own is None:
            return np.repeat(values, count, axis=1)
        return np.ascontiguousarray(np.repeat(values, own // group, axis=1)[:, :count])

    if order is not None:
        sorted_codes = np.ascontiguousarray(grid.codes[:, order])
        grid = dataclasses.replace(grid, codes=sorted_codes, group_index=None)
    scales = spread(_narrow(grid.scales))

    def held(form: WeightFormat, codes: Any, zeros: UInt8 | None = None) -> WeightTensor:
        return WeightTensor(form, codes, scales, None, zeros, order, exact=True, source=source)

    if grid.bits <= 4 and grid.zeros is None:
        codes = grid.codes + np.uint8(8 - grid.middle)
        return held(WeightFormat(4, group), codes)
    if grid.bits <= 4:
        assert grid.zeros is not None
        zp = WeightFormat(4, group, Scheme.ZP)
        return held(zp, grid.codes, spread(grid.zeros))
    offsets: NDArray[np.int16] | int = grid.middle
    if grid.zeros is not None:
        offsets = grid.zeros.astype(np.int16)[:, grid.column_groups()]
    signed = grid.codes.astype(np.int16) - offsets
    if signed.size and (int(signed.max()) > 127 or int(signed.min()) < -128):
        return requantized("8-bit zero points put codes beyond int8")
    return held(WeightFormat(8, group), signed.astype(np.int8))


def _narrow(scales: NDArray[np.float16] | Float32) -> NDArray[np.float16] | Float32:
    """Scales in float16 where that keeps every one of them."""
    if scales.dtype == np.float16:
        return scales
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scales) else scales


def to_grid(weight: WeightTensor) -> CodeGrid:
    """An integer weight of the engine as the formats of the field say it.

    Raises QuantError: bf16, fp8, a float minimum, or whole-row int8 with rotated columns or outliers.
    """
    form = weight.format
    if (
        form.bits == 16
        or form.scheme in (Scheme.MIN, Scheme.FP8)
        or form.is_rotated
        or form.outliers
    ):
        raise QuantError(
            f"{form.full_form} has no place in this format; expected integer codes"
            " with a scale and at most a zero point per group"
        )
    assert weight.scales is not None
    codes = weight.codes.astype(np.uint8)
    if form.bits == 8:
        codes = (weight.codes.astype(np.int16) + 128).astype(np.uint8)
    index: NDArray[np.int32] | None = None
    if weight.order is not None:
        codes = in_input_order(codes, weight.order)
        groups = (np.arange(codes.shape[1]) // (form.group_size or codes.shape[1])).astype(np.int32)
        index = in_input_order(groups, weight.order)
    return normalized(
        CodeGrid(form.bits, form.group_size, codes, weight.scales, weight.zeros, index)
    )
