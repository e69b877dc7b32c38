"""Rounding with feedback: every level against the numpy reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from native.linear_cases import LEVELS
from trivet.native import _core, reference_rounding, rounding
from trivet.native.rounding import ColumnGrid

ROWS, COLUMNS = (1, 7, 64, 131), (1, 5, 64, 97)


def _grid(rng: np.random.Generator, rows: int, columns: int, has_zeros: bool) -> ColumnGrid:
    groups = max(1, columns // 16)
    scales = rng.uniform(0.01, 0.2, (groups, rows)).astype(np.float32)
    scales[rng.random(scales.shape) < 0.1] = 0  # a dead group
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = rng.integers(0, 16, scales.shape).astype(np.float32) if has_zeros else None
    place = rng.integers(0, groups, columns).astype(np.int32)
    return ColumnGrid(scales, inverse, zeros, 8.0, 0, 15, place)


def _same(
    run: Callable[[Any, dict[str, Any]], None], arrays: dict[str, np.ndarray], isa: str
) -> None:
    own, wanted = ({name: a.copy() for name, a in arrays.items()} for _ in range(2))
    run(rounding, {**own, "isa": isa})
    run(reference_rounding, wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(own[name], array, err_msg=name)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_panels_are_the_references_bits(rows: int, columns: int, has_zeros: bool, isa: str) -> None:
    rng = np.random.default_rng([rows, columns, has_zeros])
    grid = _grid(rng, rows, columns, has_zeros)
    half = rng.standard_normal((columns, columns)).astype(np.float32)
    square = half @ half.T + np.eye(columns, dtype=np.float32)
    upper = np.triu(half) + 2 * np.eye(columns, dtype=np.float32)
    begin, end = columns // 3, columns
    places = rng.permutation(columns).astype(np.int32)

    def gptq(module: Any, given: dict[str, Any]) -> None:
        module.gptq_panel(grid, upper, places=places, begin=begin, end=end, **given)

    def descend(module: Any, given: dict[str, Any]) -> None:
        module.descend_panel(grid, square, begin=begin, end=end, **given)

    def values() -> np.ndarray:
        return rng.standard_normal((columns, rows)).astype(np.float32)

    codes = np.zeros((columns, rows), np.uint8)
    changes = np.zeros((columns, rows), np.float32)
    _same(gptq, {"left": values(), "codes": codes, "errors": changes}, isa)
    given = {"slope": values(), "values": values(), "codes": codes, "changes": changes}
    _same(descend, given, isa)


@pytest.mark.parametrize("isa", LEVELS)
def test_what_is_far_beyond_the_codes_is_clipped(isa: str) -> None:
    rng = np.random.default_rng(0)
    grid = _grid(rng, 40, 8, False)
    left = (rng.standard_normal((8, 40)) * 10.0 ** rng.integers(-20, 30, (8, 40))).astype("f4")
    arrays = {"left": left, "codes": np.zeros((8, 40), "u1"), "errors": np.zeros((8, 40), "f4")}
    upper = np.eye(8, dtype=np.float32)
    places = np.arange(8, dtype=np.int32)

    def gptq(module: Any, given: dict[str, Any]) -> None:
        module.gptq_panel(grid, upper, places=places, begin=0, end=8, **given)

    _same(gptq, arrays, isa)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"groups": np.array([0, 9], np.int32)}, "groups lie in scales"),
        ({"places": np.array([0, 2], np.int32)}, "places lie in the columns"),
        ({"end": 3}, "begin and end"),
        ({"high": 256}, "codes are bytes"),
        ({"upper": np.eye(3, dtype=np.float32)}, "matrix"),
        ({"scales": np.ones((1, 4), np.float32)}, "scales"),
        ({"errors": np.zeros((1, 3), np.float32)}, "changes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, Any], reason: str) -> None:
    square = np.eye(2, dtype=np.float32)
    given: dict[str, Any] = {
        "level": "generic", "upper": square, "left": np.zeros((2, 3), np.float32),
        "places": np.arange(2, dtype=np.int32), "groups": np.zeros(2, np.int32),
        "scales": np.ones((1, 3), np.float32), "inverse": np.ones((1, 3), np.float32),
        "zeros": None, "middle": 8.0, "low": 0, "high": 15, "begin": 0, "end": 2,
        "codes": np.zeros((2, 3), np.uint8), "errors": np.zeros((2, 3), np.float32),
    }  # fmt: skip
    _core.gptq_panel(**given)
    with pytest.raises(ValueError, match=reason):
        _core.gptq_panel(**(given | changed))
