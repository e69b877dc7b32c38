"""Matrix products whose bits do not depend on the number of threads.

A BLAS that splits a product over threads may sum in another order. Calibration therefore runs its
BLAS on one thread and splits the work itself, into pieces whose borders depend on the data alone, over
a pool of Python threads (numpy releases the interpreter's lock); results are taken in order.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_", "openblas_set_num_threads")  # fmt: skip


def _libraries() -> Iterator[Any]:
    """The OpenBLAS libraries that this process has mapped."""
    import numpy as np

    _ = np.float32(1)  # mapped with numpy
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    paths = {line.split()[-1] for line in lines if "blas" in line.split()[-1]}
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path)


@contextlib.contextmanager
def single_threaded() -> Iterator[bool]:
    """Run BLAS on the calling thread only; yields whether the BLAS in use could be told so."""
    restore: list[Callable[[], None]] = []
    for library in _libraries():
        for name in _SETTERS:
            setter = getattr(library, name, None)
            getter = getattr(library, name.replace("_set_", "_get_"), None)
            if setter is None or getter is None:
                continue
            before = int(getter())
            setter(1)
            restore.append(functools.partial(setter, before))
            break
    try:
        yield bool(restore)
    finally:
        for undo in restore:
            undo()


class Workers:
    """A few threads that map a function over items and hand the results back in order."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "trivet-quantize")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """``work`` of every item, in the order of the items; few results wait at a time."""
        waiting: deque[concurrent.futures.Future[_Result]] = deque()
        for item in items:
            waiting.append(self._pool.submit(work, item))
            if len(waiting) > self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
