"""compressed-tensors: both packed layouts, zero points packed across, schemes of groups of layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.grids import assert_same_grid, random_grid, ref_row
from trivet.checkpoint.formats import CodeGrid
from trivet.checkpoint.formats.bits import pack_dense
from trivet.checkpoint.formats.compressed_tensors import (
    config,
    decode,
    decode_int8,
    encode,
    encode_fp8,
    encode_int8,
)
from trivet.checkpoint.formats.fp8 import quantize
from trivet.checkpoint.formats.grid import normalized
from trivet.checkpoint.formats.stored import Stored
from trivet.errors import QuantError

# Codes (7i + 3i^2 + bits) mod 2^bits of [3, 11], packed by pack_to_int32 of compressed-tensors 0.20.1
# along the input and along the output.
ORACLE: dict[int, tuple[list[list[int]], list[list[int]]]] = {
    2: (
        [[164482], [657930], [2631720]],
        [[10, 40, 32, 2, 10, 40, 32, 2, 10, 40, 32]],
    ),
    3: (
        [[1810167659, 1], [2075521659, 0], [-113386759, 0]],
        [[91, 509, 205, 331, 383, 217, 489, 111, 91, 509, 205]],
    ),
    4: (
        [[-1977594140, 1644], [-297784692, 516], [-1463391094, 1026]],
        [[2756, 2190, 3246, 1572, 1536, 3138, 2282, 2792, 588, 6, 1062]],
    ),
    5: (
        [[-417661467, 6225230], [-350622403, 796031], [1517532971, 1319774]],
        [[12197, 25903, 14207, 7797, 7729, 14003, 26619, 11753, 3261, 1079, 5239]],
    ),
    8: (
        [
            [941756936, -862030252, 8010240],
            [-1235350336, 1390573588, 12993736],
            [175168590, -1359195990, 15213670],
        ],
        [
            [
                5160968, 14421010, 7364130, 702008, 11146324, 5273718, 16573086, 11424460, 6735872,
                2376762, 15255162,
            ]
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("bits", ORACLE)
def test_words_are_those_of_the_library(bits: int) -> None:
    i = np.arange(33)
    codes = ((7 * i + 3 * i * i + bits) % (1 << bits)).astype(np.uint8).reshape(3, 11)
    grid = CodeGrid(bits, 1, codes, np.ones(codes.shape, np.float16), codes)
    parts = encode(grid)
    along, across = ORACLE[bits]
    assert parts["weight_packed"].array.tolist() == along
    assert parts["weight_zero_point"].array.tolist() == across
    assert_same_grid(decode(parts, bits, 1), grid)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_round_trip(
    bits: int, group: int | None, symmetric: bool, act_order: bool, padded: bool
) -> None:
    grid = random_grid(27, 288, bits, group, symmetric=symmetric, act_order=act_order)
    parts = encode(grid, padded=padded)
    assert parts["weight_shape"].array.tolist() == [27, 288]
    assert ("weight_g_idx" in parts) == act_order
    back = decode(parts, bits, group)
    assert_same_grid(back, normalized(grid))
    np.testing.assert_array_equal(back.values(), grid.values())


def test_padded_and_dense_are_told_apart_by_their_width() -> None:
    grid = random_grid(32, 256, 3, 64, symmetric=False)
    dense, padded = encode(grid), encode(grid, padded=True)
    assert dense["weight_packed"].array.shape == (32, 24)
    assert padded["weight_packed"].array.shape == (32, 26)
    assert dense["weight_zero_point"].array.shape == (3, 4)
    assert padded["weight_zero_point"].array.shape == (4, 4)
    row = padded["weight_packed"].array[0]
    codes = [code for word in row for code in ref_row(word.reshape(1), 3, 10)][:256]
    assert codes == grid.codes[0].tolist()


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_rows(symmetric: bool) -> None:
    grid = random_grid(24, 96, 8, None, symmetric=symmetric)
    parts = encode_int8(grid)
    assert parts["weight"].array.dtype == np.int8
    assert parts["weight_scale"].array.shape == (24, 1)
    assert ("weight_zero_point" in parts) == (not symmetric)
    assert_same_grid(decode_int8(parts, None), normalized(grid))
    with pytest.raises(QuantError, match="one scale a row"):
        encode_int8(random_grid(24, 96, 8, 32))


def test_scales_keep_their_type() -> None:
    grid = random_grid(8, 32, 4, 32)
    for values, kind in [
        (grid.scales, "F16"),
        (np.full((8, 1), 3.0 * 2.0**-30, np.float32), "BF16"),
        (np.full((8, 1), 1.0001, np.float32), "F32"),
    ]:
        parts = encode(CodeGrid(4, 32, grid.codes, values))
        assert parts["weight_scale"].dtype == kind
        got = decode(parts, 4, 32).scales.astype(np.float32)
        np.testing.assert_array_equal(got, values.astype(np.float32))


def test_one_scale_of_the_tensor_is_each_rows() -> None:
    grid = random_grid(8, 32, 4, None, symmetric=False)
    parts = encode(grid)
    parts["weight_scale"] = Stored("F16", grid.scales[0])
    got = decode(parts, 4, None)
    np.testing.assert_array_equal(got.scales, np.full((8, 1), grid.scales[0, 0]))


def test_a_symmetric_weight_has_no_zero_points() -> None:
    """Nor has an asymmetric one whose zero points all are the middle (compressed-tensors#225)."""
    grid = random_grid(8, 32, 4, 32)
    explicit = CodeGrid(4, 32, grid.codes, grid.scales, np.full((8, 1), 8, np.uint8))
    assert "weight_zero_point" in encode(explicit)
    assert_same_grid(decode(encode(explicit), 4, 32), normalized(grid))


def test_the_config_says_each_scheme_once() -> None:
    weights: dict[str, Any] = {f"model.layers.{i}.o": random_grid(8, 64, 4, 32) for i in range(3)}
    weights["model.layers.1.o"] = random_grid(8, 64, 8, None, symmetric=False)
    weights["model.layers.3.o"] = quantize(np.eye(256, dtype=np.float32), (128, 128))
    kinds = dict.fromkeys(weights, "pack-quantized")
    kinds |= {"model.layers.1.o": "int-quantized", "model.layers.3.o": "float-quantized"}
    said = config(weights, ["lm_head"], kinds)
    assert said["format"] == "mixed-precision"
    assert said["ignore"] == ["lm_head"]
    first, second, third = said["config_groups"].values()
    assert first["targets"] == ["Linear"]
    assert first["input_activations"] is None
    assert first["weights"]["strategy"] == "group"
    assert first["weights"]["group_size"] == 32
    assert second["targets"] == [r"re:^model\.layers\.1\.o$"]
    assert second["weights"]["symmetric"] is False
    assert second["weights"]["strategy"] == "channel"
    assert second["input_activations"]["strategy"] == "token"
    assert third["weights"]["block_structure"] == [128, 128]
    assert third["input_activations"]["group_size"] == 128


def test_fp8_parts() -> None:
    values = np.eye(256, dtype=np.float32)
    for block, shape in {"tensor": (1,), "channel": (256, 1), "block": (2, 2)}.items():
        weight = quantize(values, (128, 128) if block == "block" else block)
        assert encode_fp8(weight)["weight_scale"].array.shape == shape


def test_packed_words_are_little_endian_rows() -> None:
    codes = np.arange(16, dtype=np.uint8)[None, :]
    assert [hex(int(w) & 0xFFFFFFFF) for w in pack_dense(codes, 4)[0]] == [
        "0x76543210",
        "0xfedcba98",
    ]
