"""exp of the contract: every level equals the reference, and it is accurate."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from trivet.native import _core, reference

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.17549435e-38, 3.4e38,
     -87.33654, -87.4, 88.37626, 88.4, -104.0, 0.70710677, 0.70710678, 1.4142135, 5e-324],
    np.float32,
)  # fmt: skip


def _inputs() -> NDArray[np.float32]:
    rng = np.random.RandomState(0)
    patterns = rng.randint(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32)
    return np.concatenate([SPECIAL, patterns, rng.uniform(-90, 90, 3000).astype(np.float32)])


def _run(level: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.empty_like(x)
    _core.kernel_exp(level, x, out)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 17, None])
def test_every_level_equals_the_reference(level: str, count: int | None) -> None:
    x = _inputs()[:count]
    assert_bits_equal(_run(level, x), reference.exp32(x))


def test_exp_is_accurate() -> None:
    x = np.random.RandomState(1).uniform(-87, 88, 20000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(reference.exp32(x) / exact - 1).max() < 1.3e-7


def test_edges_are_what_the_contract_says() -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    exp = reference.exp32(np.array([0.0, -0.0, -inf, nan], np.float32))
    assert exp[0] == exp[1] == 1.0
    assert 0.0 <= exp[2] < 2e-38
    assert np.isnan(exp[3])
