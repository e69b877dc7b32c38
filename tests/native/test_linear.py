"""Linear kernels: every level equals the numpy reference bit for bit, at odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import FORMATS, LEVELS, case_id, extreme_weight, random_rows, random_weight
from trivet.config import WeightFormat
from trivet.native import linear_kernels as kernels
from trivet.native import reference_linear as reference
from trivet.native.e4m3 import decode_values
from trivet.native.packing import pack
from trivet.native.weights import WeightTensor, dequantize

# Channels not a multiple of 16, columns not a multiple of 64, a short last group of every size.
SHAPES = [(1, 32), (16, 64), (37, 100), (50, 576)]
ROWS = [0, 1, 2, 3, 5, 16, 17, 33]


def _run(level: str, weight: WeightTensor, x: NDArray[np.float32]) -> NDArray[np.float32]:
    packed = pack(weight)
    return kernels.linear(level, packed, kernels.quantize(level, x, packed.layout))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "scale_dtype"), FORMATS, ids=case_id)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_level_equals_the_reference(
    level: str, name: str, scale_dtype: type, n: int, k: int
) -> None:
    weight = random_weight(name, n, k, scale_dtype)
    packed = pack(weight)
    x = random_rows(max(ROWS), k)
    want = reference.linear(x, weight)
    for rows in ROWS:
        got = kernels.linear(level, packed, kernels.quantize(level, x[:rows], packed.layout))
        assert_bits_equal(got, reference.linear(x[:rows], weight) if rows == 0 else want[:rows])


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "generic"])
@given(
    case=st.sampled_from(FORMATS),
    n=st.integers(1, 70),
    k=st.integers(1, 400),
    rows=st.integers(0, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_shape_equals_the_generic_level(
    level: str, case: tuple[str, type], n: int, k: int, rows: int, seed: int
) -> None:
    weight = random_weight(case[0], n, k, case[1], seed)
    x = random_rows(rows, k, seed)
    assert_bits_equal(_run(level, weight, x), _run("generic", weight, x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("name", "scale_dtype"), FORMATS, ids=case_id)
def test_many_rows_equal_each_row_alone(level: str, name: str, scale_dtype: type) -> None:
    weight = random_weight(name, 80, 1088, scale_dtype)
    packed = pack(weight)
    x = random_rows(151, 1088)
    together = _run(level, weight, x)
    for row in (0, 1, 74, 127, 128, 149, 150):
        alone = kernels.linear(
            level, packed, kernels.quantize(level, x[row : row + 1], packed.layout)
        )
        assert_bits_equal(alone, together[row : row + 1])
    assert_bits_equal(together, _run("generic", weight, x))


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "generic"])
@pytest.mark.parametrize("name", ["bf16", "w8a8", "w4a8-g32", "w4a16-g64", "fp8-g32"])
@pytest.mark.parametrize(("rows", "k"), [(41, 2560), (24, 2400), (300, 96), (5, 16384)])
def test_inputs_beyond_a_cache_equal_the_generic_level(
    level: str, name: str, rows: int, k: int
) -> None:
    """Wide inputs, of which few rows are widened at a time, and more rows than a span has."""
    weight = random_weight(name, 33, k)
    x = random_rows(rows, k)
    assert_bits_equal(_run(level, weight, x), _run("generic", weight, x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name", ["bf16", "w8a8", "w8a8-g64", "w4a8-g32", "w4a8-g128-min", "w4a8-g16-zp", "w4a8-row"]
)
def test_block_ranges_give_the_same_bits(level: str, name: str) -> None:
    weight = random_weight(name, 100, 320)
    packed = pack(weight)
    x = kernels.quantize(level, random_rows(19, 320), packed.layout)
    whole = kernels.linear(level, packed, x)
    parts = np.full_like(whole, -7.0)
    for begin, end in ((3, 7), (0, 1), (1, 1), (1, 3)):
        kernels.linear(level, packed, x, out=parts, blocks=(begin, end))
    assert_bits_equal(parts, whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["bf16", "w8a8", "w8a8-g32", "w4a8-g32-zp"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_bias_and_residual_are_one_add_each(level: str, name: str, rows: int) -> None:
    weight = random_weight(name, 45, 160)
    packed = pack(weight)
    x = random_rows(rows, 160)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(45).astype(np.float32)
    residual = rng.standard_normal((rows, 45)).astype(np.float32)
    quantized = kernels.quantize(level, x, packed.layout)
    got = kernels.linear(level, packed, quantized, bias=bias, out=residual.copy(), accumulate=True)
    assert_bits_equal(got, reference.linear(x, weight, bias, residual))
    got = kernels.linear(level, packed, quantized, bias=bias)
    assert_bits_equal(got, reference.linear(x, weight, bias))


@pytest.mark.parametrize("level", LEVELS)
def test_columns_beyond_n_are_not_written(level: str) -> None:
    for name in ("bf16", "w8a8", "w8a8-g32", "w4a8-g32", "w4a8-g16", "w4a8-row"):
        packed = pack(random_weight(name, 21, 64))
        for rows in (1, 33):
            x = kernels.quantize(level, random_rows(rows, 64), packed.layout)
            out = np.full((rows, 40), 5.0, np.float32)
            kernels.linear(level, packed, x, out=out)
            assert (out[:, 21:] == 5.0).all(), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "scale_dtype"),
    [case for case in FORMATS if "a16" not in case[0] and "fp8" not in case[0]],
    ids=case_id,
)
def test_extreme_codes_do_not_saturate(level: str, name: str, scale_dtype: type) -> None:
    k = 1536
    weight = extreme_weight(name, 18, k)
    for rows in (1, 20):
        x = np.ones((rows, k), np.float32)
        x[::2] = -1.0
        x[:, ::3] *= -1.0
        assert_bits_equal(_run(level, weight, x), reference.linear(x, weight))
        x = np.full((rows, k), 3.0, np.float32)
        assert_bits_equal(_run(level, weight, x), reference.linear(x, weight))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "w8a8",
        "w8a8-g32",
        "w8a8-g16-min",
        "w4a8-g16",
        "w4a8-g32",
        "w4a8-g64-min",
        "w4a8-row-zp",
    ],
)
def test_nan_and_infinity_stay_in_their_row(level: str, name: str) -> None:
    weight = random_weight(name, 33, 192)
    x = random_rows(6, 192)
    clean = _run(level, weight, x)
    x[1, 5], x[3, 100], x[4, 191] = np.nan, np.inf, -np.inf
    got = _run(level, weight, x)
    assert_bits_equal(got, reference.linear(x, weight))
    assert not np.isfinite(got[[1, 3, 4]]).any()
    assert_bits_equal(got[[0, 2, 5]], clean[[0, 2, 5]])


@pytest.mark.parametrize("level", LEVELS)
def test_subnormal_numbers_count_as_zero(level: str) -> None:
    rng = np.random.default_rng(5)
    for name in ("bf16", "w8a8", "w8a8-g32", "w4a8-g32-min"):
        weight = random_weight(name, 20, 96)
        for magnitude in (1e-39, 1e-37, 1e-36, 1e-30, 1e-20):
            x = (rng.standard_normal((3, 96)) * magnitude).astype(np.float32)
            assert_bits_equal(_run(level, weight, x), reference.linear(x, weight))


@pytest.mark.parametrize(("name", "scale_dtype"), FORMATS, ids=case_id)
def test_product_is_close_to_dequantized_weights_and_activations(
    name: str, scale_dtype: type
) -> None:
    weight = random_weight(name, 64, 576, scale_dtype)
    x = random_rows(24, 576)
    got = _run(LEVELS[-1], weight, x)
    if weight.format.bits == 16 or weight.format.activation_bits == 16:
        rows = reference.from_bf16(reference.to_bf16(x)).astype(np.float64)
        exact = rows @ dequantize(weight, rotated=True).astype(np.float64).T
    else:
        group = pack(weight).layout.group
        quantized = (
            reference.quantize_row(x)
            if weight.format.is_rotated
            else reference.quantize_group(x, group)
        )
        scales = np.repeat(quantized.scales.astype(np.float64), group, axis=1)[:, :576]
        exact = (quantized.codes * scales) @ dequantize(weight, rotated=True).astype(np.float64).T
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert error < 1e-3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", ["", "-zp", "-min"])
def test_a_row_is_groups_of_32_that_share_a_scale(level: str, scheme: str) -> None:
    row = random_weight(f"w4a8-row{scheme}", 40, 200, np.float16)

    def spread(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if values is None else np.repeat(values, 7, axis=1)

    groups = WeightTensor(
        WeightFormat.parse(f"w4a8-g32{scheme}"),
        row.codes,
        spread(row.scales),
        spread(row.minima),
        spread(row.zeros),
    )
    for rows in (1, 20):
        x = random_rows(rows, 200)
        assert_bits_equal(_run(level, row, x), _run(level, groups, x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name",
    ["w4a16-g16-min", "w4a16-g32", "w4a16-g64-zp", "w4a16-row", "fp8-g16", "fp8-g128", "fp8-row"],
)
def test_bf16_activations_stay_in_their_row(level: str, name: str) -> None:
    """Infinite values, block ranges, bias and residual of codes beside bf16 activations."""
    weight = random_weight(name, 45, 300, np.float16)
    packed = pack(weight)
    x = random_rows(21, 300)
    x[1, 5], x[3, 100], x[4, 299] = np.nan, np.inf, -np.inf
    rng = np.random.default_rng(4)
    bias = rng.standard_normal(45).astype(np.float32)
    residual = rng.standard_normal((21, 45)).astype(np.float32)
    want = reference.linear(x, weight, bias, residual)
    assert not np.isfinite(want[[1, 3, 4]]).any()
    rows = kernels.quantize(level, x, packed.layout)
    got = residual.copy()
    for blocks in ((1, 3), (0, 1)):
        kernels.linear(level, packed, rows, bias=bias, out=got, accumulate=True, blocks=blocks)
    assert_bits_equal(got, want)


def test_wide_rows_accumulate_exactly() -> None:
    """int32 holds whole-row sums: 127 * 127 * K stays below 2^31 up to K = 133,144."""
    k = 16384
    weight = extreme_weight("w8a8", 3, k)
    x = np.ones((2, k), np.float32)
    for level in LEVELS:
        packed = pack(weight)
        codes = kernels.Activations(
            np.full((2, k), 127, np.int8),
            np.ones((2, 1), np.float32),
            np.full((2, 1), 127 * k, np.int32),
        )
        got = kernels.linear(level, packed, codes)
        assert weight.scales is not None
        want = np.float32(127 * 127 * k) * weight.scales[:, 0] * [1, -1, 1]
        assert_bits_equal(got, np.broadcast_to(want.astype(np.float32), got.shape).copy())
    assert x.shape == (2, k)


@pytest.mark.parametrize("level", LEVELS)
def test_every_e4m3_code_is_its_value(level: str) -> None:
    """Subnormal numbers included, although the kernels run with DAZ set."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes & 127 != 127].reshape(2, 127)
    form = WeightFormat.parse("fp8-row")
    weight = WeightTensor(form, codes, np.full((2, 1), 0.5, np.float32))
    want = decode_values(codes).T * np.float32(0.5) + np.float32(0.0)  # a sum that begins at +0
    x = np.eye(127, dtype=np.float32)
    assert_bits_equal(_run(level, weight, x), want)
    for row in (0, 1, 7, 8, 126):
        assert_bits_equal(_run(level, weight, x[row : row + 1]), want[row : row + 1])
