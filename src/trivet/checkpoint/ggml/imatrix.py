"""Importance matrices: the mean square of the input that meets each column of a weight.

Read and written in llama.cpp's two formats, GGUF (``<tensor>.in_sum2`` and ``.counts``) and the
older binary ``.dat``. Names are GGUF tensor names. Source: llama.cpp's tools/imatrix and
common/imatrix-loader.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.gguf import GGUFCheckpoint
from trivet.checkpoint.gguf_write import TensorPlan, write_gguf_file
from trivet.errors import CheckpointError
from trivet.files import new_file, require_file

Float32 = NDArray[np.float32]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES = 1 << 20
_MAX_NAME = 4096


@dataclasses.dataclass(frozen=True)
class Entry:
    """sums: float32 [experts, K] sums of squares; counts: float32 [experts], rows seen."""

    sums: Float32
    counts: Float32


@dataclasses.dataclass(frozen=True)
class ImportanceMatrix:
    """Sums of squares per tensor.

    chunk_size   tokens of one chunk, chunk_count their number     datasets   names of the texts
    path         where it was read from, for messages
    """

    entries: Mapping[str, Entry]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 512
    path: Path = Path("imatrix")

    def __post_init__(self) -> None:
        for name, entry in self.entries.items():
            both = (entry.sums, entry.counts)
            if not all(np.isfinite(part).all() and (part >= 0).all() for part in both):
                raise CheckpointError(
                    self.path, "holds NaN, infinite or negative sums", tensor=name
                )

    def mean(self, name: str, columns: int) -> Float32 | None:
        """Mean squares of a matrix's columns, float32 [columns]; None when it was not observed.

        Raises CheckpointError: it was, with another width.
        """
        entry = self.entries.get(name)
        if entry is None or len(entry.counts) != 1 or entry.counts[0] == 0:
            return None
        if entry.sums.shape[1] != columns:
            raise CheckpointError(
                self.path,
                f"has {entry.sums.shape[1]} columns, the model's has {columns}",
                tensor=name,
            )
        means: Float32 = entry.sums[0] / entry.counts[0]
        return means


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read either format. Raises CheckpointError: not one of them, damaged, or values not finite."""
    source = Path(path)
    require_file(source)
    try:
        with source.open("rb") as file:
            magic = file.read(4)
            rest = file.read() if magic != b"GGUF" else b""
    except OSError as error:
        raise CheckpointError(source, f"cannot be read: {error.strerror or error}") from None
    return _from_gguf(source) if magic == b"GGUF" else _from_dat(source, magic + rest)


def _from_gguf(path: Path) -> ImportanceMatrix:
    checkpoint = GGUFCheckpoint(path)
    metadata = checkpoint.metadata
    if metadata.get("general.type", "imatrix") != "imatrix":
        raise CheckpointError(path, f"is a GGUF file of type {metadata['general.type']!r:.40}")
    entries = {}
    for name in checkpoint.tensors:
        if not name.endswith(_SUMS):
            continue
        stem = name.removesuffix(_SUMS)
        sums, counts = checkpoint.read(name), checkpoint.read(stem + _COUNTS)
        if not isinstance(sums, np.ndarray) or not isinstance(counts, np.ndarray):
            raise CheckpointError(path, "is not of type F32", tensor=name)
        number = counts.size
        if sums.size % number or sums.ndim > 3:
            raise CheckpointError(path, f"does not fit {number} counts", tensor=name)
        entries[stem] = Entry(
            sums.reshape(number, -1).astype(np.float32), counts.reshape(-1).astype(np.float32)
        )
    if not entries:
        raise CheckpointError(path, f"holds no tensor that ends in {_SUMS}")
    datasets = metadata.get("imatrix.datasets", [])
    return ImportanceMatrix(
        entries,
        tuple(datasets) if isinstance(datasets, list) else (),
        _count(metadata.get("imatrix.chunk_count"), 0),
        _count(metadata.get("imatrix.chunk_size"), 512),
        path,
    )


def _count(value: object, default: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return default


def _from_dat(path: Path, raw: bytes) -> ImportanceMatrix:
    at = 0

    def number(what: str, high: int) -> int:
        nonlocal at
        if len(raw) < at + 4:
            raise CheckpointError(path, f"is not an importance matrix: it ends before {what}")
        value: int = struct.unpack_from("<i", raw, at)[0]
        at += 4
        if not 0 <= value <= high:
            raise CheckpointError(path, f"is not an importance matrix: {what} is {value}")
        return value

    def take(size: int, what: str) -> bytes:
        nonlocal at
        if len(raw) < at + size:
            raise CheckpointError(path, f"is not an importance matrix: it ends within {what}")
        at += size
        return raw[at - size : at]

    entries = {}
    for _ in range(number("the number of entries", _MAX_ENTRIES)):
        name = take(number("the length of a name", _MAX_NAME), "a name").decode("utf-8", "replace")
        calls = number(f"the calls of {name:.60}", 1 << 30)
        width = number(f"the width of {name:.60}", 1 << 24)
        values = np.frombuffer(take(4 * width, name), "<f4").astype(np.float32)
        # Stored: mean square times calls. The rows behind the mean are not in this format.
        if width:
            entries[name] = Entry(values[None], np.array([max(calls, 1)], np.float32))
    if not entries:
        raise CheckpointError(path, "is not an importance matrix: it has no entries")
    chunks = 0
    datasets: tuple[str, ...] = ()
    if at < len(raw):
        chunks = number("the number of chunks", 1 << 30)
    if at < len(raw):
        length = number("the length of the text's name", _MAX_NAME)
        datasets = (take(length, "the text's name").decode("utf-8", "replace"),)
    return ImportanceMatrix(entries, datasets, chunks, path=path)


def write_imatrix(path: str | os.PathLike[str], matrix: ImportanceMatrix) -> None:
    """Write a matrix; a name that ends in ``.dat`` gets the older format, any other GGUF.

    Raises CheckpointError: the file exists or cannot be written.
    """
    target = Path(path)
    if target.suffix == ".dat":
        _write_dat(target, matrix)
        return
    plans, data = [], []
    for name, entry in sorted(matrix.entries.items()):
        plans.append(TensorPlan(name + _SUMS, "F32", entry.sums.shape))
        plans.append(TensorPlan(name + _COUNTS, "F32", (len(entry.counts), 1)))
        data += [entry.sums, entry.counts]
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(matrix.datasets),
        "imatrix.chunk_count": matrix.chunk_count,
        "imatrix.chunk_size": matrix.chunk_size,
    }
    raws = (np.ascontiguousarray(part, np.float32).reshape(-1).view(np.uint8) for part in data)
    write_gguf_file(target, metadata, plans, raws)


def _write_dat(path: Path, matrix: ImportanceMatrix) -> None:
    parts = [struct.pack("<i", len(matrix.entries))]
    for name, entry in sorted(matrix.entries.items()):
        label = name.encode()
        calls = max(1, math.ceil(float(entry.counts.max()) / max(matrix.chunk_size, 1)))
        seen = entry.counts[:, None]
        means = np.where(seen > 0, entry.sums / np.maximum(seen, 1), 1) * np.float32(calls)
        parts.append(struct.pack("<i", len(label)) + label)
        parts.append(struct.pack("<ii", calls, means.size) + means.astype("<f4").tobytes())
    dataset = (matrix.datasets[-1] if matrix.datasets else "").encode()
    parts.append(struct.pack("<ii", matrix.chunk_count, len(dataset)) + dataset)
    with new_file(path) as temporary:
        temporary.write_bytes(b"".join(parts))
