"""The packed cache: one file with everything a start needs, mapped read-only.

After the head (`trivet.checkpoint.header`) come tensors, which begin at multiples of 4096, their
parts at multiples of 64. The file is written under a temporary name, flushed and renamed, so that a
reader sees a whole file or none; a reader treats it as hostile all the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.header import (
    FILE_VERSION,
    MAGIC,
    PREAMBLE,
    PackedHeader,
    is_count,
)
from trivet.config import WeightFormat
from trivet.errors import CheckpointError, ConfigError
from trivet.files import settle, temporary_name
from trivet.native.packing import Layout, PackedWeight, ScaleType
from trivet.native.weights import hadamard_width

TENSOR_ALIGN, PART_ALIGN = 4096, 64
_PARTS = ("codes", "scales", "minima", "zeros", "order", "amax", "outliers", "outlier_codes")


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """Where one tensor lies in the file and what its bytes mean.

    kind      ``bf16``, ``int8_row``, ``int8_group``, ``int4_group``, ``int4_row``, ``int4_bf16``,
              ``fp8`` (layouts: native/packing.py), or ``f32``: n * k floats in row order, unpadded
    offsets   ``codes``, ``scales``, ``minima``, ``zeros``, ``order``, ``sums``, ``bias`` (float32
              [n_padded]), and of whole-row int8 ``amax``, ``outliers``, ``outlier_codes``: absolute
              bytes from the file's start, or None where there is none
    group     columns of one sum (`Layout.group`); 0 for bf16 and f32
    hadamard  width of the rotation of the columns; 1 means none
    exact     whether the source's values are kept bit for bit; rel_error is the Frobenius norm of
              the difference over that of the source
    note      what happened to it, where there is something to say
    """

    name: str
    kind: str
    n: int
    k: int
    n_padded: int
    k_padded: int
    group: int
    num_groups: int
    scheme: str
    scale_type: str | None
    hadamard: int
    codes: int
    scales: int | None
    minima: int | None
    zeros: int | None
    order: int | None
    sums: int | None
    bias: int | None
    format: str
    source: str
    exact: bool
    rel_error: float
    note: str
    amax: int | None = None
    outliers: int | None = None
    outlier_codes: int | None = None

    @property
    def num_outliers(self) -> int:
        """How many columns of the input are multiplied in bf16; not for kind ``f32``."""
        return self.layout.format.outliers

    @property
    def layout(self) -> Layout:
        """The packing layout; not for kind ``f32``."""
        assert self.kind != "f32", self.name
        scale_type = ScaleType.F16 if self.scale_type == "f16" else ScaleType.F32
        form = WeightFormat.parse(self.format)
        return Layout(form, self.n, self.k, scale_type, self.order is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts())

    def parts(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of every part."""
        if self.kind == "f32":
            yield self.codes, 4 * self.n * self.k
            return
        for name, (dtype, shape) in self.layout.parts.items():
            yield getattr(self, name), int(np.prod(shape)) * dtype.itemsize
        if self.bias is not None:
            yield self.bias, 4 * self.n_padded


class PackedWriter:
    """Writes one packed file; used as a context manager, `commit` makes it visible.

    header_capacity is the room kept for the header, which is known last.
    """

    def __init__(self, path: Path, header_capacity: int) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._file = self._temporary.open("wb")
        self._capacity = header_capacity
        self._at = _aligned(PREAMBLE.size + header_capacity, TENSOR_ALIGN)
        self._hash = hashlib.sha256()
        self.tensors: dict[str, PackedTensor] = {}

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def blob(self, data: NDArray[Any] | bytes, align: int = PART_ALIGN) -> int:
        """Append bytes at an aligned offset, which is returned."""
        raw = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
        self._at = _aligned(self._at, align)
        begin = self._at
        self._file.seek(begin)
        self._file.write(raw)
        self._hash.update(raw)
        self._at += raw.nbytes
        return begin

    def add_floats(self, name: str, values: NDArray[np.float32], source: str = "F32") -> None:
        """Append float32 values [k] or [n, k]; they count as exact."""
        n, k = values.shape if values.ndim == 2 else (1, values.shape[0])
        codes = self.blob(np.ascontiguousarray(values, np.float32))
        self.tensors[name] = PackedTensor(
            name, "f32", n, k, n, k, 0, 0, "sym", None, 1, codes, None, None, None, None, None, None,
            "f32", source, True, 0.0, "",
        )  # fmt: skip

    def add_weight(
        self,
        name: str,
        weight: PackedWeight,
        bias: NDArray[np.float32] | None,
        *,
        source: str,
        exact: bool,
        rel_error: float,
        note: str,
    ) -> None:
        """Append a packed weight and its bias [n]."""
        layout = weight.layout
        offsets: dict[str, Any] = dict.fromkeys((*_PARTS, "sums", "bias"))
        for index, (part, array) in enumerate(weight.arrays.items()):
            offsets[part] = self.blob(array, PART_ALIGN if index else TENSOR_ALIGN)
        if bias is not None:
            padded = np.zeros(layout.n_padded, np.float32)
            padded[: layout.n] = bias
            offsets["bias"] = self.blob(padded)
        self.tensors[name] = PackedTensor(
            name=name,
            n=layout.n,
            k=layout.k,
            **offsets,
            **_derived(layout),
            format=layout.format.name,
            source=source,
            exact=exact,
            rel_error=rel_error,
            note=note,
        )

    def content_sha256(self) -> str:
        """Hash of the blobs written so far, in file order."""
        return self._hash.copy().hexdigest()

    def commit(self, header: Mapping[str, Any]) -> None:
        """Write the header, flush to the disk and rename into place."""
        full = {**header, "file_size": self._at, "tensors": _tensors_json(self.tensors)}
        raw = json.dumps(full, separators=(",", ":")).encode()
        if len(raw) > self._capacity:
            raise CheckpointError(self.path, f"a header of {len(raw)} bytes has no room")
        raw = raw.ljust(self._capacity)
        self._file.truncate(self._at)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, FILE_VERSION, zlib.crc32(raw), len(raw)) + raw)
        self._file.close()
        settle(self._temporary, self.path)
        # What was written piece by piece is cached in small pages; the first reader gets huge ones.
        with self.path.open("rb") as written:
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _derived(layout: Layout) -> dict[str, Any]:
    """The fields of a PackedTensor that follow from its layout."""
    kind = layout.kind.name.lower()
    plain = kind == "bf16"
    return {
        "kind": kind,
        "n_padded": layout.n_padded,
        "k_padded": layout.k_padded,
        "group": 0 if plain else layout.group,
        "num_groups": 0 if plain else layout.num_groups,
        "scheme": layout.format.scheme.value,
        "scale_type": None if plain else layout.scale_type.name.lower(),
        "hadamard": hadamard_width(layout.k) if layout.format.is_rotated else 1,
    }


