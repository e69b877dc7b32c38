"""Random weights on integer grids, and what a stored layout means, read bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats import CodeGrid

Float32 = NDArray[np.float32]


def rounded(
    values: Float32,
    bits: int,
    group_size: int | None,
    *,
    symmetric: bool = True,
    lowest_zero: int = 0,
    order: NDArray[np.int32] | None = None,
) -> CodeGrid:
    """Values [N, K] rounded to the nearest point of a grid with fp16 scales.

    order        group of each column (act-order)
    lowest_zero  smallest zero point of an asymmetric grid
    """
    n, k = values.shape
    groups = np.arange(k) // (group_size or k) if order is None else order
    num_groups = -(-k // (group_size or k))
    top = (1 << bits) - 1
    middle = 1 << (bits - 1)
    low, high = np.zeros((n, num_groups)), np.zeros((n, num_groups))
    for group in range(num_groups):
        members = values[:, groups == group]
        low[:, group] = np.minimum(members.min(axis=1), 0)
        high[:, group] = np.maximum(members.max(axis=1), 0)
    span = 2 * np.maximum(-low, high) / top if symmetric else (high - low) / (top - lowest_zero)
    scales = np.maximum(span, 1e-4).astype(np.float16)
    wide = scales.astype(np.float64)
    zeros = np.full(scales.shape, middle) if symmetric else np.rint(-low / wide)
    zeros = np.clip(zeros, lowest_zero, top).astype(np.uint8)
    codes = np.rint(values / wide[:, groups]) + zeros[:, groups]
    codes = np.clip(codes, 0, top).astype(np.uint8)
    return CodeGrid(
        bits,
        group_size,
        codes,
        scales,
        None if symmetric else zeros,
        None if order is None else order,
    )


def random_grid(
    n: int,
    k: int,
    bits: int,
    group_size: int | None,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    lowest_zero: int = 0,
    seed: int = 0,
) -> CodeGrid:
    """Normal values on a grid; with act_order the columns of each group lie anywhere."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n, k)) * 0.05).astype(np.float32)
    order = None
    if act_order:
        order = rng.permutation(np.arange(k) // (group_size or k)).astype(np.int32)
    return rounded(
        values, bits, group_size, symmetric=symmetric, lowest_zero=lowest_zero, order=order
    )


def ref_codes(words: NDArray[np.int32], bits: int) -> Iterator[int]:
    """The codes of one row of words, taken from one large number bit by bit."""
    stream = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    while True:
        yield stream & ((1 << bits) - 1)
        stream >>= bits


def ref_row(words: NDArray[np.int32], bits: int, count: int) -> list[int]:
    """The first ``count`` codes of one row of words."""
    codes = ref_codes(words, bits)
    return [next(codes) for _ in range(count)]


def assert_same_grid(got: CodeGrid, want: CodeGrid) -> None:
    """Codes, scales, zero points and order are the same, to the bit."""
    assert (got.bits, got.group_size) == (want.bits, want.group_size)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales.astype(np.float32), want.scales.astype(np.float32))
    assert (got.zeros is None) == (want.zeros is None)
    if got.zeros is not None and want.zeros is not None:
        np.testing.assert_array_equal(got.zeros, want.zeros)
    assert (got.group_index is None) == (want.group_index is None)
    if got.group_index is not None and want.group_index is not None:
        np.testing.assert_array_equal(got.group_index, want.group_index)
