"""Weights between a checkpoint and the packed cache: codes, scales and scheme, in plain numpy.

A `WeightTensor` is what readers produce (exactly, from the file's own grid) and what quantizers
produce; `packing` turns it into the layout the kernels read. Codes are row-major [N, K].
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trivet.config import RowRule, Scheme, WeightFormat
from trivet.native.e4m3 import decode_values

T = TypeVar("T", bound=np.generic)


@dataclasses.dataclass(frozen=True)
class WeightTensor:
    """One linear weight (or embedding) [N out, K in].

    format   bits 16: ``codes`` uint16 [N, K] holds bf16 bits, the rest is None
             bits 8: int8 codes -127..127; group_size None: ``scales`` float32 [N, 1], and with the
             rule ``hadamard64`` columns that the block Hadamard of the contract has rotated already
             bits 4: uint8 codes 0..15; sym means scale * (code - 8)
             scheme ``fp8``: uint8 codes e4m3, none of them NaN, scale * value
    scales   float16 or float32 [N, G], G = ceil(K / group_size), or 1 for the row
    minima   like scales, scheme ``min`` only: scale * code + minimum
    zeros    uint8 [N, G], scheme ``zp`` only: scale * (code - zero)
    order    int32 [K] or None: column j of ``codes`` is input column order[j], so that the columns of
             a group stand together (act-order); None: they are in the input's order
    exact    whether the tensor holds its source bit for bit
    source   type of the source, for reports (``Q4_1``, ``BF16``, ...)

    Of whole-row int8:
    amax            float32 [1], the range of static activations: what the rule ``static`` needs
    outliers        int32 [M], columns of the input that are large, ascending: of a format with
                    outliers, as many; their codes are 0
    outlier_codes   uint16 [N, M], bf16 bits of those columns: of a format with outliers
    wanted          the form that the file asks for, where it is another; ``amax`` and ``outliers`` of
                    other formats are there for it
    """

    format: WeightFormat
    codes: NDArray[np.uint16] | NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float16] | NDArray[np.float32] | None = None
    minima: NDArray[np.float16] | NDArray[np.float32] | None = None
    zeros: NDArray[np.uint8] | None = None
    order: NDArray[np.int32] | None = None
    exact: bool = False
    source: str = ""
    amax: NDArray[np.float32] | None = None
    outliers: NDArray[np.int32] | None = None
    outlier_codes: NDArray[np.uint16] | None = None
    wanted: WeightFormat | None = None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def num_groups(self) -> int:
        group = self.format.group_size
        return 1 if group is None else -(-self.shape[1] // group)

    def __post_init__(self) -> None:
        bits, scheme = self.format.bits, self.format.scheme
        want = {16: np.uint16, 8: np.uint8 if scheme is Scheme.FP8 else np.int8, 4: np.uint8}[bits]
        assert self.codes.dtype == want, (self.codes.dtype, bits)
        if bits != 16:
            assert self.scales is not None, "integer weights carry scales"
            assert self.scales.shape == (self.shape[0], self.num_groups), self.scales.shape
        assert (self.minima is not None) == (scheme is Scheme.MIN), scheme
        assert (self.zeros is not None) == (scheme is Scheme.ZP), scheme
        if self.order is not None:
            assert self.order.dtype == np.int32, self.order.dtype
            assert np.array_equal(np.sort(self.order), np.arange(self.shape[1])), "a permutation"
        if self.format.is_row:
            assert self.format.rule is not RowRule.STATIC or self.amax is not None
            count = self.format.outliers
            assert (self.outlier_codes is not None) == (count > 0), count
            assert not count or (self.outliers is not None and len(self.outliers) == count), count


ROW_ACTIVATION_GROUP = (
    32  # columns of one activation scale beside 4-bit weights with one scale a row
)


def hadamard_width(k: int) -> int:
    """Width of the rotation of whole-row int8: the largest power of two up to 64 that divides K."""
    return min(k & -k, 64)


def rotate(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiply each row [..., K] by the block Hadamard over sqrt(width), in float64.

    The rotation is its own inverse. Quantizers apply it to weights before rounding them to whole-row
    int8; the kernels apply the same to activations (in float32, in the contract's order).
    """
    k = columns.shape[-1]
    width = hadamard_width(k)
    blocks: NDArray[np.float64] = columns.astype(np.float64)
    blocks = blocks.reshape(*columns.shape[:-1], k // width, width) / np.sqrt(width)
    stride = 1
    while stride < width:
        pairs = blocks.reshape(*blocks.shape[:-1], width // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        blocks = np.stack([low + high, low - high], axis=-2).reshape(blocks.shape)
        stride *= 2
    return blocks.reshape(columns.shape)


def in_input_order(columns: NDArray[T], order: NDArray[np.int32]) -> NDArray[T]:
    """Columns [..., K] that stand in a weight's ``order``, as the input has them."""
    result = np.empty_like(columns)
    result[..., order] = columns
    return result


def dequantize(weight: WeightTensor, *, rotated: bool = False) -> NDArray[np.float32]:
    """The values a weight stands for, float32 [N, K], columns in the input's order.

    Each is the exact scale * (code - offset) + minimum, rounded once to float32. Rotated columns are
    turned back by the block Hadamard, or left as stored when ``rotated``; outlier columns, which are no
    part of what is rotated, are put in their places.
    """
    if weight.order is not None:
        return in_input_order(
            dequantize(dataclasses.replace(weight, order=None), rotated=rotated), weight.order
        )
    if weight.format.bits == 16:
        return (weight.codes.astype(np.uint32) << 16).view(np.float32)
    assert weight.scales is not None
    k = weight.shape[1]
    group = weight.format.group_size or k

    def spread(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.repeat(values.astype(np.float64), group, axis=1)[:, :k]

    offset: NDArray[np.float64] | float = 0.0
    if weight.zeros is not None:
        offset = spread(weight.zeros)
    elif weight.format.bits == 4 and weight.format.scheme is Scheme.SYM:
        offset = 8.0
    codes = weight.codes.astype(np.float64)
    if weight.format.scheme is Scheme.FP8:
        codes = decode_values(weight.codes.astype(np.uint8)).astype(np.float64)
    values = spread(weight.scales) * (codes - offset)
    if weight.minima is not None:
        values = values + spread(weight.minima)
    if weight.format.is_rotated and not rotated:
        values = rotate(values)
    if weight.outlier_codes is not None and not rotated:
        values[:, weight.outliers] = (weight.outlier_codes.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
