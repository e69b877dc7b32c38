"""Words of codes: every width is read back, and read as one number bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.grids import ref_row
from trivet.checkpoint.formats.bits import (
    dense_words,
    pack_dense,
    pack_padded,
    padded_words,
    unpack_dense,
    unpack_padded,
)


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 5),
    count=st.integers(1, 100),
    seed=st.integers(0, 1 << 16),
)
def test_words_are_read_back(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    dense = pack_dense(codes, bits)
    assert dense.shape == (rows, dense_words(count, bits))
    assert ref_row(dense[-1], bits, count) == codes[-1].tolist()
    np.testing.assert_array_equal(unpack_dense(dense, bits, count), codes)
    padded = pack_padded(codes, bits)
    assert padded.shape == (rows, padded_words(count, bits))
    np.testing.assert_array_equal(unpack_padded(padded, bits, count), codes)
    if 32 % bits == 0:
        np.testing.assert_array_equal(padded, dense)


def test_three_bits_lie_as_the_page_says() -> None:
    """v10 and v21 are split over two words; 3k, 3k + 1 and 3k + 2 hold the others."""
    codes = np.random.default_rng(1).integers(0, 8, (1, 32)).astype(np.uint8)
    v = codes[0].astype(int)
    a, b, c = (int(word) & 0xFFFFFFFF for word in pack_dense(codes, 3)[0])
    assert a == sum(v[k] << 3 * k for k in range(10)) | (v[10] & 3) << 30
    assert b == v[10] >> 2 | sum(v[11 + k] << 3 * k + 1 for k in range(10)) | (v[21] & 1) << 31
    assert c == v[21] >> 1 | sum(v[22 + k] << 3 * k + 2 for k in range(10))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_code_too_large_never_reaches_its_neighbour(bits: int) -> None:
    codes = np.full((1, 8), 1 << bits, np.uint8)
    for pack in (pack_dense, pack_padded):
        with pytest.raises(AssertionError, match="neighbour"):
            pack(codes, bits)


def test_padded_words_leave_the_top_bits_empty() -> None:
    words = pack_padded(np.full((1, 10), 7, np.uint8), 3)
    assert words[0].tolist() == [0x3FFFFFFF]
