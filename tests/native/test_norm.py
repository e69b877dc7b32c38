"""RMSNorm: every level equals the reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from trivet.native import _core, reference


def _run(
    level: str, x: NDArray[np.float32], gain: NDArray[np.float32], eps: float = 1e-5
) -> NDArray[np.float32]:
    out = np.empty_like(x)
    _core.kernel_rms_norm(level, x, gain, eps, out)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_level_equals_the_reference(level: str, n: int, rows: int) -> None:
    rng = np.random.RandomState(n)
    x = rng.standard_normal((rows, n)).astype(np.float32) * np.float32(3.0)
    gain = rng.uniform(-2, 2, n).astype(np.float32)
    assert_bits_equal(_run(level, x, gain), reference.rms_norm(x, gain, 1e-5))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-40, 1e30, 0.0])
def test_special_values_stay_in_their_row(level: str, value: float) -> None:
    x = np.random.RandomState(0).standard_normal((3, 37)).astype(np.float32)
    x[1, 20] = value
    if value == 0.0:
        x[1] = 0.0
    gain = np.ones(37, np.float32)
    got = _run(level, x, gain)
    assert_bits_equal(got, reference.rms_norm(x, gain, 1e-5))
    clean = np.delete(x, 1, axis=0)
    assert_bits_equal(np.delete(got, 1, axis=0), reference.rms_norm(clean, gain, 1e-5))


def test_reference_is_rms_norm() -> None:
    x = np.random.RandomState(3).standard_normal((4, 50)).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    got = reference.rms_norm(x, np.ones(50, np.float32), 1e-5)
    np.testing.assert_allclose(got, exact, rtol=1e-6)
