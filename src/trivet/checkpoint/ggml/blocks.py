"""The ggml types that are read and written: names, ids, block sizes.

A *block* is ggml's unit: ``values`` weights of one row in ``num_bytes`` bytes. Source: ggml-common.h.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A ggml type: ``values`` weights take ``num_bytes`` bytes; ``id`` is its number in files."""

    name: str
    id: int
    values: int
    num_bytes: int

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.num_bytes / self.values

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` values, a multiple of ``values``."""
        assert columns % self.values == 0, (self.name, columns)
        return columns // self.values * self.num_bytes


TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("BF16", 30, 1, 2),
    )
}
FLOAT_TYPES = ("F32", "F16", "BF16")
