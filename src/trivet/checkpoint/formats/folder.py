"""Write a folder in one of the formats of the field, beside what its source holds.

Tensors stream: one is in memory at a time, shards end before 5 GB. What is not quantized is taken from
the source folder; side files (tokenizer, chat template, generation config, code) are copied. The folder
appears whole or not at all, and its bytes depend on the arguments alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet import __version__
from trivet.checkpoint.formats import awq, compressed_tensors, fp8, gptq
from trivet.checkpoint.formats.fp8 import Fp8Weight
from trivet.checkpoint.formats.grid import CodeGrid, normalized, to_grid
from trivet.checkpoint.formats.stored import NUMPY_TYPES, Stored
from trivet.checkpoint.huggingface import HuggingFaceCheckpoint
from trivet.checkpoint.source import bf16_to_float, float_to_bf16
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.files import new_folder
from trivet.native.weights import WeightTensor

Float32 = NDArray[np.float32]
Weight = WeightTensor | CodeGrid | Fp8Weight | Float32
Encoder = Callable[[CodeGrid | Fp8Weight, str], dict[str, Stored]]

FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors", "fp8")
MAX_SHARD_BYTES = 5_000_000_000
FLOAT_TYPES = ("F16", "BF16", "F32")
_OPTIONS = {
    "gptq": ("float_type", "damp_percent", "true_sequential", "static_groups", "mse"),
    "gptq_v2": ("float_type", "damp_percent", "true_sequential", "static_groups", "mse"),
    "awq": ("float_type",),
    "compressed-tensors": (
        "float_type",
        "activations",
        "padded",
        "input_scales",
        "activation_rules",
    ),
    "fp8": ("float_type",),
}
# Stored parts of a weight at most, and what an entry of the header takes beyond the name.
_MAX_PARTS = {"gptq": 4, "gptq_v2": 4, "awq": 3, "compressed-tensors": 5, "fp8": 2}
_ENTRY_BYTES = 112
_TORCH_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_SIDE_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken", ".md")
_NOT_COPIED = (
    "config.json",
    "model.safetensors.index.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization.json",
    "gate.json",
)
_TABLES = ("embed_tokens",)  # matrices that are looked up, not multiplied


def write(
    folder: str | os.PathLike[str],
    *,
    source_folder: str | os.PathLike[str],
    weights: Mapping[str, Weight],
    format: str,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a quantized folder; returns the names of its files, sorted.

    folder         must not exist
    source_folder  the model in Hugging Face layout, not quantized; its other tensors and side files
                   are kept
    weights        tensor name (``model.layers.0.mlp.up_proj.weight``) -> the weight [out, in] to store
                   in its place; float32 values stay floats. Read once each, in the source's order, so
                   the mapping may compute its values
    format         one of `FORMATS`
    config         ``float_type``: type of everything that is not quantized, F16 (default of integer
                   formats), BF16 (default of fp8) or F32. GPTQ: ``damp_percent``, ``true_sequential``,
                   ``static_groups``, ``mse`` are noted in the config. compressed-tensors:
                   ``activations`` True stores 8-bit rows as int-quantized, ``padded`` the packed
                   layout of before June 2026; ``input_scales`` (module name -> step) are those of
                   int-quantized rows with static activations, ``activation_rules`` what
                   `compressed_tensors.ACTIVATIONS` is to hold
    Raises ConfigError: an unknown format or option; CheckpointError: the folder exists, a name is not
    in the source, the disk is full; QuantError: a weight that the format cannot hold.
    """
    target, source_path = Path(folder), Path(source_folder)
    options = _checked_options(format, config or {})
    source = HuggingFaceCheckpoint(source_path)
    if source.quantized_types:
        raise CheckpointError(source_path, "is quantized; expected a folder of float weights")
    missing = sorted(set(weights) - set(source.tensors))
    if missing:
        raise CheckpointError(source_path, "is missing, though a weight is given", missing[0])
    with new_folder(target) as temporary:
        _copy_side_files(source_path, temporary)
        made = _write_tensors(temporary, source, weights, format, options)
        for name, value in made.items():
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            (temporary / name).write_text(text, "utf-8")
    return sorted(path.name for path in target.iterdir())