def _tensors_json(tensors: Mapping[str, PackedTensor]) -> dict[str, Any]:
    return {name: dataclasses.asdict(t) for name, t in tensors.items()}


@dataclasses.dataclass(frozen=True)
class PackedFile(PackedHeader):
    """An opened packed file whose tensors hold together."""

    tensors: Mapping[str, PackedTensor]

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Map a packed file. Raises CheckpointError when anything in it does not hold together."""
        head = PackedHeader.open(path)
        entries, size = head.header.get("tensors"), len(head.buffer)
        tensors = _checked_tensors(path, entries, head.begin, size)
        return cls(path, head.header, head.begin, head.buffer, tensors)

    def floats(self, name: str) -> NDArray[np.float32]:
        """A view of an ``f32`` tensor, [n, k]. Raises CheckpointError when it is not there."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.kind != "f32":
            raise CheckpointError(self.path, "is missing or not f32", tensor=name)
        flat = np.frombuffer(self.buffer, np.float32, tensor.n * tensor.k, tensor.codes)
        return flat.reshape(tensor.n, tensor.k)

    def weight(self, name: str) -> PackedWeight:
        """Views of a packed weight's parts, without its bias."""
        tensor = self.tensors[name]
        arrays = {
            part: np.frombuffer(
                self.buffer, dtype, int(np.prod(shape)), getattr(tensor, part)
            ).reshape(shape)
            for part, (dtype, shape) in tensor.layout.parts.items()
        }
        return PackedWeight(tensor.layout, **arrays)

    def bias(self, name: str) -> NDArray[np.float32] | None:
        """The bias of a packed weight, float32 [n], or None."""
        tensor = self.tensors[name]
        if tensor.bias is None:
            return None
        return np.frombuffer(self.buffer, np.float32, tensor.n, tensor.bias)

    def content_sha256(self) -> str:
        """Hash of the tensors' bytes in file order, to compare with the header's ``content``."""
        parts = sorted(part for tensor in self.tensors.values() for part in tensor.parts())
        digest = hashlib.sha256()
        for offset, size in parts:
            digest.update(self.buffer[offset : offset + size])
        return digest.hexdigest()


def _checked_tensors(path: Path, entries: Any, begin: int, size: int) -> dict[str, PackedTensor]:
    """Tensors of a header; every size is derived again and every part must lie inside the file."""
    if not isinstance(entries, dict):
        raise CheckpointError(path, "has no tensors")
    tensors = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        try:
            tensor = PackedTensor(**entry)
            _check_tensor(name, tensor)
            parts = list(tensor.parts())
        except (TypeError, ValueError, ConfigError):
            raise CheckpointError(path, "has a header entry that is not sound", name) from None
        for offset, num_bytes in parts:
            if offset < begin or offset % PART_ALIGN or offset + num_bytes > size:
                raise CheckpointError(path, f"{num_bytes} bytes at {offset} are outside", name)
            spans.append((offset, offset + num_bytes, name))
        tensors[name] = tensor
    spans.sort()
    for index in range(1, len(spans)):
        if spans[index - 1][1] > spans[index][0]:
            raise CheckpointError(path, f"overlaps {spans[index - 1][2]}", spans[index][2])
    return tensors


def _check_tensor(name: str, tensor: PackedTensor) -> None:
    """Raise ValueError unless the fields agree with each other."""
    counts = [tensor.n, tensor.k, tensor.codes]
    optional = (
        tensor.scales, tensor.minima, tensor.zeros, tensor.order, tensor.sums, tensor.bias,
        tensor.amax, tensor.outliers, tensor.outlier_codes,
    )  # fmt: skip
    counts += [offset for offset in optional if offset is not None]
    if name != tensor.name or not all(map(is_count, counts)):
        raise ValueError(name)
    if min(tensor.n, tensor.k) < 1 or tensor.n * tensor.k >= 1 << 48:
        raise ValueError(name)
    if tensor.kind == "f32":
        return
    layout = tensor.layout
    if any(getattr(tensor, field) != value for field, value in _derived(layout).items()):
        raise ValueError(name)
    if any(getattr(tensor, part) is None for part in layout.parts):
        raise ValueError(name)
