"""What a checkpoint offers to the parts to its right, whatever file format it has.

A `Checkpoint` knows the file's own names, shapes and values and nothing about model families. Values
come out exactly as stored: floats as numpy floats, grids (bf16, Q4_0, ...) as `WeightTensor`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.tokenizer import TokenizerData
from trivet.config import WeightFormat
from trivet.errors import CheckpointError
from trivet.native.weights import WeightTensor

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class FloatMatrix:
    """A quantized matrix [N, K] that is on no grid of the engine, as the values it stands for.

    values  float32 [N, K]
    format  the form that loses least at about the file's own width; ``auto`` takes it
    source  type of the source, for reports
    note    why the values cannot be kept exactly
    """

    values: Float32
    format: WeightFormat
    source: str
    note: str

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.values.shape
        return n, k


SourceTensor = WeightTensor | FloatMatrix | Float16 | Float32

MAX_CONFIG_BYTES = 64 << 20  # largest JSON side file that is read


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: type name as the file spells it, shape with the fastest axis last."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int  # absolute, in bytes
    num_bytes: int


class Checkpoint(abc.ABC):
    """An opened model: side data and tensors. Reading allocates one tensor at a time."""

    kind: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]  # config.json, or the GGUF key-value pairs
    quantized_types: tuple[str, ...] = ()  # names of a Hugging Face folder's quantized types

    @abc.abstractmethod
    def tokenizer_data(self) -> TokenizerData:
        """The tokenizer, as JSON of the tokenizers library with its special ids and template."""

    @abc.abstractmethod
    def read(self, name: str) -> SourceTensor:
        """The tensor as stored. Raises CheckpointError: missing, unreadable, NaN or Inf inside."""

    def info(self, name: str) -> TensorInfo:
        """Shape and type of a tensor. Raises CheckpointError when it is missing."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(self.path, "is missing", tensor=name) from None

    def read_vector(self, name: str, length: int) -> Float32:
        """A one-dimensional tensor, widened exactly to float32 [length]."""
        info = self.info(name)
        if info.shape != (length,):
            raise CheckpointError(
                info.path, f"has shape {shown_shape(info.shape)}, expected [{length}]", tensor=name
            )
        value = self.read(name)
        if isinstance(value, WeightTensor):
            if value.format.bits != 16:
                raise CheckpointError(info.path, f"is a vector of type {info.dtype}", tensor=name)
            return bf16_to_float(value.codes).reshape(length)
        if isinstance(value, FloatMatrix):
            raise CheckpointError(info.path, f"is a vector of type {info.dtype}", tensor=name)
        return value.reshape(length).astype(np.float32)

    def read_matrix(self, name: str, rows: int, columns: int) -> SourceTensor:
        """A two-dimensional tensor [rows, columns] as stored."""
        info = self.info(name)
        if info.shape != (rows, columns):
            raise CheckpointError(
                info.path,
                f"has shape {shown_shape(info.shape)}, expected [{rows}, {columns}]",
                tensor=name,
            )
        return self.read(name)


def shown_shape(shape: tuple[int, ...]) -> str:
    """``[2, 3]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def bf16_to_float(bits: NDArray[Any]) -> Float32:
    """The float32 values of bf16 bit patterns (uint16), same shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """bf16 bits of float32 values, same shape: nearest even, NaN quiet; too large is infinite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def read_span(path: Path, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Bytes [offset, offset + num_bytes) of a file. Raises CheckpointError when it is too short."""
    try:
        with path.open("rb") as file:
            data = np.fromfile(file, np.uint8, num_bytes, offset=offset)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    if data.size != num_bytes:
        raise CheckpointError(path, f"ends within the bytes at {offset}")
    return data


def require_finite(values: NDArray[Any], path: Path, name: str) -> None:
    """Raise CheckpointError naming the tensor when floats (or bf16 bits, uint16) hold NaN or Inf."""
    if values.dtype == np.uint16:
        bad = bool(((values & 0x7F80) == 0x7F80).any())
    else:
        bad = not bool(np.isfinite(values).all())
    if bad:
        raise CheckpointError(path, "holds NaN or infinite values", tensor=name)


def require_disjoint(infos: list[TensorInfo]) -> None:
    """Raise CheckpointError when two tensors of one file share bytes."""
    ordered = sorted((i for i in infos if i.num_bytes), key=lambda i: i.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise CheckpointError(after.path, f"overlaps {before.name}", tensor=after.name)
