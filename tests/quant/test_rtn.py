"""Round to nearest: exact where it can be, close where it cannot, and never wrong about which."""

from __future__ import annotations

import dataclasses
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from trivet.checkpoint import SourceTensor
from trivet.config import Scheme, WeightFormat
from trivet.errors import QuantError
from trivet.native.packing import pack, unpack
from trivet.native.reference_linear import to_bf16
from trivet.native.weights import WeightTensor, dequantize
from trivet.quant.rtn import convert, float_rows, frobenius, own_format

Float32 = NDArray[np.float32]

# Relative Frobenius error allowed on Gaussian weights.
CEILINGS = {
    "bf16": 0.0018,
    "w8a8": 0.0085,
    "w8a8-g16": 0.0056,
    "w8a8-g16-min": 0.0060,
    "w8a8-g32": 0.0060,
    "w8a8-g32-min": 0.0060,
    "w8a8-g64": 0.0065,
    "w8a8-g128": 0.0072,
    "w4a8-g16": 0.078,
    "w4a8-g16-zp": 0.076,
    "w4a8-g16-min": 0.070,
    "w4a8-g32": 0.086,
    "w4a8-g32-zp": 0.084,
    "w4a8-g32-min": 0.080,
    "w4a8-g64": 0.096,
    "w4a8-g64-zp": 0.094,
    "w4a8-g64-min": 0.090,
    "w4a8-g128": 0.108,
    "w4a8-g128-zp": 0.106,
    "w4a8-g128-min": 0.100,
    "w4a16-g64": 0.096,
    "fp8-g128": 0.028,
    "fp8-row": 0.028,
    "w4a8-row": 0.130,
    "w4a8-row-zp": 0.130,
    "w4a8-row-min": 0.125,
}


def _gaussian(rows: int = 64, columns: int = 384, seed: int = 0) -> Float32:
    rng = np.random.default_rng(seed)
    return (0.05 * rng.standard_normal((rows, columns))).astype(np.float32)


