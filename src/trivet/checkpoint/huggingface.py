"""Reader of Hugging Face folders: config.json, safetensors (sharded or not), tokenizer files.

The safetensors header is parsed here, as hostile input: lengths, offsets, shapes and types must
agree with each other and with the file before a tensor is read. Source: the safetensors README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trivet import files
from trivet.checkpoint.formats.detect import open_reader
from trivet.checkpoint.source import (
    MAX_CONFIG_BYTES,
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
from trivet.checkpoint.tokenizer import TokenizerData, tokenizer_from_folder
from trivet.config import WeightFormat
from trivet.errors import CheckpointError
from trivet.native.weights import WeightTensor

MAX_HEADER_BYTES = 25_000_000  # a quarter of what the safetensors library allows
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_READABLE = ("BF16", "F16", "F32")
_SIDE_CONFIGS = ("quantize_config.json", "quant_config.json")


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises CheckpointError: unreadable, too large, not JSON."""
    files.require_file(path)
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise CheckpointError(path, f"has {size} bytes, at most {MAX_CONFIG_BYTES} are read")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = "nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(path, f"is not valid JSON: {reason}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json`, for files that hold one object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(path, "does not hold a JSON object")
    return value


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, checked against the file's size and each other."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    files.require_file(path)
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, file_size - 8):
                raise CheckpointError(
                    path, f"is not a safetensors file: header of {length} bytes in {file_size}"
                )
            header = json.loads(file.read(length), object_pairs_hook=unique)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        reason = "nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(path, f"has a bad safetensors header: {reason}") from None
    if not isinstance(header, dict):
        raise CheckpointError(path, "has a bad safetensors header: not an object")
    header.pop("__metadata__", None)
    data_begin = 8 + length
    tensors = {
        name: _tensor_info(path, name, entry, data_begin, file_size - data_begin)
        for name, entry in header.items()
    }
    require_disjoint(list(tensors.values()))
    return tensors


def _tensor_info(path: Path, name: str, entry: Any, data_begin: int, data_size: int) -> TensorInfo:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(path, reason, tensor=name)

    if not isinstance(entry, dict):
        raise fail("has a header entry that is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise fail(f"has the unknown type {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_count, shape)):
        raise fail("has a shape that is not a list of up to 8 counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise fail("has offsets that are not a pair of counts")
    begin, end = offsets
    if begin > end or end > data_size:
        raise fail(f"bytes {begin} to {end} reach beyond the file's {data_size} data bytes")
    if math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise fail(f"has {end - begin} bytes, but {dtype} {shown_shape(tuple(shape))} takes others")
    return TensorInfo(name, dtype, tuple(shape), path, data_begin + begin, end - begin)


class HuggingFaceCheckpoint(Checkpoint):
    """A folder in Hugging Face layout with safetensors weights in bf16, f16 or f32, or quantized."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = read_json_object(path / "config.json")
        stored = self._collect()
        sides = {
            name: read_json_object(path / name) for name in _SIDE_CONFIGS if (path / name).is_file()
        }
        self._quantized = open_reader(path, self.metadata, sides, stored)
        self.tensors: Mapping[str, TensorInfo] = stored
        if self._quantized is not None:
            self.tensors = self._quantized.tensors
            self.quantized_types = self._quantized.types

    def _collect(self) -> dict[str, TensorInfo]:
        single = self.path / "model.safetensors"
        index_path = self.path / "model.safetensors.index.json"
        if single.is_file():
            return read_safetensors_header(single)
        if not index_path.is_file():
            files = sorted(self.path.glob("*.safetensors"))
            if len(files) == 1:  # quantizers of old named theirs gptq_model-4bit-128g and the like
                return read_safetensors_header(files[0])
            raise CheckpointError(
                self.path, "holds neither model.safetensors nor model.safetensors.index.json"
            )
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(index_path, "has no weight_map object")
        shards: dict[str, dict[str, TensorInfo]] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(
                    index_path, f"names the file {file_name!r:.60} outside the folder", tensor=name
                )
            if file_name not in shards:
                shards[file_name] = read_safetensors_header(self.path / file_name)
            if name not in shards[file_name]:
                raise CheckpointError(
                    self.path / file_name, "is missing, though the index lists it", tensor=name
                )
            tensors[name] = shards[file_name][name]
        return tensors

    def tokenizer_data(self) -> TokenizerData:
        """See `Checkpoint.tokenizer_data`; read from tokenizer.json and its side files."""
        return tokenizer_from_folder(self.path, self.metadata)

    def read(self, name: str) -> SourceTensor:
        """See `Checkpoint.read`."""
        info = self.info(name)
        if self._quantized is not None and self._quantized.owns(name):
            return self._quantized.read(name)
        if info.dtype not in _READABLE:
            raise CheckpointError(
                info.path,
                f"has the type {info.dtype}, supported: {', '.join(_READABLE)}",
                tensor=name,
            )
        raw = read_span(info.path, info.offset, info.num_bytes)
        if info.dtype == "BF16":
            codes = raw.view(np.uint16).reshape(-1, info.shape[-1] if info.shape else 1)
            require_finite(codes, info.path, name)
            return WeightTensor(WeightFormat(16), codes, exact=True, source="BF16")
        floats: Any = raw.view(np.float32 if info.dtype == "F32" else np.float16)
        require_finite(floats, info.path, name)
        shaped: Float16 | Float32 = floats.reshape(info.shape)
        return shaped
