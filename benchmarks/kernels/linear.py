"""Speed of single linear kernels on one thread, beside the ceilings of the machine.

One row: GB/s of weights read from memory, and the share of a plain read. Many rows: GMAC/s with the
shapes of the demo model. Prints a table, then one JSON object as the last line.

    python benchmarks/kernels/linear.py [--level avx2] [--formats w8a8,w4a8-g32] [--rows 1,8,512]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.bench.matrix_rate import aligned
from trivet.config import Scheme, WeightFormat
from trivet.native import _core
from trivet.native import linear_kernels as kernels
from trivet.native.packing import Layout, PackedWeight, ScaleType

FORMATS = "bf16,w8a8,w8a8-g32,w4a8-g32,w4a8-g32-zp,w4a8-g32-min,w4a8-g64,w4a8-g128"
MANY_ROW_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # one layer of the demo model
STREAM_BYTES = 96 << 20


def random_packed(name: str, n: int, k: int) -> PackedWeight:
    """Random bytes in the layout of a format: values do not change the speed."""
    rng = np.random.default_rng(0)
    layout = Layout(
        WeightFormat.parse(name), n, k, ScaleType.F32 if name == "w8a8" else ScaleType.F16
    )
    arrays: dict[str, NDArray[Any]] = {}
    for part, (dtype, shape) in layout.parts.items():
        if dtype.kind == "f":
            arrays[part] = aligned(np.full(shape, 0.01, dtype))
            continue
        count = int(np.prod(shape)) * dtype.itemsize
        values = rng.integers(0, 256, count, dtype=np.uint8)
        if layout.format.bits == 16:
            values[1::2] = 0x3F  # around one
        elif layout.format.bits == 8:
            values[values == 128] = 0
        elif part == "zeros":
            values &= 15
        arrays[part] = aligned(values.view(dtype).reshape(shape))
    assert ("zeros" in arrays) == (layout.format.scheme is Scheme.ZP)
    return PackedWeight(layout, **arrays)


def best_seconds(call: Callable[[], object], budget: float = 0.25) -> float:
    """The fastest of several calls within the budget, in CPU time of this thread."""
    call()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < budget:
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def main() -> None:
    usable = [name for name, refusal in _core.isa_levels() if not refusal]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default=usable[-1], choices=usable)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--rows", default="1,4,8,32,512")
    parser.add_argument("--seconds", type=float, default=0.25, help="time for each figure")
    args = parser.parse_args()
    rows = [int(value) for value in args.rows.split(",")]

    stream = np.ones(STREAM_BYTES, np.uint8)
    read = stream.nbytes / best_seconds(lambda: stream.max(), args.seconds) / 1e9
    print(
        f"level {args.level}, one thread; plain read of {STREAM_BYTES >> 20} MiB: {read:.1f} GB/s"
    )
    print(f"{'format':14}" + "".join(f"{f'{r} rows' if r > 1 else '1 row':>22}" for r in rows))
    results = []
    for name in args.formats.split(","):
        line = f"{name:14}"
        bits = WeightFormat.parse(name).bits
        for count in rows:
            if count == 1:
                n = STREAM_BYTES * 8 // bits // 1536 // 16 * 16
                shapes = [(n, 1536)]
            else:
                shapes = MANY_ROW_SHAPES
            seconds, num_bytes, macs = 0.0, 0, 0
            for n, k in shapes:
                packed = random_packed(name, n, k)
                rng = np.random.default_rng(1)
                x = rng.standard_normal((count, k)).astype(np.float32)
                quantized = kernels.quantize(args.level, x, packed.layout)
                quantized = dataclasses.replace(quantized, codes=aligned(quantized.codes))
                out = aligned(np.empty((count, n), np.float32))
                seconds += best_seconds(
                    functools.partial(kernels.linear, args.level, packed, quantized, out=out),
                    args.seconds,
                )
                num_bytes += packed.layout.num_bytes
                macs += count * n * k
            gb, gmac = num_bytes / seconds / 1e9, macs / seconds / 1e9
            line += (
                f"{f'{gb:.1f} GB/s {gb / read:.2f}' if count == 1 else f'{gmac:.1f} GMAC/s':>22}"
            )
            results.append({"format": name, "rows": count, "gb_per_s": gb, "gmac_per_s": gmac})
        print(line, flush=True)
    print(json.dumps({"level": args.level, "read_gb_per_s": read, "results": results}))


if __name__ == "__main__":
    main()