def _rel_error(weight: WeightTensor, want: Float32) -> float:
    return float(np.linalg.norm(dequantize(weight) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", CEILINGS)
def test_error_is_below_its_ceiling_and_reported(name: str) -> None:
    values = _gaussian()
    converted = convert(values, WeightFormat.parse(name))
    error = _rel_error(converted.weight, values)
    assert 0 < error < CEILINGS[name]
    assert converted.rel_error == pytest.approx(error, rel=1e-4)
    assert converted.weight.format == WeightFormat.parse(name)
    assert not converted.weight.exact
    assert converted.weight.source == "F32"
    pack(converted.weight)


@pytest.mark.parametrize("name", CEILINGS)
@pytest.mark.parametrize("shape", [(1, 32), (3, 40), (17, 100), (5, 7), (2, 129)])
def test_odd_shapes_pack_and_unpack(name: str, shape: tuple[int, int]) -> None:
    values = _gaussian(*shape)
    converted = convert(values, WeightFormat.parse(name))
    assert converted.weight.shape == shape
    assert _rel_error(converted.weight, values) < 0.2
    again = unpack(pack(converted.weight))
    np.testing.assert_array_equal(again.codes, converted.weight.codes)


@pytest.mark.parametrize("name", CEILINGS)
def test_zero_rows_and_groups_stay_zero(name: str) -> None:
    values = _gaussian(8, 256)
    values[3] = 0
    values[:, 64:192] = 0
    weight = convert(values, WeightFormat.parse(name)).weight
    got = dequantize(weight)
    np.testing.assert_array_equal(got[3], 0)
    # A rotated row spreads its error over the block; wide groups reach beyond the zeros.
    if name != "w8a8" and "g128" not in name and "row" not in name:
        np.testing.assert_array_equal(got[:, 64:192], 0)


def test_scale_search_is_better_than_the_range_alone() -> None:
    values = _gaussian()
    blocks = values.reshape(64, -1, 32)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / 7
    plain = (np.rint(blocks / scales).clip(-8, 7) * scales).reshape(values.shape)
    plain_error = np.linalg.norm(plain - values) / np.linalg.norm(values)
    assert convert(values, WeightFormat(4, 32)).rel_error < 0.95 * plain_error


def test_bf16_rounds_to_nearest_even() -> None:
    values = _gaussian(16, 64) * np.float32(1e-3)
    values[0, :4] = [1e-40, -1e-40, 0.0, -0.0]
    weight = convert(values, WeightFormat(16)).weight
    np.testing.assert_array_equal(weight.codes, to_bf16(values))


def test_floats_that_fit_are_exact() -> None:
    values = (np.arange(-32, 32, dtype=np.float32) / 8).reshape(2, 32)
    sources: list[SourceTensor] = [values.astype(np.float32), values.astype(np.float16)]
    for source in sources:
        converted = convert(source, WeightFormat(16))
        assert converted.weight.exact
        assert converted.rel_error == 0
        np.testing.assert_array_equal(dequantize(converted.weight), values)
    assert not convert(_gaussian().astype(np.float16), WeightFormat(16)).weight.exact


def _grid(bits: int, scheme: Scheme = Scheme.SYM, seed: int = 1) -> WeightTensor:
    rng = np.random.default_rng(seed)
    shape, groups = (16, 96), (16, 3)
    low, high, dtype = (0, 16, np.uint8) if bits == 4 else (-127, 128, np.int8)
    codes: NDArray[Any] = rng.integers(low, high, shape).astype(dtype)
    scales = (rng.random(groups) * 0.01).astype(np.float16)
    minima = -scales * 7 if scheme is Scheme.MIN else None
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if scheme is Scheme.ZP else None
    return WeightTensor(
        WeightFormat(bits, 32, scheme), codes, scales, minima, zeros, exact=True, source="grid"
    )


@pytest.mark.parametrize(
    ("bits", "scheme"),
    [(4, Scheme.SYM), (4, Scheme.ZP), (4, Scheme.MIN), (8, Scheme.SYM), (8, Scheme.MIN)],
)
def test_its_own_grid_is_kept_bit_for_bit(bits: int, scheme: Scheme) -> None:
    source = _grid(bits, scheme)
    converted = convert(source, own_format(source))
    assert converted.weight is source
    assert converted.rel_error == 0
    np.testing.assert_array_equal(float_rows(source, 0, 16), dequantize(source))
    assert frobenius(source) == pytest.approx(float(np.linalg.norm(dequantize(source))), rel=1e-6)


@pytest.mark.parametrize("scheme", [Scheme.SYM, Scheme.ZP])
def test_symmetric_grids_widen_exactly(scheme: Scheme) -> None:
    source = _grid(4, scheme)
    converted = convert(source, WeightFormat(8, 32))
    assert converted.weight.exact
    assert converted.note == "widened to 8 bits"
    np.testing.assert_array_equal(dequantize(converted.weight), dequantize(source))


@pytest.mark.parametrize("scheme", [Scheme.SYM, Scheme.ZP])
def test_rows_widen_exactly_into_groups(scheme: Scheme) -> None:
    source = convert(_gaussian(8, 200), WeightFormat(4, None, scheme)).weight
    converted = convert(source, WeightFormat(8, 128))
    assert converted.note == "widened to 8 bits"
    assert converted.weight.num_groups == 2
    np.testing.assert_array_equal(dequantize(converted.weight), dequantize(source))


def test_grids_with_minima_widen_exactly() -> None:
    source = _grid(4, Scheme.MIN)
    converted = convert(source, WeightFormat(8, 32, Scheme.MIN))
    assert converted.weight.exact
    np.testing.assert_array_equal(dequantize(converted.weight), dequantize(source))


def test_fp8_is_kept_bit_for_bit_and_rounds_as_its_values() -> None:
    source = convert(_gaussian(), WeightFormat.parse("fp8-g64")).weight
    assert convert(source, source.format).weight is source
    np.testing.assert_array_equal(float_rows(source, 0, 64), dequantize(source))
    again = convert(source, WeightFormat(8, 32)).weight
    assert 0 < _rel_error(again, dequantize(source)) < 0.01


@pytest.mark.parametrize("scheme", [Scheme.SYM, Scheme.ZP, Scheme.MIN])
def test_bf16_activations_keep_the_grid(scheme: Scheme) -> None:
    source = _grid(4, scheme)
    converted = convert(source, dataclasses.replace(source.format, activation_bits=16))
    assert converted.weight.exact
    assert not converted.note
    assert converted.weight.format.name.startswith("w4a16-g32")
    np.testing.assert_array_equal(dequantize(converted.weight), dequantize(source))


def test_other_groups_are_rounded_not_reinterpreted() -> None:
    source = _grid(4)
    converted = convert(source, WeightFormat(8, 64))
    assert not converted.weight.exact
    assert 0 < _rel_error(converted.weight, dequantize(source)) < 0.01


def test_code_minus_128_is_rounded_and_said() -> None:
    source = _grid(8)
    assert source.scales is not None
    source.codes[2, 40] = -128
    source.codes[5, 0] = -128
    converted = convert(source, source.format)
    assert not converted.weight.exact
    assert "2 groups" in converted.note
    assert converted.weight.codes.min() == -127
    got, want = dequantize(converted.weight), dequantize(source)
    changed = np.zeros(want.shape, bool)
    changed[2, 32:64] = changed[5, :32] = True
    np.testing.assert_array_equal(got[~changed], want[~changed])
    np.testing.assert_allclose(got[2, 32:64], want[2, 32:64], atol=float(source.scales[2, 1]))
    assert converted.rel_error == pytest.approx(_rel_error(converted.weight, want), rel=1e-4)


def test_gguf_grids_of_the_package_round_trip() -> None:
    values = _gaussian(32, 256)
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    ours = convert(values, WeightFormat(8, 32))
    assert ours.rel_error <= 1.01 * np.linalg.norm(theirs - values) / np.linalg.norm(values)


def test_large_values_take_float32_scales_or_are_refused() -> None:
    values = _gaussian(4, 64) * np.float32(1e9)
    for name in ("w8a8-g32", "w4a8-g32", "w4a8-g32-zp", "w4a8-g32-min"):
        weight = convert(values, WeightFormat.parse(name)).weight
        assert weight.scales is not None
        assert weight.scales.dtype == np.float32
        assert _rel_error(weight, values) < 0.1
    huge = np.full((2, 32), np.float32(3.4e38))
    for name in ("bf16", "w8a8-g32", "w4a8-g32-min"):
        with pytest.raises(QuantError, match="too large"):
            convert(huge, WeightFormat.parse(name))


def test_memory_is_bounded_by_runs_of_rows() -> None:
    tall = _gaussian(9000, 256)
    for name in ("bf16", "w8a8", "w4a8-g32"):
        converted = convert(tall, WeightFormat.parse(name))
        head = convert(tall[:64], WeightFormat.parse(name))
        np.testing.assert_array_equal(converted.weight.codes[:64], head.weight.codes)
