"""Packed layouts: pack and unpack are inverse, sizes are as declared, values are exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from native.bits import assert_bits_equal
from native.linear_cases import FORMATS, case_id, random_rows, random_weight
from trivet.config import WeightFormat
from trivet.native import reference_linear
from trivet.native.packing import (
    Layout,
    ScaleType,
    can_concatenate,
    concatenate,
    layout_of,
    pack,
    unpack,
)
from trivet.native.weights import WeightTensor, dequantize

_PARTS = ("codes", "scales", "minima", "zeros", "order", "amax", "outliers", "outlier_codes")


@pytest.mark.parametrize(
    ("name", "scale_dtype"),
    [*FORMATS, *((f"w8a8+{r}", np.float32) for r in ("row", "static", "hadamard64+outliers1"))],
    ids=case_id,
)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 64), (35, 100), (20, 576)])
def test_unpack_returns_what_was_packed(name: str, scale_dtype: type, n: int, k: int) -> None:
    weight = random_weight(name, n, k, scale_dtype)
    if n == 35:
        order = np.random.default_rng(k).permutation(k).astype(np.int32)
        weight = dataclasses.replace(weight, order=order)
    packed = pack(weight)
    back = unpack(packed)
    assert back.format == weight.format
    for part in _PARTS:
        a, b = getattr(weight, part), getattr(back, part)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert (a == b).all()
    sizes = sum(array.nbytes for array in packed.arrays.values())
    assert sizes == packed.layout.num_bytes
    assert all(array.flags.c_contiguous for array in packed.arrays.values())


def test_int4_bytes_lie_as_documented() -> None:
    codes = (np.arange(16 * 64) % 16).reshape(16, 64).astype(np.uint8)
    codes[3] = np.arange(64) % 7
    packed = pack(WeightTensor(WeightFormat.parse("w4a8-g32"), codes, np.ones((16, 2), np.float32)))
    for k in range(64):
        inner = k % 16
        byte = packed.codes[0, k // 32, inner // 4, 3, inner % 4]
        assert (byte & 15 if k % 32 < 16 else byte >> 4) == codes[3, k]


def test_dequantized_values() -> None:
    zp = WeightTensor(
        WeightFormat.parse("w4a8-g32-zp"),
        np.array([[3, 15]], np.uint8),
        np.array([[0.5]], np.float16),
        zeros=np.array([[4]], np.uint8),
    )
    assert dequantize(zp).tolist() == [[-0.5, 5.5]]
    minimum = WeightTensor(
        WeightFormat.parse("w4a8-g32-min"),
        np.array([[3, 15]], np.uint8),
        np.array([[0.5]], np.float16),
        minima=np.array([[-1.0]], np.float16),
    )
    assert dequantize(minimum).tolist() == [[0.5, 6.5]]
    row = WeightTensor(
        WeightFormat.parse("w8a8"), np.array([[2, -4]], np.int8), np.array([[1.0]], np.float32)
    )
    assert dequantize(row, rotated=True).tolist() == [[2.0, -4.0]]
    np.testing.assert_allclose(dequantize(row), np.array([[-2.0, 6.0]]) / np.sqrt(2.0), rtol=1e-6)


def test_concatenation_stacks_channels() -> None:
    a = random_weight("w4a8-g32-min", 20, 96, np.float16)
    b = random_weight("w4a8-g32-min", 12, 96, np.float16, seed=1)
    assert can_concatenate([a, b])
    both = concatenate([a, b])
    assert both.shape == (32, 96)
    assert (dequantize(both) == np.concatenate([dequantize(a), dequantize(b)])).all()


def test_concatenation_wants_equal_formats() -> None:
    a = random_weight("w4a8-g32", 16, 96, np.float16)
    assert not can_concatenate([a, random_weight("w4a8-g64", 16, 96, np.float16)])
    assert not can_concatenate([a, random_weight("w4a8-g32", 16, 96, np.float32)])
    assert not can_concatenate([a, random_weight("w4a8-g32", 16, 128, np.float16)])
    turned = dataclasses.replace(a, order=np.arange(96, dtype=np.int32)[::-1].copy())
    assert not can_concatenate([a, turned])
    assert can_concatenate([turned, turned])
    assert concatenate([turned, turned]).order is turned.order


def test_an_order_says_where_columns_come_from() -> None:
    weight = random_weight("w4a8-g32-zp", 5, 96)
    order = np.random.default_rng(0).permutation(96).astype(np.int32)
    ordered = dataclasses.replace(weight, order=order)
    np.testing.assert_array_equal(dequantize(ordered)[:, order], dequantize(weight))
    x = random_rows(3, 96)
    assert_bits_equal(
        reference_linear.linear(x, ordered), reference_linear.linear(x[:, order], weight)
    )


def test_layout_of_a_weight() -> None:
    layout = layout_of(random_weight("w4a8-g128-zp", 30, 576, np.float16))
    assert layout == Layout(WeightFormat.parse("w4a8-g128-zp"), 30, 576, ScaleType.F16)
    assert (layout.n_padded, layout.k_padded, layout.num_groups) == (32, 576, 5)
    assert layout.parts["scales"] == (np.dtype(np.float16), (2, 5, 16))
