"""How fast a level's linear kernels multiply when nothing keeps them waiting.

The kernels of the model's own linears, many rows, a weight small enough to stay in a core's cache: the
arithmetic ceiling of prefill. Every thread has a weight and rows of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.config import WeightFormat
from trivet.native import linear_kernels
from trivet.native.packing import PackedWeight, pack
from trivet.native.weights import WeightTensor

CHANNELS, COLUMNS = 256, 1024  # of the weight: 256 KiB in int8
ROWS = 1024
_GENERIC_ROWS = 64  # is slow, and needs no more
ARITHMETICS = ("int8", "bf16")
BUDGET_S = 0.1


def matrix_rate(level: str, arithmetic: str, threads: int, budget_s: float = BUDGET_S) -> float:
    """Multiply-adds per second of ``threads`` threads together, over about ``budget_s``.

    level       a usable one of `trivet.native.isa_report`
    arithmetic  ``int8`` (w8a8, one scale per channel) or ``bf16``
    """
    assert arithmetic in ARITHMETICS, arithmetic
    rows = _GENERIC_ROWS if level == "generic" else ROWS
    # Made before any thread starts: what could fail fails here, and nobody waits at the barrier.
    products = [_product(level, arithmetic, rows) for _ in range(threads)]
    barrier = threading.Barrier(threads)
    rates: list[float] = []

    def work(product: Callable[[], object]) -> None:
        product()
        barrier.wait()
        calls, begin = 0, time.perf_counter()
        while not calls or time.perf_counter() - begin < budget_s:
            product()
            calls += 1
        rates.append(calls * rows * CHANNELS * COLUMNS / (time.perf_counter() - begin))

    others = [threading.Thread(target=work, args=(product,)) for product in products[1:]]
    for thread in others:
        thread.start()
    work(products[0])
    for thread in others:
        thread.join()
    return sum(rates)


def _product(level: str, arithmetic: str, rows: int) -> Callable[[], object]:
    """A call that multiplies once, on memory of its own."""
    packed = pack(_values(arithmetic))
    weight = PackedWeight(
        packed.layout, **{name: aligned(array) for name, array in packed.arrays.items()}
    )
    x = np.random.default_rng(1).standard_normal((rows, COLUMNS), np.float32)
    quantized = linear_kernels.quantize(level, x, weight.layout)
    activations = dataclasses.replace(quantized, codes=aligned(quantized.codes))
    out = aligned(np.empty((rows, CHANNELS), np.float32))
    return functools.partial(linear_kernels.linear, level, weight, activations, out=out)


@functools.cache
def _values(arithmetic: str) -> WeightTensor:
    rng = np.random.default_rng(0)
    if arithmetic == "bf16":
        values = rng.standard_normal((CHANNELS, COLUMNS), np.float32)
        codes = (values.view(np.uint32) >> 16).astype(np.uint16)
        return WeightTensor(WeightFormat.parse("bf16"), codes)
    scales = np.full((CHANNELS, 1), 0.01, np.float32)
    codes8 = rng.integers(-127, 128, (CHANNELS, COLUMNS), np.int8)
    return WeightTensor(WeightFormat.parse("w8a8"), codes8, scales)


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts on a cache line, as weights in the packed cache do."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
