"""Many small weights of odd shapes through every layout: what is written is what is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from support.grids import assert_same_grid
from trivet.checkpoint.formats import CodeGrid, awq, compressed_tensors, gptq
from trivet.checkpoint.formats.grid import normalized, to_grid, to_source
from trivet.checkpoint.formats.stored import Stored
from trivet.checkpoint.source import FloatMatrix
from trivet.models.reference import to_float

CASES = 1000  # of each layout
GROUPS = (16, 32, 64, 96, 128, 256, None)


def _grids(seed: int, bits: tuple[int, ...], out_step: int, k_step: int) -> Iterator[CodeGrid]:
    """Random codes, scales, zero points and orders; shapes are multiples of the steps."""
    rng = np.random.default_rng(seed)
    for _ in range(CASES):
        width = int(rng.choice(bits))
        n, k = out_step * int(rng.integers(1, 4)), k_step * int(rng.integers(1, 9))
        group = GROUPS[rng.integers(len(GROUPS))]
        group = None if group is None or k % group else group
        count = 1 if group is None else k // group
        order = None
        if rng.random() < 0.3:
            order = rng.permutation(np.arange(k) // (group or k)).astype(np.int32)
        yield CodeGrid(
            width,
            group,
            rng.integers(0, 1 << width, (n, k)).astype(np.uint8),
            (rng.standard_normal((n, count)) * 0.1).astype(np.float16),
            rng.integers(1, 1 << width, (n, count)).astype(np.uint8)
            if rng.random() < 0.5
            else None,
            order,
        )


def test_gptq() -> None:
    for i, grid in enumerate(_grids(1, gptq.BITS, 32, 32)):
        version = list(gptq.Version)[i % 2]
        parts = gptq.encode(grid, version)
        back = gptq.decode(parts, grid.bits, grid.group_size, version)
        assert_same_grid(back, normalized(grid))


def test_compressed_tensors() -> None:
    for i, grid in enumerate(_grids(2, compressed_tensors.BITS, 3, 16)):
        parts = compressed_tensors.encode(grid, padded=bool(i % 2))
        if 32 % grid.bits and i % 2 == 0 and _looks_padded(parts, grid):
            continue
        back = compressed_tensors.decode(parts, grid.bits, grid.group_size)
        assert_same_grid(back, normalized(grid))


def _looks_padded(parts: dict[str, Stored], grid: CodeGrid) -> bool:
    """Dense words of a weight so narrow that nothing tells them from padded ones."""
    words = parts["weight_packed"].array
    return words.size < 8 and compressed_tensors.is_padded(words, grid.bits, grid.shape[1])


def test_awq() -> None:
    for grid in _grids(3, (4,), 8, 16):
        if grid.group_index is None:
            assert_same_grid(awq.decode(awq.encode(grid), grid.group_size), normalized(grid))


@pytest.mark.parametrize("seed", [4, 5])
def test_the_engine_holds_every_value(seed: int) -> None:
    """As one of its own forms, or as floats where it has none; never changed."""
    kinds: dict[str, int] = {}
    for grid in _grids(seed, (2, 3, 4, 5, 8), 1, 16):
        source = to_source(grid, "any")
        np.testing.assert_array_equal(to_float(source), grid.values())
        kind = "floats" if isinstance(source, FloatMatrix) else source.format.name
        kinds[kind] = kinds.get(kind, 0) + 1
        if isinstance(source, FloatMatrix):
            group = normalized(grid).group_size
            is_odd = group is not None and group % 16 != 0
            assert is_odd or grid.bits == 8
            continue
        if source.order is not None:
            kinds["ordered"] = kinds.get("ordered", 0) + 1
        back = to_grid(source)
        if grid.bits in (4, 8) and back.group_size == normalized(grid).group_size:
            np.testing.assert_array_equal(back.group_index, normalized(grid).group_index)
        np.testing.assert_array_equal(back.values(), grid.values())
    assert {
        "ordered",
        "w4a8-g32",
        "w4a8-g64-zp",
        "w4a8-g128",
        "w8a8-g64",
        "w8a8-g128",
        "floats",
    } <= set(kinds)


def test_act_order_with_groups_of_unequal_sizes_becomes_floats() -> None:
    index = np.array([0] * 40 + [1] * 24, np.int32)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, 64)).astype(np.uint8)
    grid = CodeGrid(4, 32, codes, np.ones((3, 2), np.float16), None, index)
    source = to_source(grid, "any")
    assert isinstance(source, FloatMatrix)
    assert "unequal" in source.note
    np.testing.assert_array_equal(source.values, grid.values())
