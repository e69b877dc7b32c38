"""Weights in the layout the kernels read: the one place that knows it in Python.

Every level of the core reads the same bytes. Output channels come in blocks of 16, N padded to 16 and
K to 64; everything is little endian. NB = n_padded / 16, KP = k_padded, G = num_groups:

    bf16   codes uint16 [NB, KP/2, 16, 2]
    w8     codes int8   [NB, KP/4, 16, 4]
    w4     codes uint8  [NB, KP/32, 4, 16, 4]: byte (r, n, j) of 32 columns starting at k holds the
           code of column k + 4r + j in its low nibble and of column k + 16 + 4r + j in its high one
    fp8    codes uint8  [NB, KP, 16], e4m3
    scales float16 or float32 [NB, G, 16] (G = 1 for the row, float32 for whole-row int8); minima alike
    zeros  uint8 [NB, G, 16]
    order  int32 [K], where the weight has one: the input column that stands at each place

Whole-row int8 may add the range of static activations, amax float32 [1], and of M outlier columns their
places, outliers int32 [M], and their weights, outlier_codes uint16 [NB, pad64(M)/2, 16, 2], like bf16.

Padded codes and scales are zero; the kernels meet them only with zero activations. `pack` and
`unpack` are inverse to each other. The structs on the other side are in native/kernels/linear/linear.h.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from trivet.config import RowRule, Scheme, WeightFormat
from trivet.native.weights import ROW_ACTIVATION_GROUP, WeightTensor

CHANNELS = 16  # output channels of one block
K_ALIGN = 64  # columns are padded to a multiple of this


class WeightKind(enum.IntEnum):
    """Which kernel reads a weight; the values of `WeightKind` in linear.h."""

    BF16 = 0
    INT8_ROW = 1
    INT8_GROUP = 2
    INT4_GROUP = 3
    INT4_ROW = 4
    INT4_BF16 = 5
    FP8 = 6

    @classmethod
    def of(cls, format: WeightFormat) -> WeightKind:
        if format.bits == 16:
            return cls.BF16
        if format.scheme is Scheme.FP8:
            return cls.FP8
        if format.bits == 4 and format.activation_bits == 16:
            return cls.INT4_BF16
        if format.bits == 4:
            return cls.INT4_ROW if format.group_size is None else cls.INT4_GROUP
        return cls.INT8_ROW if format.group_size is None else cls.INT8_GROUP


class ScaleType(enum.IntEnum):
    """The values of `ScaleType` in linear.h."""

    F16 = 0
    F32 = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float16 if self is ScaleType.F16 else np.float32)


# The linears of a layer in the packed file, and the roles that read one input and lie side by side.
LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def linear_names(tensors: Container[str], layer: int, linear: str) -> list[str]:
    """Names of the tensors of one linear: one for all its roles, or one each where they differ in
    format or order of columns. Their outputs stand side by side. ``linear``: a key of `LINEARS`.
    """
    whole = f"layers.{layer}.{linear}"
    if whole in tensors:
        return [whole]
    return [f"layers.{layer}.{role}" for role in LINEARS[linear]]


# The values of `Scheme` in linear.h; of fp8 the kind says it all.
SCHEME_VALUES = {Scheme.SYM: 0, Scheme.ZP: 1, Scheme.MIN: 2, Scheme.FP8: 0}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything about a packed weight but its bytes.

    ``parts`` says which arrays it has, with dtype and shape; each is contiguous.
    """

    format: WeightFormat
    n: int
    k: int
    scale_type: ScaleType
    has_order: bool = False

    def __post_init__(self) -> None:
        assert self.n > 0, self.n
        assert self.k > 0, self.k

    @property
    def kind(self) -> WeightKind:
        return WeightKind.of(self.format)

    @property
    def n_padded(self) -> int:
        return -(-self.n // CHANNELS) * CHANNELS

    @property
    def k_padded(self) -> int:
        return -(-self.k // K_ALIGN) * K_ALIGN

    @property
    def group(self) -> int:
        """Columns of one sum: of a scale of the weight, or fewer where that is the row's."""
        if self.kind is WeightKind.INT4_ROW:
            return ROW_ACTIVATION_GROUP
        return self.format.group_size or self.k_padded

    @property
    def num_groups(self) -> int:
        """Sums of one row and channel."""
        return -(-self.k // self.group)

    @property
    def scale_groups(self) -> int:
        """Scales of one output channel."""
        return 1 if self.format.group_size is None else self.num_groups

    @property
    def parts(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        blocks, k = self.n_padded // CHANNELS, self.k_padded
        codes: dict[WeightKind, tuple[DTypeLike, tuple[int, ...]]] = {
            WeightKind.BF16: (np.uint16, (blocks, k // 2, CHANNELS, 2)),
            WeightKind.INT8_ROW: (np.int8, (blocks, k // 4, CHANNELS, 4)),
            WeightKind.INT8_GROUP: (np.int8, (blocks, k // 4, CHANNELS, 4)),
            WeightKind.INT4_GROUP: (np.uint8, (blocks, k // 32, 4, CHANNELS, 4)),
            WeightKind.INT4_ROW: (np.uint8, (blocks, k // 32, 4, CHANNELS, 4)),
            WeightKind.INT4_BF16: (np.uint8, (blocks, k // 32, 4, CHANNELS, 4)),
            WeightKind.FP8: (np.uint8, (blocks, k, CHANNELS)),
        }
        dtype, shape = codes[self.kind]
        parts = {"codes": (np.dtype(dtype), shape)}
        if self.kind is not WeightKind.BF16:
            per_group = (blocks, self.scale_groups, CHANNELS)
            parts["scales"] = (self.scale_type.dtype, per_group)
            if self.format.scheme is Scheme.MIN:
                parts["minima"] = (self.scale_type.dtype, per_group)
            if self.format.scheme is Scheme.ZP:
                parts["zeros"] = (np.dtype(np.uint8), per_group)
        if self.has_order:
            parts["order"] = (np.dtype(np.int32), (self.k,))
        if self.format.is_row:
            if self.format.rule is RowRule.STATIC:
                parts["amax"] = (np.dtype(np.float32), (1,))
            count = self.format.outliers
            if count:
                pairs = -(-count // K_ALIGN) * K_ALIGN // 2
                parts["outliers"] = (np.dtype(np.int32), (count,))
                parts["outlier_codes"] = (np.dtype(np.uint16), (blocks, pairs, CHANNELS, 2))
        return parts

    @property
    def num_bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in self.parts.values())


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight in its layout; the arrays are those `layout.parts` names."""

    layout: Layout
    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    minima: NDArray[Any] | None = None
    zeros: NDArray[np.uint8] | None = None
    order: NDArray[np.int32] | None = None
    amax: NDArray[np.float32] | None = None
    outliers: NDArray[np.int32] | None = None
    outlier_codes: NDArray[np.uint16] | None = None

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        found = {name: getattr(self, name) for name in self.layout.parts}
        assert all(array is not None for array in found.values()), found.keys()
        return found

    def __post_init__(self) -> None:
        for name, (dtype, shape) in self.layout.parts.items():
            array = getattr(self, name)
            assert array.dtype == dtype, (name, array.dtype, dtype)
            assert array.shape == shape, (name, array.shape, shape)


def layout_of(weight: WeightTensor) -> Layout:
    """The layout `pack` gives the weight."""
    n, k = weight.shape
    scale_type = ScaleType.F32
    if weight.scales is not None and weight.scales.dtype == np.float16:
        scale_type = ScaleType.F16
    layout = Layout(weight.format, n, k, scale_type, weight.order is not None)
    row = layout.kind is WeightKind.INT8_ROW
    assert not (row and scale_type is ScaleType.F16), "whole-row int8 has float32 scales"
    return layout


def pack(weight: WeightTensor) -> PackedWeight:
    """Arrange a weight for the kernels. Copies; nothing is rounded."""
    layout = layout_of(weight)
    kind, blocks, k = layout.kind, layout.n_padded // CHANNELS, layout.k_padded
    rows = np.zeros((layout.n_padded, k), weight.codes.dtype)
    rows[: layout.n, : layout.k] = weight.codes
    if kind is WeightKind.BF16:
        codes = _in_pairs(rows)
    elif kind is WeightKind.FP8:
        codes = rows.reshape(blocks, CHANNELS, k).transpose(0, 2, 1)
    elif layout.format.bits == 4:
        assert not (rows > 15).any(), "4-bit codes are 0..15"
        # [block, n, k/32, half, r, j] -> [block, k/32, half, r, n, j]
        split = rows.reshape(blocks, CHANNELS, k // 32, 2, 4, 4).transpose(0, 2, 3, 4, 1, 5)
        codes = split[:, :, 0] | split[:, :, 1] << 4
    else:
        assert not (rows == -128).any(), "8-bit codes are -127..127"
        codes = rows.reshape(blocks, CHANNELS, k // 4, 4).transpose(0, 2, 1, 3)

    def by_block(values: NDArray[Any] | None) -> NDArray[Any] | None:
        if values is None:
            return None
        padded = np.zeros((layout.n_padded, layout.scale_groups), values.dtype)
        padded[: layout.n] = values
        blocked = padded.reshape(blocks, CHANNELS, layout.scale_groups).transpose(0, 2, 1)
        return np.ascontiguousarray(blocked)

    high: NDArray[np.uint16] | None = None
    if weight.outlier_codes is not None:
        count = layout.format.outliers
        columns = np.zeros((layout.n_padded, -(-count // K_ALIGN) * K_ALIGN), np.uint16)
        columns[: layout.n, :count] = weight.outlier_codes
        high = np.ascontiguousarray(_in_pairs(columns))
    return PackedWeight(
        layout,
        np.ascontiguousarray(codes),
        by_block(weight.scales),
        by_block(weight.minima),
        by_block(weight.zeros),
        weight.order,
        weight.amax if "amax" in layout.parts else None,
        weight.outliers if "outliers" in layout.parts else None,
        high,
    )


def _in_pairs(rows: NDArray[Any]) -> NDArray[Any]:
    """bf16 bits [n_padded, k_padded] in the order of the kernels."""
    n, k = rows.shape
    return rows.reshape(n // CHANNELS, CHANNELS, k // 2, 2).transpose(0, 2, 1, 3)


def unpack(packed: PackedWeight) -> WeightTensor:
    """The weight `packed` was made from, with ``exact`` and ``source`` unset."""
    layout = packed.layout
    n, k = layout.n_padded, layout.k_padded
    if layout.format.bits == 4:
        halves = np.stack([packed.codes & 15, packed.codes >> 4], axis=2)
        rows = halves.transpose(0, 4, 1, 2, 3, 5).reshape(n, k)
    elif layout.kind is WeightKind.FP8:
        rows = packed.codes.transpose(0, 2, 1).reshape(n, k)
    else:
        rows = _from_words(packed.codes)
    high: NDArray[np.uint16] | None = None
    if packed.outlier_codes is not None:
        high = _from_words(packed.outlier_codes)[: layout.n, : layout.format.outliers]
        high = np.ascontiguousarray(high)

    def by_row(values: NDArray[Any] | None) -> NDArray[Any] | None:
        if values is None:
            return None
        return np.ascontiguousarray(
            values.transpose(0, 2, 1).reshape(n, layout.scale_groups)[: layout.n]
        )

    return WeightTensor(
        layout.format,
        np.ascontiguousarray(rows[: layout.n, : layout.k]),
        by_row(packed.scales),
        by_row(packed.minima),
        by_row(packed.zeros),
        order=packed.order,
        amax=packed.amax,
        outliers=packed.outliers,
        outlier_codes=high,
    )


def _from_words(codes: NDArray[Any]) -> NDArray[Any]:
    """Codes whose innermost axis is four bytes as rows [n_padded, k_padded]."""
    # The innermost four bytes stay together, so they are moved as one.
    words = np.ascontiguousarray(codes).view(np.uint32)[..., 0]
    rows = np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(len(codes) * CHANNELS, -1)
    return rows.view(codes.dtype)


def can_concatenate(weights: Sequence[WeightTensor]) -> bool:
    """Whether the weights share input width, order of columns, format, scale type, and the range and
    outlier columns of their input.
    """

    def key(weight: WeightTensor) -> tuple[object, ...]:
        layout = layout_of(weight)
        inputs = [
            getattr(weight, part).tobytes()
            for part in ("order", "amax", "outliers")
            if part in layout.parts
        ]
        return weight.format, weight.shape[1], layout.scale_type, weight.order is None, *inputs

    return len({key(weight) for weight in weights}) == 1


def concatenate(weights: Sequence[WeightTensor]) -> WeightTensor:
    """Stack weights that read the same input along N (q, k, v; gate, up) into one.

    The caller has asked `can_concatenate`. ``source`` joins the different sources with ``+``.
    """
    assert can_concatenate(weights), [(w.format, w.shape) for w in weights]

    def stacked(name: str) -> NDArray[Any] | None:
        if getattr(weights[0], name) is None:
            return None
        return np.concatenate([getattr(weight, name) for weight in weights])

    codes = stacked("codes")
    assert codes is not None
    return WeightTensor(
        weights[0].format,
        codes,
        stacked("scales"),
        stacked("minima"),
        stacked("zeros"),
        weights[0].order,
        exact=all(weight.exact for weight in weights),
        source="+".join(dict.fromkeys(weight.source for weight in weights)),
        amax=weights[0].amax,
        outliers=weights[0].outliers,
        outlier_codes=stacked("outlier_codes"),
    )
