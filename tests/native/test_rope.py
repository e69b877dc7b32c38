"""Rotary embedding and the gated activation: every level equals the reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from trivet.native import _core, reference


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", [1, 3, 8, 10, 16, 17, 32])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_every_level_equals_the_reference(level: str, half: int, rows: int) -> None:
    rng = np.random.RandomState(half)
    x = rng.standard_normal((rows, 2 * half)).astype(np.float32)
    angles = rng.uniform(0, 6, (rows, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = np.empty_like(x)
    _core.kernel_rope(level, x, cos, sin, out)
    assert_bits_equal(out, reference.rope(x, cos, sin))


def test_rotation_keeps_the_length_of_each_pair() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((5, 16)).astype(np.float32)
    angles = rng.uniform(0, 6, (5, 8))
    out = reference.rope(x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    before = x[:, :8] ** 2 + x[:, 8:] ** 2
    after = out[:, :8] ** 2 + out[:, 8:] ** 2
    np.testing.assert_allclose(after, before, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 17, 136])
def test_silu_mul_equals_the_reference(level: str, n: int) -> None:
    rng = np.random.RandomState(n)
    gate = (rng.standard_normal(n) * 8).astype(np.float32)
    up = rng.standard_normal(n).astype(np.float32)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -100.0, 100.0], np.float32)
    gate[: len(special)] = special[:n]
    out = np.empty_like(gate)
    _core.kernel_silu_mul(level, gate, up, out)
    assert_bits_equal(out, reference.silu_mul(gate, up))


def test_silu_is_accurate() -> None:
    x = np.random.RandomState(1).uniform(-80, 80, 5000).astype(np.float32)
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(reference.silu32(x), exact, rtol=4e-7)
