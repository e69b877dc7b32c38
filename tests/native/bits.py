"""Comparison of float arrays bit for bit, the payload of a NaN aside; sign of zero included."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def assert_bits_equal(got: NDArray[np.float32], want: NDArray[np.float32]) -> None:
    """Fail with the first place where two float32 arrays differ."""
    __tracebackhide__ = True
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    if not same.all():
        place = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{(~same).sum()} of {same.size} differ; first at {place}: "
            f"{got[place]!r} != {want[place]!r}"
        )
