"""Which integer grid a method is to use; the weights on it are `CodeGrid` of the formats."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.grid import CodeGrid
from trivet.errors import ConfigError, QuantError

Float32 = NDArray[np.float32]
BITS = (2, 3, 4, 8)
GROUP_SIZES = (32, 64, 128, 256)
F16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """bits per code; columns per group (None: the row); symmetric (zero 2^(bits-1)) or zero point."""

    bits: int
    group_size: int | None
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError("bits", self.bits, ", ".join(map(str, BITS)))
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError("group_size", self.group_size, "32, 64, 128, 256 or row")

    @property
    def max_code(self) -> int:
        return int(2**self.bits - 1)

    @property
    def min_code(self) -> int:
        """0; of symmetric 8 bits 1, which stands for -127: the engine's int8 codes have no -128."""
        return 1 if self.bits == 8 and self.symmetric else 0

    @property
    def middle(self) -> int:
        """The code of zero of symmetric grids."""
        return int(2 ** (self.bits - 1))

    @property
    def name(self) -> str:
        """``w4-g64``, ``w4-g64-zp``, ``w8-row``."""
        group = "row" if self.group_size is None else f"g{self.group_size}"
        return f"w{self.bits}-{group}" + ("" if self.symmetric else "-zp")

    def group_of(self, columns: int) -> int:
        """Columns of one group of a weight with so many columns. Raises QuantError: no whole groups."""
        group = self.group_size or columns
        if columns % group:
            fits = [str(g) for g in GROUP_SIZES if columns % g == 0]
            raise QuantError(
                f"group_size {group} does not divide {columns} columns; allowed here:"
                f" {', '.join([*fits, 'row'])}"
            )
        return group

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, fp16 scales and packed zero points of a weight."""
        groups = columns // self.group_of(columns)
        zeros = 0 if self.symmetric else -(-rows * self.bits // 32) * 4 * groups
        return rows * -(-columns * self.bits // 32) * 4 + 2 * rows * groups + zeros


def code_grid(
    grid: Grid,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float16],
    zeros: NDArray[np.uint8] | None,
    group_index: NDArray[np.int32] | None = None,
) -> CodeGrid:
    """Codes of a weight on a grid, as the formats of the field take them."""
    assert (zeros is None) == grid.symmetric, grid
    return CodeGrid(grid.bits, grid.group_size, codes, scales, zeros, group_index)


def dequantize(weight: CodeGrid) -> Float32:
    """The values of a weight, float32 [N, K]; as `CodeGrid.values`, without an index per column."""
    if weight.group_index is not None:
        return weight.values()
    rows, columns = weight.shape
    blocks = weight.codes.reshape(rows, weight.num_groups, -1).astype(np.float32)
    offset = weight.middle if weight.zeros is None else weight.zeros[:, :, None]
    blocks -= np.asarray(offset, np.float32)
    blocks *= weight.scales.astype(np.float32)[:, :, None]
    return blocks.reshape(rows, columns)


def to_f16_scales(scales: Float32) -> NDArray[np.float16]:
    """Scales as they are stored. Raises QuantError: one is too large for fp16 or not finite."""
    if not np.isfinite(scales).all() or (np.abs(scales) > F16_MAX).any():
        raise QuantError("a scale is too large for fp16")
    return scales.astype(np.float16)
