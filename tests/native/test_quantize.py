"""Activation kernels: every level equals the numpy reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from native.linear_cases import LEVELS, random_rows
from trivet.config import WeightFormat
from trivet.native import linear_kernels as kernels
from trivet.native import reference_linear as reference
from trivet.native.packing import Layout, ScaleType
from trivet.native.weights import hadamard_width, rotate

WIDTHS = [1, 2, 31, 32, 33, 40, 48, 64, 100, 320, 576, 1536]


def _layout(name: str, k: int) -> Layout:
    return Layout(WeightFormat.parse(name), 16, k, ScaleType.F32)


def _inputs(k: int) -> NDArray[np.float32]:
    """Rows of ordinary values, zeros, ties, tiny and huge values, infinities and NaN."""
    rng = np.random.default_rng(k)
    x = np.concatenate([random_rows(4, k), np.zeros((12, k), np.float32)])
    x[5] = rng.integers(-254, 255, k) / 2  # halves: ties when the largest is 127
    x[5, 0] = 127.0
    x[6] = rng.standard_normal(k) * 1e-38
    x[7] = rng.standard_normal(k) * 1e-36
    x[8] = rng.standard_normal(k) * 1e37
    x[9], x[10], x[11], x[12] = x[0], x[1], x[2], x[3]
    x[9, k // 2], x[10, k - 1], x[11, 0] = np.nan, np.inf, -np.inf
    x[12, k // 2], x[13, :] = 1e-40, -0.0
    x[14] = np.float32(2.0**-126)
    return x


def _assert_rows_equal(got: kernels.Activations, want: reference.QuantizedRows, k: int) -> None:
    assert (got.codes[:, :k] == want.codes).all()
    assert (got.codes[:, k:] == 0).all()
    assert got.sums is not None
    assert got.scales is not None
    assert (got.sums == want.sums).all()
    same = got.scales.view(np.uint32) == want.scales.view(np.uint32)
    assert (same | (np.isnan(got.scales) & np.isnan(want.scales))).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("k", WIDTHS)
def test_bf16_equals_the_reference(level: str, k: int) -> None:
    x = _inputs(k)
    got = kernels.quantize(level, x, _layout("bf16", k)).codes
    assert (got[:, :k] == reference.to_bf16(x)).all()
    assert (got[:, k:] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_int8_groups_equal_the_reference(level: str, k: int, group: int) -> None:
    x = _inputs(k)
    got = kernels.quantize(level, x, _layout(f"w8a8-g{group}", k))
    _assert_rows_equal(got, reference.quantize_group(x, group), k)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("k", WIDTHS)
def test_int8_rows_equal_the_reference(level: str, k: int) -> None:
    x = _inputs(k)
    got = kernels.quantize(level, x, _layout("w8a8", k))
    _assert_rows_equal(got, reference.quantize_row(x), k)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("name", ["w8a8+row", "w8a8+static"])
def test_int8_rows_without_rotation_equal_the_reference(level: str, k: int, name: str) -> None:
    """A stored range clips what lies beyond it, and a row that is not finite shows."""
    x = _inputs(k)
    amax = np.float32(0.7) if name == "w8a8+static" else None
    got = kernels.quantize(level, x, _layout(name, k), amax=0.0 if amax is None else float(amax))
    _assert_rows_equal(got, reference.quantize_row(x, 1, amax), k)
    assert got.scales is not None
    assert not np.isfinite(got.scales[9:12]).any()
    if amax is not None:
        assert (got.scales[:9] == amax / np.float32(127)).all()


@pytest.mark.parametrize("k", [2, 12, 64, 576])
def test_rotation_is_orthogonal_and_its_own_inverse(k: int) -> None:
    x = random_rows(3, k).astype(np.float64)
    turned = rotate(x)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(x, axis=1))
    np.testing.assert_allclose(rotate(turned), x, atol=1e-12)
    width = hadamard_width(k)
    np.testing.assert_allclose(
        reference.rotate32(x.astype(np.float32), width), turned, rtol=1e-5, atol=1e-4
    )


def test_fma_emulation_is_correctly_rounded() -> None:
    """Against exact rational arithmetic, with operands chosen to sit near ties."""
    from fractions import Fraction

    rng = np.random.default_rng(0)
    count = 3000
    a = (1 + rng.integers(0, 2**23, count) * 2.0**-23).astype(np.float32)
    b = (1 + rng.integers(0, 2**8, count) * 2.0**-23).astype(np.float32)
    c = (rng.choice([-1, 1], count) * 2.0 ** rng.integers(-60, 30, count)).astype(np.float32)
    c[::3] = -(a[::3] * b[::3])
    got = reference.fma32(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error = abs(Fraction(float(r)) - exact)
        for neighbour in (
            np.nextafter(r, np.float32(np.inf)),
            np.nextafter(r, np.float32(-np.inf)),
        ):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error <= other
            if error == other:
                assert r.view(np.uint32) & 1 == 0
