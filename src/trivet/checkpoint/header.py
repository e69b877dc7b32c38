"""The head of a packed cache: what it is for, where its parts lie, and its tokenizer.

Layout, little endian: magic ``TRIVETPK``, u32 version, u32 CRC-32 of the header, u64 header length,
the header as JSON, then blobs at offsets the header names (`trivet.checkpoint.packed`). Reading it
needs no numpy: the gateway takes the tokenizer from here and leaves the tensors to its workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import CheckpointError

if TYPE_CHECKING:
    from trivet.checkpoint.tokenizer import Tokenizer

MAGIC = b"TRIVETPK"
FILE_VERSION = 1
CONTRACT_VERSION = 1  # of the numerics contract (HACKING.md); part of every numerics_id
MAX_HEADER_BYTES = 256 << 20
PREAMBLE = struct.Struct("<8sIIQ")


@dataclasses.dataclass(frozen=True)
class PackedHeader:
    """An opened packed file whose tensors nobody has looked at.

    header  the header's JSON object
    begin   where the header ends: no blob begins before
    buffer  the whole mapping, page-aligned and read-only
    """

    path: Path
    header: Mapping[str, Any]
    begin: int
    buffer: memoryview

    @classmethod
    def open(cls, path: Path) -> PackedHeader:
        """Map a packed file. Raises CheckpointError when its head does not hold together."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < PREAMBLE.size:
                    raise CheckpointError(path, "is not a packed cache (wrong magic)")
                buffer = _mapped(file.fileno())
                magic, version, crc, length = PREAMBLE.unpack(buffer[: PREAMBLE.size])
                if magic != MAGIC:
                    raise CheckpointError(path, "is not a packed cache (wrong magic)")
                if version != FILE_VERSION:
                    raise CheckpointError(path, f"has version {version}, this is {FILE_VERSION}")
                if length > min(MAX_HEADER_BYTES, size - PREAMBLE.size):
                    raise CheckpointError(path, f"claims a header of {length} bytes in {size}")
                raw = bytes(buffer[PREAMBLE.size : PREAMBLE.size + length])
                if zlib.crc32(raw) != crc:
                    raise CheckpointError(path, "has a damaged header")
                header = json.loads(raw)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError):
            raise CheckpointError(path, "has a header that is not JSON") from None
        if not isinstance(header, dict) or header.get("file_size") != size:
            raise CheckpointError(path, f"has {size} bytes, its header says otherwise")
        return PackedHeader(path, header, PREAMBLE.size + length, buffer)

    def bytes_at(self, key: str) -> bytes:
        """A blob that the header names as ``{key: [offset, length]}``."""
        place = self.header.get(key)
        if (
            not isinstance(place, list)
            or len(place) != 2
            or not all(map(is_count, place))
            or sum(place) > len(self.buffer)
        ):
            raise CheckpointError(self.path, f"has no sound entry {key}")
        return bytes(self.buffer[place[0] : place[0] + place[1]])

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built anew. Raises CheckpointError: it is damaged."""
        from trivet.checkpoint.tokenizer import Tokenizer, TokenizerData

        raw = self.bytes_at("tokenizer")
        try:
            data = TokenizerData.from_settings(raw.decode(), self.header["tokenizer_settings"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(self.path, "has no sound tokenizer; delete it") from None
        return Tokenizer(data, self.path)


def _mapped(descriptor: int) -> memoryview:
    """The whole file, read-only, in huge pages where the file system has them.

    Weights are read from end to end for every token, and walks of the page table cost time.
    The file is read through the mapping only; any other read would cache its pages small.
    """
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
