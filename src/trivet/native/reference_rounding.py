"""Numpy references of `trivet.native.rounding`, column by column. For tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trivet.native.rounding import ColumnGrid, Float32


def _coded(grid: ColumnGrid, step: int, wanted: Float32) -> tuple[Float32, Float32]:
    """Codes nearest to what a column wants, and their values."""
    group = grid.groups[step]
    zero = np.float32(grid.middle) if grid.zeros is None else grid.zeros[group]
    code = np.rint(wanted * grid.inverse[group]) + zero
    code = code.clip(np.float32(grid.low), np.float32(grid.high))
    return code, (code - zero) * grid.scales[group]


def gptq_panel(
    grid: ColumnGrid,
    upper: Float32,
    left: Float32,
    places: NDArray[np.int32],
    begin: int,
    end: int,
    codes: NDArray[np.uint8],
    errors: Float32,
) -> None:
    """As `trivet.native.rounding.gptq_panel`."""
    for j in range(begin, end):
        code, value = _coded(grid, j, left[j])
        codes[places[j]] = code
        errors[j - begin] = error = (left[j] - value) / upper[j, j]
        left[j + 1 : end] -= upper[j, j + 1 : end, None] * error


def descend_panel(
    grid: ColumnGrid,
    gram: Float32,
    slope: Float32,
    values: Float32,
    begin: int,
    end: int,
    codes: NDArray[np.uint8],
    changes: Float32,
) -> None:
    """As `trivet.native.rounding.descend_panel`."""
    for j in range(begin, end):
        code, value = _coded(grid, j, slope[j] / gram[j, j] + values[j])
        codes[j] = code
        changes[j - begin] = change = value - values[j]
        slope[j:end] -= gram[j, j:end, None] * change
