"""AWQ tensors: written and read, in the order of nibbles that its kernels want."""

from __future__ import annotations

import numpy as np
import pytest

from support.grids import assert_same_grid, random_grid
from trivet.checkpoint.formats import CodeGrid
from trivet.checkpoint.formats.awq import ORDER, config, decode, encode
from trivet.checkpoint.formats.grid import normalized
from trivet.errors import QuantError


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize("out", [8, 24, 64])
def test_round_trip(out: int, group: int | None, symmetric: bool) -> None:
    grid = random_grid(out, 256, 4, group, symmetric=symmetric)
    parts = encode(grid)
    assert parts["qweight"].array.shape == (256, out // 8)
    back = decode(parts, group)
    assert_same_grid(back, normalized(grid))
    # W = (q - z) * s, nibble by nibble.
    words, zero_words = parts["qweight"].array, parts["qzeros"].array
    scales = parts["scales"].array.astype(np.float64)
    want = np.empty(grid.shape)
    for word in range(out // 8):
        for nibble, column in enumerate(ORDER):
            o = 8 * word + column
            codes = words[:, word] >> 4 * nibble & 15
            zeros = np.repeat(zero_words[:, word] >> 4 * nibble & 15, group or 256)
            want[o] = (codes - zeros) * np.repeat(scales[:, o], group or 256)
    np.testing.assert_array_equal(back.values(), want.astype(np.float32))


def test_column_j_lies_in_its_nibble() -> None:
    grid = random_grid(8, 32, 4, 32)
    word = int(encode(grid)["qweight"].array[0, 0]) & 0xFFFFFFFF
    for column, nibble in enumerate([0, 4, 1, 5, 2, 6, 3, 7]):
        assert word >> 4 * nibble & 15 == grid.codes[column, 0]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (random_grid(8, 64, 3, 32), "3 bits"),
        (random_grid(8, 64, 4, 32, act_order=True), "act-order"),
        (random_grid(12, 64, 4, 32), "multiple of 8"),
        (random_grid(8, 96, 4, 64), "whole groups"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(grid: CodeGrid, words: str) -> None:
    with pytest.raises(QuantError, match=words):
        encode(grid)


def test_the_config_has_one_group() -> None:
    one = {"a": random_grid(8, 64, 4, 32), "b": random_grid(8, 128, 4, 32)}
    assert config(one, ["lm_head"]) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    with pytest.raises(QuantError, match="32, 64"):
        config(one | {"c": random_grid(8, 128, 4, 64)}, [])