def _checked_options(format: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if format not in FORMATS:
        raise ConfigError("format", format, ", ".join(FORMATS))
    for key in config:
        if key not in _OPTIONS[format]:
            raise ConfigError("config", key, ", ".join(_OPTIONS[format]))
    options = {"float_type": "BF16" if format == "fp8" else "F16", **config}
    if options["float_type"] not in FLOAT_TYPES:
        raise ConfigError("float_type", options["float_type"], ", ".join(FLOAT_TYPES))
    return options


def _write_tensors(
    folder: Path,
    source: HuggingFaceCheckpoint,
    weights: Mapping[str, Weight],
    format: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Write all tensors into shards; returns the JSON files that go with them, name -> content."""
    encode = _encoder(format, options)
    skipped = _tied_head(source)
    names = [name for name in source.tensors if name != skipped]
    shapes = _Summary()
    num_parts = {name: _MAX_PARTS[format] if name in weights else 1 for name in names}
    capacity = 64 + sum((len(name) + _ENTRY_BYTES) * num_parts[name] for name in names)
    with ShardWriter(folder, capacity) as writer:
        for name in names:
            given = weights.get(name)
            if given is None or isinstance(given, np.ndarray):
                values = _float_values(source, name) if given is None else given
                if values.shape != source.tensors[name].shape:
                    raise QuantError(_not_shape(name, values.shape, source.tensors[name].shape))
                if _is_linear(name, values.shape):
                    shapes.unquantized.append(name.removesuffix(".weight"))
                writer.add(name, _float_stored(values, options["float_type"], name))
                continue
            weight = to_grid(given) if isinstance(given, WeightTensor) else given
            if isinstance(weight, CodeGrid):
                weight = normalized(weight)
            if weight.shape != source.tensors[name].shape:
                raise QuantError(_not_shape(name, weight.shape, source.tensors[name].shape))
            module = name.removesuffix(".weight")
            try:
                parts = encode(weight, module)
            except QuantError as error:
                raise QuantError(f"{name}: {error}") from None
            shapes.add(module, weight)
            for suffix, stored in parts.items():
                _require_finite(f"{module}.{suffix}", stored)
                writer.add(f"{module}.{suffix}", stored)
        index = writer.finish()
    if skipped is not None:  # loaders make a linear of a tied head, and must not look for its codes
        shapes.unquantized.append(skipped.removesuffix(".weight"))
    if not shapes.weights:
        raise QuantError("no weight is given in a quantized form; nothing would be quantized")
    quantization = shapes.config(format, options)
    model_config = dict(source.metadata)
    model_config.pop("dtype", None)
    model_config["torch_dtype"] = _TORCH_TYPES[options["float_type"]]
    model_config["quantization_config"] = quantization
    model_config.pop(compressed_tensors.ACTIVATIONS, None)
    if options.get("activation_rules") is not None:
        model_config[compressed_tensors.ACTIVATIONS] = options["activation_rules"]
    made: dict[str, Any] = {"config.json": model_config}
    if index is not None:
        made["model.safetensors.index.json"] = index
    if format in ("gptq", "gptq_v2"):
        made["quantize_config.json"] = quantization  # older readers know only this one
    return made


def _not_shape(name: str, have: tuple[int, ...], want: tuple[int, ...]) -> str:
    return f"{name}: has shape {list(have)}, the source {list(want)}"


def _tied_head(source: HuggingFaceCheckpoint) -> str | None:
    """A head stored beside the embedding it is tied to: it is the same matrix and stored once."""
    is_tied = source.metadata.get("tie_word_embeddings") is True
    return "lm_head.weight" if is_tied else None


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    return (
        len(shape) == 2
        and name.endswith(".weight")
        and name.removesuffix(".weight").rpartition(".")[2] not in _TABLES
    )


def _encoder(format: str, options: Mapping[str, Any]) -> Encoder:
    """The function from a weight and its module's name to stored parts, by suffix."""

    def integers(weight: CodeGrid | Fp8Weight) -> CodeGrid:
        if isinstance(weight, Fp8Weight):
            raise QuantError(f"fp8 codes have no place in {format}")
        return weight

    def encode(weight: CodeGrid | Fp8Weight, module: str) -> dict[str, Stored]:
        if format in ("gptq", "gptq_v2"):
            return gptq.encode(integers(weight), gptq.Version(format))
        if format == "awq":
            return awq.encode(integers(weight))
        if format == "fp8":
            if isinstance(weight, CodeGrid):
                raise QuantError("integer codes have no place in fp8")
            return fp8.encode(weight)
        if isinstance(weight, Fp8Weight):
            return compressed_tensors.encode_fp8(weight)
        if _is_int_quantized(weight, options):
            return compressed_tensors.encode_int8(
                weight, options.get("input_scales", {}).get(module)
            )
        return compressed_tensors.encode(weight, padded=bool(options.get("padded")))

    return encode


def _is_int_quantized(weight: CodeGrid, options: Mapping[str, Any]) -> bool:
    wanted = bool(options.get("activations"))
    return wanted and weight.bits == 8 and weight.num_groups == 1 and weight.group_index is None


class _Summary:
    """What the config says of each module, without keeping its codes."""

    def __init__(self) -> None:
        self.weights: dict[str, CodeGrid | Fp8Weight] = {}
        self.unquantized: list[str] = []

    def add(self, module: str, weight: CodeGrid | Fp8Weight) -> None:
        """Keep a view of a weight that holds no data: its shape, grid and order."""
        self.weights[module] = _hollow(weight)

    def config(self, format: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The ``quantization_config``."""
        grids = {n: w for n, w in self.weights.items() if isinstance(w, CodeGrid)}
        if format in ("gptq", "gptq_v2"):
            linear = [name for name in self.unquantized if name != "lm_head"]
            creator = f"trivet:{__version__}"
            return gptq.config(grids, linear, gptq.Version(format), options, creator)
        if format == "awq":
            return awq.config(grids, self.unquantized)
        if format == "fp8":
            floats = {n: w for n, w in self.weights.items() if isinstance(w, Fp8Weight)}
            return fp8.config(floats, self.unquantized)
        kinds = {
            name: compressed_tensors.FLOAT
            if isinstance(weight, Fp8Weight)
            else compressed_tensors.INT
            if _is_int_quantized(weight, options)
            else compressed_tensors.PACKED
            for name, weight in self.weights.items()
        }
        static = options.get("input_scales", {})
        return compressed_tensors.config(self.weights, self.unquantized, kinds, static)


def _hollow(weight: CodeGrid | Fp8Weight) -> CodeGrid | Fp8Weight:
    """The same weight with zeros that take no memory instead of its data."""

    def empty(values: NDArray[Any] | None) -> Any:
        return None if values is None else np.broadcast_to(values.dtype.type(0), values.shape)

    if isinstance(weight, Fp8Weight):
        return Fp8Weight(
            empty(weight.codes), empty(weight.scales), weight.block, weight.granularity
        )
    return CodeGrid(
        weight.bits,
        weight.group_size,
        empty(weight.codes),
        empty(weight.scales),
        empty(weight.zeros),
        empty(weight.group_index),
    )


def _float_values(source: HuggingFaceCheckpoint, name: str) -> Float32:
    """A tensor of the source in float32, exactly."""
    value = source.read(name)
    shape = source.tensors[name].shape
    if isinstance(value, WeightTensor):
        return bf16_to_float(value.codes).reshape(shape)
    assert isinstance(value, np.ndarray), name
    return value.astype(np.float32).reshape(shape)


def _float_stored(values: Float32, kind: str, name: str) -> Stored:
    """Float values in a type of `FLOAT_TYPES`. Raises QuantError: one is too large for it."""
    if kind == "F32":
        stored = Stored("F32", np.ascontiguousarray(values, np.float32))
    elif kind == "F16":
        with np.errstate(over="ignore"):
            stored = Stored("F16", values.astype(np.float16))
    else:
        stored = Stored("BF16", float_to_bf16(values))
    _require_finite(name, stored)
    return stored


def _require_finite(name: str, stored: Stored) -> None:
    if stored.dtype in FLOAT_TYPES and not np.isfinite(stored.floats()).all():
        raise QuantError(f"{name}: holds a value that {stored.dtype} cannot, or NaN")


class ShardWriter:
    """Streams tensors into safetensors files; headers are written when a shard is complete.

    Nothing is flushed: `trivet.files.new_folder` does that with the whole folder.

    capacity  room that each file's header is given, a bound of what all tensors' entries take
    """

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._capacity = -(-capacity // 8) * 8
        self._shards: list[tuple[Path, list[str]]] = []
        self._file: Any = None
        self._header: dict[str, Any] = {}
        self._size = self._total = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, name: str, stored: Stored) -> None:
        """Append one tensor."""
        array = np.ascontiguousarray(stored.array, NUMPY_TYPES[stored.dtype])
        if self._file is not None and self._size + array.nbytes > MAX_SHARD_BYTES:
            self._close_shard()
        if self._file is None:
            path = self._folder / f"shard-{len(self._shards)}"
            self._file = path.open("wb")
            self._file.seek(8 + self._capacity)
            self._header = {"__metadata__": {"format": "pt"}}
            self._size = 0
            self._shards.append((path, []))
        begin, self._size = self._size, self._size + array.nbytes
        self._header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.array.shape),
            "data_offsets": [begin, self._size],
        }
        self._shards[-1][1].append(name)
        self._total += array.nbytes
        self._file.write(array.reshape(-1).view(np.uint8).data)

    def _close_shard(self) -> None:
        raw = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(raw) <= self._capacity, (len(raw), self._capacity)
        self._file.seek(0)
        self._file.write(self._capacity.to_bytes(8, "little") + raw.ljust(self._capacity))
        self._file.close()
        self._file = None

    def finish(self) -> dict[str, Any] | None:
        """Complete the last shard and name the files; returns the index, None for one file."""
        if self._file is not None:
            self._close_shard()
        count = len(self._shards)
        if count == 1:
            self._shards[0][0].rename(self._folder / "model.safetensors")
            return None
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        return {"metadata": {"total_size": self._total}, "weight_map": weight_map}


def _side_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        is_plain = path.is_file() and not path.name.startswith(".")
        if is_plain and path.name not in _NOT_COPIED and path.suffix in _SIDE_SUFFIXES:
            yield path


def _copy_side_files(source: Path, folder: Path) -> None:
    """Everything beside weights and config: tokenizer, template, generation config, licence, code."""
    licences = (path for path in sorted(source.glob("LICENSE*")) if path.is_file())
    for path in (*_side_files(source), *licences):
        (folder / path.name).write_bytes(path.read_bytes())
