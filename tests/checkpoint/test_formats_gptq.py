"""GPTQ tensors: written and read for every combination, and the version told from the values."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from support.grids import assert_same_grid, random_grid, ref_row
from trivet.checkpoint.formats import CodeGrid
from trivet.checkpoint.formats.gptq import Evidence, Version, _raw, config, decode, encode
from trivet.checkpoint.formats.grid import normalized
from trivet.checkpoint.formats.stored import Stored
from trivet.errors import QuantError

Float32 = NDArray[np.float32]

SHOWN = 8  # rows read bit by bit
COMBINATIONS = [
    (bits, group, symmetric, act_order, version)
    for bits, group, symmetric, act_order, version in itertools.product(
        (2, 3, 4, 8), (32, 64, 128, 256, None), (True, False), (False, True), Version
    )
]


def _ref_dequantize(
    parts: dict[str, Stored], bits: int, version: Version, out: int, k: int
) -> Float32:
    """First rows of W[o, i] = scales[g_idx[i], o] * (q[i, o] - zero[g_idx[i], o]), from the words."""
    words, zero_words = parts["qweight"].array, parts["qzeros"].array
    scales, index = parts["scales"].array, parts["g_idx"].array
    zeros = np.array([ref_row(row, bits, out) for row in zero_words])
    if version is Version.V1:
        zeros = (zeros + 1) % (1 << bits)
    codes = np.array([ref_row(words[:, o], bits, k) for o in range(SHOWN)])
    values = scales[index].T[:SHOWN].astype(np.float64) * (codes - zeros[index].T[:SHOWN])
    result: Float32 = values.astype(np.float32)
    return result


@pytest.mark.parametrize(("bits", "group", "symmetric", "act_order", "version"), COMBINATIONS)
def test_round_trip(
    bits: int, group: int | None, symmetric: bool, act_order: bool, version: Version
) -> None:
    out, k = 32, 288  # the last group is shorter for all but 32 and the row
    grid = random_grid(
        out,
        k,
        bits,
        group,
        symmetric=symmetric,
        act_order=act_order,
        lowest_zero=1 if version is Version.V1 else 0,
    )
    parts = encode(grid, version)
    assert parts["qweight"].array.shape == (k * bits // 32, out)
    assert parts["qzeros"].array.shape == (grid.num_groups, out * bits // 32)
    assert parts["scales"].array.shape == (grid.num_groups, out)
    back = decode(parts, bits, group, version)
    assert_same_grid(back, normalized(grid))
    np.testing.assert_array_equal(
        back.values()[:SHOWN], _ref_dequantize(parts, bits, version, out, k)
    )


@pytest.mark.parametrize("version", Version)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_zero_points_are_the_known_words(bits: int, version: Version) -> None:
    zeros = encode(random_grid(32, 64, bits, 32), version)["qzeros"].array
    field = (1 << (bits - 1)) - (version is Version.V1)
    assert {code for row in zeros for code in ref_row(row, bits, 32)} == {field}
    if (bits, version) == (4, Version.V1):
        assert (zeros == 0x77777777).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", Version)
def test_values_prove_the_version(bits: int, symmetric: bool, version: Version) -> None:
    for seed in range(6):
        grid = random_grid(64, 2048, bits, 64, symmetric=symmetric, lowest_zero=1, seed=seed)
        evidence = Evidence()
        evidence.add(_raw(encode(grid, version), bits, 64))
        assert evidence.verdict(symmetric) is version


def test_few_values_of_a_wide_grid_prove_nothing() -> None:
    grid = random_grid(32, 32, 8, 32, symmetric=False, lowest_zero=1)
    evidence = Evidence()
    evidence.add(_raw(encode(grid, Version.V1), 8, 32))
    assert evidence.verdict(symmetric=False) is None


def test_weights_that_disagree_prove_nothing() -> None:
    evidence = Evidence()
    for version in Version:
        evidence.add(_raw(encode(random_grid(32, 64, 4, 32), version), 4, 32))
    assert evidence.verdict(symmetric=True) is None


def test_version_1_adds_per_field() -> None:
    """A field of all ones is zero point 0 and leaves its neighbour alone (GPTQModel#2350)."""
    grid = random_grid(32, 64, 4, 32, symmetric=False, lowest_zero=1)
    parts = encode(grid, Version.V1)
    parts["qzeros"].array[:, 0] |= 0xF0
    zeros = decode(parts, 4, 32, Version.V1).zeros
    assert zeros is not None
    assert grid.zeros is not None
    assert (zeros[1] == 0).all()
    np.testing.assert_array_equal(np.delete(zeros, 1, axis=0), np.delete(grid.zeros, 1, axis=0))


def test_version_1_refuses_a_zero_point_of_zero() -> None:
    grid = random_grid(32, 64, 4, 32, symmetric=False)
    assert grid.zeros is not None
    zeros = grid.zeros.copy()
    zeros[3, 1] = 0
    grid = dataclasses.replace(grid, zeros=zeros)
    with pytest.raises(QuantError, match="gptq_v2"):
        encode(grid, Version.V1)
    back = decode(encode(grid, Version.V2), 4, 32, Version.V2)
    assert_same_grid(back, grid)


@pytest.mark.parametrize(("out", "k", "bits"), [(30, 64, 3), (32, 48, 3), (4, 64, 4), (32, 60, 4)])
def test_sizes_that_fill_no_words_are_refused(out: int, k: int, bits: int) -> None:
    with pytest.raises(QuantError, match="32-bit words"):
        encode(random_grid(out, k, bits, None), Version.V2)


def test_scales_that_fp16_cannot_hold_are_refused() -> None:
    grid = random_grid(32, 64, 4, 32)
    for change in (1e9, 1.0001, 1e-9):
        scales = grid.scales.astype(np.float32) * np.float32(change)
        with pytest.raises(QuantError, match="fp16"):
            encode(dataclasses.replace(grid, scales=scales), Version.V1)


def test_the_config_names_exceptions() -> None:
    grids: dict[str, CodeGrid] = {
        f"model.layers.{i}.o": random_grid(32, 64, 4, 32) for i in range(3)
    }
    grids["model.layers.1.o"] = random_grid(32, 64, 8, None)
    extra = {"damp_percent": 0.05, "static_groups": True}
    said = config(grids, ["model.layers.9.o"], Version.V2, extra, "trivet:0")
    assert said["bits"] == 4
    assert said["group_size"] == 32
    assert said["checkpoint_format"] == "gptq_v2"
    assert said["static_groups"] is True
    assert said["damp_percent"] == said["meta"]["damp_percent"] == 0.05
    assert said["dynamic"] == {
        r"+:^model\.layers\.1\.o$": {"bits": 8, "group_size": -1, "sym": True},
        r"-:^model\.layers\.9\.o$": {},
    }
