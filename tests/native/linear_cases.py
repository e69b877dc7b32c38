"""Random weights of every format and the levels this machine can run, for the linear tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.config import RowRule, Scheme, WeightFormat
from trivet.native import _core
from trivet.native.reference_linear import to_bf16
from trivet.native.weights import WeightTensor

LEVELS = [name for name, refusal in _core.isa_levels() if not refusal]

# format name, scale dtype
FORMATS = [
    ("bf16", np.float32),
    ("w8a8", np.float32),
    *((f"w8a8-g{g}", t) for g in (16, 32, 64, 128) for t in (np.float16, np.float32)),
    *((f"w8a8-g{g}-min", np.float32) for g in (16, 32, 128)),
    *(
        (f"w4a8-{group}{scheme}", t)
        for group in ("g16", "g32", "g64", "g128", "row")
        for scheme in ("", "-zp", "-min")
        for t in (np.float16, np.float32)
    ),
    *(
        (f"w4a16-{group}{scheme}", np.float16)
        for group in ("g16", "g32", "g64", "g128", "row")
        for scheme in ("", "-zp", "-min")
    ),
    ("w4a16-g64-min", np.float32),
    *((f"fp8-{group}", np.float32) for group in ("g16", "g32", "g64", "g128", "row")),
    ("fp8-g128", np.float16),
    ("fp8-row", np.float16),
]


def case_id(value: object) -> str | None:
    return getattr(value, "__name__", None)


def random_weight(
    name: str, n: int, k: int, scale_dtype: type = np.float32, seed: int = 0
) -> WeightTensor:
    """A weight with codes over the whole range and scales and minima of mixed magnitude."""
    rng = np.random.default_rng([seed, n, k])
    format = WeightFormat.parse(name)
    if format.bits == 16:
        return WeightTensor(format, to_bf16(rng.standard_normal((n, k)).astype(np.float32)))
    groups = 1 if format.group_size is None else -(-k // format.group_size)
    exponents = rng.integers(-9, -5, (n, groups))
    scales: NDArray[Any] = (rng.uniform(0.5, 2.0, (n, groups)) * 2.0**exponents).astype(scale_dtype)
    minima: NDArray[Any] | None = None
    zeros: NDArray[np.uint8] | None = None
    if format.scheme is Scheme.FP8:
        codes8 = rng.integers(0, 256, (n, k), dtype=np.uint8)
        codes8[codes8 & 127 == 127] = 3  # not NaN; a subnormal number
        return WeightTensor(format, codes8, scales)
    if format.bits == 8:
        codes = rng.integers(-127, 128, (n, k), dtype=np.int8)
        if format.scheme is Scheme.MIN:
            minima = (scales * rng.uniform(-60, 60, scales.shape)).astype(scale_dtype)
        amax = outliers = high = None
        if format.rule is RowRule.STATIC:
            amax = np.array([2.5], np.float32)
        if format.outliers:
            outliers = np.sort(rng.permutation(k)[: format.outliers]).astype(np.int32)
            codes[:, outliers] = 0
            high = to_bf16(rng.standard_normal((n, format.outliers)).astype(np.float32))
        return WeightTensor(
            format, codes, scales, minima, amax=amax, outliers=outliers, outlier_codes=high
        )
    codes4 = rng.integers(0, 16, (n, k), dtype=np.uint8)
    if format.scheme is Scheme.MIN:
        minima = (-8.0 * scales * rng.uniform(0.5, 1.5, scales.shape)).astype(scale_dtype)
    if format.scheme is Scheme.ZP:
        zeros = rng.integers(0, 16, size=scales.shape, dtype=np.uint8)
    return WeightTensor(format, codes4, scales, minima, zeros)


def extreme_weight(name: str, n: int, k: int) -> WeightTensor:
    """Every code at the end of its range, so that accumulators meet their bounds."""
    weight = random_weight(name, n, k)
    if weight.format.bits == 16:
        return weight
    if weight.format.scheme is Scheme.FP8:
        low, high = 0xFE, 0x7E
    else:
        low, high = (-127, 127) if weight.format.bits == 8 else (0, 15)
    codes = np.full((n, k), high, weight.codes.dtype)
    codes[1::2] = low
    return WeightTensor(weight.format, codes, weight.scales, weight.minima, weight.zeros)


def random_rows(rows: int, k: int, seed: int = 1) -> NDArray[np.float32]:
    """Activations with a few outlier columns and one row of zeros where there are several."""
    rng = np.random.default_rng([seed, rows, k])
    x = rng.standard_normal((rows, k)).astype(np.float32)
    x[:, :: max(1, k // 5)] *= 30.0
    if rows > 4:
        x[rows // 2] = 0.0
    return x
