"""KV pages in one shared, unnamed memory file (invariant I6): a thin wrapper of the native arena.

    arena = Arena(model.kv_geometry(), num_pages=512)          # one worker
    arena = Arena(geometry, 512, num_workers=2, worker=0)      # this process is worker 0
    other = Arena.attach(fd, worker=1)                         # in another process, fd passed to it

The file's size is sealed and memory is taken as pages are first written. Each worker counts references
in its own column and never writes another's; a page is free when the columns add up to zero. All
workers of an arena are one trust domain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.config import PAGE_TOKENS, KVFormat
from trivet.errors import ConfigError
from trivet.native import _core
from trivet.native.api import KVGeometry

# The values of `KvKind` in attention.h.
KV_VALUES = {
    KVFormat.BF16: 0,
    KVFormat.INT8: 1,
    KVFormat.FP8: 2,
    KVFormat.INT4: 3,
    KVFormat.INT8_FIRST: 5,
    KVFormat.FP8_FIRST: 6,
    KVFormat.INT4_FIRST: 7,
}


def page_block_bytes(head_dim: int, kv: KVFormat) -> int:
    """Bytes of one page of one KV head of one layer: K and V, scales, room for the first token."""
    codes = 2 * PAGE_TOKENS * head_dim * kv.code_bits // 8
    scales = 0 if kv is KVFormat.BF16 else 2 * PAGE_TOKENS * 4
    first = 2 * head_dim * 2 if kv.keeps_first else 0
    return -(-(codes + scales + first) // 64) * 64


def kv_geometry(num_layers: int, num_kv_heads: int, head_dim: int, kv: KVFormat) -> KVGeometry:
    """The geometry of a model's KV in a format."""
    page_bytes = num_layers * num_kv_heads * page_block_bytes(head_dim, kv)
    return KVGeometry(num_layers, num_kv_heads, head_dim, kv.value, PAGE_TOKENS, page_bytes)


class Arena:
    """``num_pages`` pages of ``geometry`` for ``num_workers`` workers, of which this process is one.

    Raises ConfigError when the pages cannot be had.
    """

    def __init__(
        self, geometry: KVGeometry, num_pages: int, *, num_workers: int = 1, worker: int = 0
    ) -> None:
        try:
            self._native = _core.Arena.create(
                num_layers=geometry.num_layers,
                num_kv_heads=geometry.num_kv_heads,
                head_dim=geometry.head_dim,
                kv=KV_VALUES[KVFormat(geometry.kv_format)],
                num_pages=num_pages,
                num_workers=num_workers,
                worker=worker,
            )
        except (ValueError, OverflowError, TypeError, RuntimeError) as error:
            raise ConfigError("num_pages", num_pages, f"what memory holds ({error})") from None
        self._geometry = geometry

    @classmethod
    def attach(cls, fd: int, worker: int = 0) -> Arena:
        """Map the arena behind a descriptor, which stays the caller's.

        Raises ValueError when it is not an arena or has no such worker.
        """
        arena = cls.__new__(cls)
        arena._native = _core.Arena.attach(fd, worker)
        num_layers, num_kv_heads, head_dim, kv, _, _ = arena._native.geometry
        format = next(name for name, value in KV_VALUES.items() if value == kv)
        arena._geometry = kv_geometry(num_layers, num_kv_heads, head_dim, format)
        return arena

    @property
    def native(self) -> _core.Arena:
        """The native object, for the model's forward."""
        return self._native

    @property
    def fd(self) -> int:
        """The memory file's descriptor, open as long as the arena is; pass it to other workers."""
        return self._native.fd

    @property
    def geometry(self) -> KVGeometry:
        return self._geometry

    @property
    def num_pages(self) -> int:
        return self._native.geometry[4]

    @property
    def num_workers(self) -> int:
        return self._native.geometry[5]

    @property
    def worker(self) -> int:
        """This process's column."""
        return self._native.worker

    @property
    def file_bytes(self) -> int:
        """Size of the memory file; pages never written take no memory."""
        return self._native.file_bytes

    def add_refs(self, pages: Sequence[int]) -> None:
        """Count one more reference of this worker to each page."""
        self._native.add_refs(pages)

    def drop_refs(self, pages: Sequence[int]) -> None:
        """Count one reference less. Raises ValueError when this worker has none."""
        self._native.drop_refs(pages)

    def clear_column(self, worker: int) -> None:
        """Drop all references of a worker whose death is proved."""
        self._native.clear_column(worker)

    def column(self, worker: int) -> NDArray[np.int32]:
        """References of one worker, int32 [num_pages], a copy."""
        return self._native.column(worker)

    def total_refs(self) -> NDArray[np.int64]:
        """References of all workers, int64 [num_pages], a copy."""
        return self._native.total_refs()

    def free_pages(self) -> NDArray[np.intp]:
        """Pages nobody references, ascending."""
        return np.flatnonzero(self.total_refs() == 0)

    def copy_page(self, from_page: int, to_page: int) -> None:
        """Copy all layers and heads of a page (the last, partial page of a handoff)."""
        self._native.copy_page(from_page, to_page)

    def block(self, layer: int, kv_head: int, page: int) -> NDArray[np.uint8]:
        """A view of one page block's bytes (layout: native/kernels/attention/attention.h)."""
        return self._native.block(layer, kv_head, page)

    def progress(self, worker: int) -> tuple[int, int]:
        """(forward calls begun by a worker, layers of the current one whose KV is in the pages)."""
        return self._native.progress(worker)
