"""Single linear and activation kernels of the core, called from numpy arrays.

For tests and measurements only; the model's forward never passes through here. ``level`` is a name
from `_core.isa_levels()`.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.config import Scheme
from trivet.native import _core
from trivet.native.packing import SCHEME_VALUES, Layout, PackedWeight, WeightKind
from trivet.native.weights import hadamard_width


@dataclasses.dataclass(frozen=True)
class Activations:
    """Rows in the form a weight layout asks for; codes are padded to its k_padded.

    codes   uint16 (bf16 bits) or int8 [R, k_padded]
    scales  float32 [R, G], int8 only; beside bf16 the sums of groups where the weight has minima
    sums    int32 [R, G], sums of codes, int8 only
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    sums: NDArray[np.int32] | None = None


def quantize(
    level: str,
    x: NDArray[np.float32],
    layout: Layout,
    *,
    amax: float = 0.0,
    core: ModuleType = _core,
) -> Activations:
    """Activations x float32 [R, K] for a weight of the given layout.

    amax  range of static whole-row int8; 0: each row's own       core  module to call
    """
    rows = x.shape[0]
    x = np.ascontiguousarray(x, np.float32)
    if layout.kind in (WeightKind.BF16, WeightKind.INT4_BF16, WeightKind.FP8):
        bits = np.empty((rows, layout.k_padded), np.uint16)
        core.kernel_quantize_bf16(level, x, bits)
        if layout.format.scheme is not Scheme.MIN:
            return Activations(bits)
        group_sums = np.empty((rows, layout.num_groups), np.float32)
        core.kernel_group_sums(bits, layout.group, group_sums)
        return Activations(bits, group_sums)
    codes = np.empty((rows, layout.k_padded), np.int8)
    scales = np.empty((rows, layout.num_groups), np.float32)
    sums = np.empty((rows, layout.num_groups), np.int32)
    row = layout.kind is WeightKind.INT8_ROW
    width = hadamard_width(layout.k) if layout.format.is_rotated else 1
    group = 0 if row else layout.group
    core.kernel_quantize_int8(level, x, group, width, amax, codes, scales, sums)
    return Activations(codes, scales, sums)


def _bytes(array: NDArray[Any] | None) -> NDArray[np.uint8] | None:
    return None if array is None else array.reshape(-1).view(np.uint8)


def linear(
    level: str,
    packed: PackedWeight,
    x: Activations,
    *,
    bias: NDArray[np.float32] | None = None,
    out: NDArray[np.float32] | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
    core: ModuleType = _core,
) -> NDArray[np.float32]:
    """x times the packed weight; returns ``out`` float32 [R, N] (new and zero when None).

    bias        float32 [N], added to the product
    accumulate  add to ``out`` instead of writing it
    blocks      half-open range of 16-channel blocks to compute; None: all
    """
    layout = packed.layout
    rows = x.codes.shape[0]
    if out is None:
        out = np.zeros((rows, layout.n), np.float32)
    if bias is not None:
        bias = np.pad(bias, (0, layout.n_padded - layout.n))
    begin, end = blocks or (0, layout.n_padded // 16)
    core.kernel_linear(
        level,
        int(layout.kind),
        SCHEME_VALUES[layout.format.scheme],
        int(layout.scale_type),
        layout.n,
        layout.k,
        layout.group,
        _bytes(packed.codes),
        _bytes(packed.scales),
        _bytes(packed.minima),
        _bytes(packed.zeros),
        bias,
        rows,
        _bytes(x.codes),
        x.scales,
        x.sums,
        begin,
        end,
        out,
        accumulate,
    )
    return out
