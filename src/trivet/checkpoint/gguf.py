"""Reader of GGUF files, version 2 and 3, little endian: metadata and tensors, bit for bit.

Every count, length and offset is checked against the bytes that are there before anything is
allocated for it. Written by hand because the `gguf` package takes two seconds for a vocabulary; the
tests compare both. Source: ggml's docs/gguf.md and ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from trivet import files
from trivet.checkpoint.ggml import TYPES, BlockType, kquants, legacy
from trivet.checkpoint.gguf_vocab import tokenizer_from_gguf
from trivet.checkpoint.source import (
    Checkpoint,
    Float16,
    Float32,
    SourceTensor,
    TensorInfo,
    read_span,
    require_disjoint,
    require_finite,
    shown_shape,
)
from trivet.checkpoint.tokenizer import TokenizerData
from trivet.config import Scheme, WeightFormat
from trivet.errors import CheckpointError
from trivet.native.weights import WeightTensor

MAGIC = b"GGUF"
MAX_KEY_BYTES = 65535
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_NESTING = 4
MAX_METADATA_BYTES = 512 << 20  # metadata and tensor infos together
MAX_ELEMENTS = 1 << 23  # strings and lists in all arrays together


_TYPE_OF_ID = {kind.id: kind for kind in TYPES.values()}
_OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4",
}  # fmt: skip

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


class _Cursor:
    """Bounded reading of one mapped file; every failure names the file and the place."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.file_size = len(data)
        self.size = min(len(data), MAX_METADATA_BYTES)
        self.at = 0
        self.num_elements = 0

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(self.path, f"is not a sound GGUF file: {reason}")

    def take(self, num_bytes: int, what: str) -> int:
        """Advance over bytes that must exist; returns where they begin."""
        begin = self.at
        if num_bytes > self.size - begin:
            where = "file" if self.size < MAX_METADATA_BYTES else "metadata that is read"
            self.fail(f"{what} at byte {begin} reaches beyond the end of the {where}")
        self.at = begin + num_bytes
        return begin

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            self.fail(f"{what} has {length} bytes, at most {limit} are allowed")
        begin = self.take(length, what)
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        layout = _SCALARS.get(kind)
        if layout is None:
            self.fail(f"{what} has the unknown value type {kind}")
        scalar = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))[0]
        return bool(scalar) if kind == _BOOL else scalar

    def _array(self, what: str, depth: int) -> Any:
        if depth >= MAX_NESTING:
            self.fail(f"{what} nests arrays too deeply")
        kind = self.u32(what)
        count = self.u64(what)
        smallest = 8 if kind == _STRING else 12 if kind == _ARRAY else None
        if smallest is None:
            layout = _SCALARS.get(kind)
            if layout is None:
                self.fail(f"{what} has the unknown element type {kind}")
            begin = self.take(count * struct.calcsize(layout), what)
            values = np.frombuffer(self.data, layout, count, begin).copy()
            return values.astype(np.bool_) if kind == _BOOL else values
        if count * smallest > self.size - self.at:
            self.fail(f"{what} claims {count} elements, more than the file holds")
        self.num_elements += count
        if self.num_elements > MAX_ELEMENTS:
            self.fail(f"arrays hold more than {MAX_ELEMENTS} strings and lists")
        if kind == _STRING:
            return self._strings(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        data, at, size = self.data, self.at, self.size
        length_of = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > size:
                self.fail(f"{what} reaches beyond the end of the file")
            begin = at + 8
            at = begin + length_of(data, at)[0]
            if at > size:
                self.fail(f"a string of {what} reaches beyond the end of the file")
            strings.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return strings


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. Raises CheckpointError when the file is truncated, mislabelled or hostile."""

    kind = "gguf"
    quantized_types = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

    def __init__(self, path: Path) -> None:
        self.path = path
        files.require_file(path)
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise CheckpointError(path, "is not a GGUF file (wrong magic)")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
        with mapped:
            cursor = _Cursor(path, mapped)
            cursor.take(4, "the magic")
            self.metadata: Mapping[str, Any] = {}
            self.tensors: Mapping[str, TensorInfo] = {}
            self._parse(cursor)

    def _parse(self, cursor: _Cursor) -> None:
        version = cursor.u32("the version")
        if version not in (2, 3):
            cursor.fail(f"version {version} is not supported, 2 and 3 are")
        num_tensors = cursor.u64("the tensor count")
        num_keys = cursor.u64("the key count")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            cursor.fail(f"it claims {num_tensors} tensors and {num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text("a key", MAX_KEY_BYTES)
            if key in metadata:
                cursor.fail(f"key {key!r} appears twice")
            metadata[key] = cursor.value(cursor.u32(key), key)
        self.metadata = metadata
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(self.path, "is one part of a split model, which is not supported")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            cursor.fail(f"general.alignment is {alignment!r}")
        entries = [self._entry(cursor) for _ in range(num_tensors)]
        data_begin = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset, num_bytes in entries:
            if name in tensors:
                raise CheckpointError(self.path, "appears twice", tensor=name)
            if offset % alignment:
                raise CheckpointError(self.path, f"offset {offset} is not aligned", tensor=name)
            if data_begin + offset + num_bytes > cursor.file_size:
                raise CheckpointError(
                    self.path,
                    f"{num_bytes} bytes at offset {offset} reach beyond the end of the file",
                    tensor=name,
                )
            tensors[name] = TensorInfo(
                name, kind.name, shape, self.path, data_begin + offset, num_bytes
            )
        require_disjoint(list(tensors.values()))
        self.tensors = tensors

    def _entry(self, cursor: _Cursor) -> tuple[str, BlockType, tuple[int, ...], int, int]:
        name = cursor.text("a tensor name", MAX_KEY_BYTES)
        num_dims = cursor.u32(name)
        if not 1 <= num_dims <= 4:
            raise CheckpointError(self.path, f"has {num_dims} dimensions", tensor=name)
        dims = tuple(cursor.u64(name) for _ in range(num_dims))
        kind_id = cursor.u32(name)
        offset = cursor.u64(name)
        kind = _TYPE_OF_ID.get(kind_id)
        if kind is None:
            known = ", ".join(t.name for t in TYPES.values())
            label = _OTHER_TYPES.get(kind_id, "unknown")
            raise CheckpointError(
                self.path,
                f"has the GGUF type {kind_id} ({label}), which is not supported; supported: {known}",
                tensor=name,
            )
        if min(dims) < 1 or math.prod(dims) > cursor.file_size * 4 or dims[0] % kind.values:
            raise CheckpointError(
                self.path,
                f"has the impossible shape {shown_shape(dims[::-1])} for type {kind.name}",
                tensor=name,
            )
        num_bytes = math.prod(dims[1:]) * kind.row_bytes(dims[0])
        return name, kind, dims[::-1], offset, num_bytes

    def tokenizer_data(self) -> TokenizerData:
        """See `Checkpoint.tokenizer_data`; rebuilt from the ``tokenizer.*`` keys."""
        return tokenizer_from_gguf(self.metadata, self.path)

    def read(self, name: str) -> SourceTensor:
        """See `Checkpoint.read`. Every block type comes as a grid that holds it exactly."""
        info = self.info(name)
        raw = read_span(info.path, info.offset, info.num_bytes)
        if info.dtype in ("F32", "F16"):
            floats: Any = raw.view(np.float32 if info.dtype == "F32" else np.float16)
            require_finite(floats, self.path, name)
            shaped: Float16 | Float32 = floats.reshape(info.shape)
            return shaped
        columns = info.shape[-1]
        rows = math.prod(info.shape[:-1])
        if info.dtype == "BF16":
            codes = raw.view(np.uint16).reshape(rows, columns)
            require_finite(codes, self.path, name)
            return WeightTensor(WeightFormat(16), codes, exact=True, source="BF16")
        if info.dtype in _K_FORMS:
            return _read_k(raw, info, rows, columns)
        return _read_grid(raw, info, rows, columns)

    def read_bytes(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, uint8 [rows, bytes of a row]."""
        info = self.info(name)
        raw = read_span(info.path, info.offset, info.num_bytes)
        return raw.reshape(math.prod(info.shape[:-1]), -1)


# The engine's form of each k-quant; 2 and 3 bits lie in 4, 5 and 6 in 8.
_K_FORMS = {
    "Q2_K": WeightFormat(4, 16, Scheme.MIN),
    "Q3_K": WeightFormat(4, 16),
    "Q4_K": WeightFormat(4, 32, Scheme.MIN),
    "Q5_K": WeightFormat(8, 32, Scheme.MIN),
    "Q6_K": WeightFormat(8, 16),
}


def _read_grid(raw: NDArray[np.uint8], info: TensorInfo, rows: int, columns: int) -> WeightTensor:
    """Codes and scales of a tensor of 32-value blocks, without changing a bit."""
    blocks = raw.reshape(-1, TYPES[info.dtype].num_bytes)

    def halves(at: int) -> NDArray[np.float16]:
        values = legacy.halves(blocks, at)
        require_finite(values, info.path, info.name)
        return values.reshape(rows, columns // legacy.GROUP)

    codes: Any = legacy.split_codes(info.dtype, blocks)
    scales, minima, form = halves(0), None, WeightFormat(8, 32)
    if info.dtype == "Q5_0":
        codes = codes.astype(np.int8) - np.int8(16)
    elif info.dtype == "Q4_0":
        form = WeightFormat(4, 32)
    elif info.dtype in ("Q4_1", "Q5_1"):
        bits = 4 if info.dtype == "Q4_1" else 8
        form, minima = WeightFormat(bits, 32, Scheme.MIN), halves(2)
        codes = codes.astype(np.int8 if bits == 8 else np.uint8, copy=False)
    shaped = codes.reshape(rows, columns)
    return WeightTensor(form, shaped, scales, minima, exact=True, source=info.dtype)


def _read_k(raw: NDArray[np.uint8], info: TensorInfo, rows: int, columns: int) -> WeightTensor:
    """A k-quant as codes with a float32 scale (and minimum) per sub-block, which hold it exactly."""
    form = _K_FORMS[info.dtype]
    codes, scales, minima = kquants.split(info.dtype, raw.reshape(-1, TYPES[info.dtype].num_bytes))
    for values in (scales, minima):
        if values is not None:
            require_finite(values, info.path, info.name)
    shaped = codes.reshape(rows, columns)
    if form.bits == 8:
        shaped = shaped.astype(np.int8, copy=False)
    elif form.scheme is Scheme.SYM:
        shaped = (shaped + np.int8(8)).astype(np.uint8)
    return WeightTensor(
        form,
        shaped,
        scales.reshape(rows, -1),
        None if minima is None else -minima.reshape(rows, -1),
        exact=True,
        source=info.dtype,
    )
