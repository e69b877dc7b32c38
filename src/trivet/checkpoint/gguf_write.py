"""Writer of GGUF files, version 3, little endian: metadata, then tensors in order, one at a time.

The bytes depend on the arguments alone. A file appears under its name when it is complete and on the
disk. Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.ggml import TYPES
from trivet.files import new_file

ALIGNMENT = 32
_VERSION = 3
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_NUMPY_KINDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "bool": 7, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: its name, ggml type and shape with the row length last."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * TYPES[self.kind].row_bytes(self.shape[-1])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """Type and bytes of a metadata value.

    bool, str, float (float32), int (uint32, or uint64 when larger, int32 when negative), a list of
    str, or a one-dimensional numpy array.
    """
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", _I32, value)
        return (
            struct.pack("<II", _U32, value) if value < 1 << 32 else struct.pack("<IQ", _U64, value)
        )
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", _ARRAY, _NUMPY_KINDS[value.dtype.name], len(value))
        return head + np.ascontiguousarray(value).tobytes()
    assert isinstance(value, list), (key, type(value))
    assert all(isinstance(item, str) for item in value), key
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))


def gguf_header(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> bytes:
    """Everything before the tensor data, padded to where it begins."""
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + _value(key, value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", TYPES[tensor.kind].id, offset))
        offset += _padded(tensor.num_bytes)
    raw = b"".join(parts)
    return raw.ljust(_padded(len(raw)), b"\0")


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> int:
    """Size of the file that `write_gguf_file` makes."""
    data = sum(_padded(tensor.num_bytes) for tensor in tensors)
    return len(gguf_header(metadata, tensors)) + data


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorPlan],
    data: Iterable[NDArray[np.uint8]],
) -> None:
    """Write a file whole.

    metadata  see `_value` for the types; ``general.alignment`` is left at its default
    data      bytes of all tensors in the order of ``tensors``, in pieces of any size that end where a
              tensor ends
    Raises CheckpointError: the file exists, or cannot be written.
    """
    with new_file(path) as temporary, temporary.open("wb") as file:
        file.write(gguf_header(metadata, tensors))
        pieces = iter(data)
        for tensor in tensors:
            left = tensor.num_bytes
            while left:
                piece = next(pieces)
                assert piece.dtype == np.uint8, tensor.name
                assert piece.size <= left, tensor.name
                file.write(np.ascontiguousarray(piece).reshape(-1).data)
                left -= piece.size
            file.write(b"\0" * (_padded(tensor.num_bytes) - tensor.num_bytes))
