"""Rounding with feedback on the native core: panels of columns of GPTQ and of coordinate descent.

Float32 throughout and no sums: every level and `trivet.native.reference_rounding` give the same bits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from trivet.native import _core
from trivet.native.isa import isa_report

Float32 = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class ColumnGrid:
    """How codes of a weight [N, K] map to values, scale * (code - zero), by group of columns.

    scales   float32 [G, N]
    inverse  float32 [G, N], 1 / scale, or 0 where the scale is 0
    zeros    float32 [G, N], or None: ``middle`` everywhere
    low      least code, ``high`` the largest, 0 to 255
    groups   int32 [K], the group of each column in the order of the steps
    """

    scales: Float32
    inverse: Float32
    zeros: Float32 | None
    middle: float
    low: int
    high: int
    groups: NDArray[np.int32]


def gptq_panel(
    grid: ColumnGrid,
    upper: Float32,
    left: Float32,
    places: NDArray[np.int32],
    begin: int,
    end: int,
    codes: NDArray[np.uint8],
    errors: Float32,
    *,
    isa: str | None = None,
) -> None:
    """Steps [begin, end) of GPTQ's pass over the columns.

    upper   float32 [K, K], the factor U in the order of the steps
    left    float32 [K, N], what is left of the columns in that order; changed from begin to end
    places  int32 [K]: step j is column places[j], whose codes are ``codes[places[j]]``
    codes   uint8 [K, N], written     errors  float32 [end - begin or more, N], written
    """
    _core.gptq_panel(
        isa_report(isa).active, upper, left, places, grid.groups, grid.scales, grid.inverse,
        grid.zeros, grid.middle, grid.low, grid.high, begin, end, codes, errors,
    )  # fmt: skip


def descend_panel(
    grid: ColumnGrid,
    gram: Float32,
    slope: Float32,
    values: Float32,
    begin: int,
    end: int,
    codes: NDArray[np.uint8],
    changes: Float32,
    *,
    isa: str | None = None,
) -> None:
    """Columns [begin, end) of a sweep of cyclic coordinate descent.

    gram    float32 [K, K], H           slope    float32 [K, N], H (w - q); changed from begin to end
    values  float32 [K, N], q           codes    uint8 [K, N], written
    changes float32 [end - begin or more, N], the new values less the old ones, written
    """
    _core.descend_panel(
        isa_report(isa).active, gram, slope, values, grid.groups, grid.scales, grid.inverse,
        grid.zeros, grid.middle, grid.low, grid.high, begin, end, codes, changes,
    )  # fmt: skip
