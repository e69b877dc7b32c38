"""The reading loop behind the bandwidth figure: it reads every word, on every level."""

from __future__ import annotations

import numpy as np
import pytest

from native.linear_cases import LEVELS
from trivet.native import _core


def _aligned(words: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    room = np.random.default_rng(seed).integers(0, 2**64, words + 8, np.uint64)
    start = (-room.ctypes.data % 64) // 8
    return room[start : start + words]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("words", [0, 16, 32, 48, 4096])
def test_every_word_is_read(level: str, words: int) -> None:
    data = _aligned(words)
    assert _core.kernel_stream(level, data) == int(data.sum(dtype=np.uint64))


@pytest.mark.parametrize("level", LEVELS)
def test_each_word_counts_once(level: str) -> None:
    for index in range(64):
        data = _aligned(64)
        data[:] = 0
        data[index] = 2**64 - 1
        assert _core.kernel_stream(level, data) == 2**64 - 1


def test_what_the_loop_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="sixteens"):
        _core.kernel_stream("generic", _aligned(17))
    with pytest.raises(ValueError, match="aligned"):
        _core.kernel_stream("generic", _aligned(24)[1:17])
