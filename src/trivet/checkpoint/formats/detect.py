"""Which format a Hugging Face folder's weights are in, and its reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet.checkpoint.formats.awq import AWQReader
from trivet.checkpoint.formats.compressed_tensors import ACTIVATIONS, CompressedTensorsReader
from trivet.checkpoint.formats.fp8 import FP8Reader
from trivet.checkpoint.formats.gptq import GPTQReader
from trivet.checkpoint.formats.stored import FormatReader, Settings, StoredTensors
from trivet.checkpoint.source import TensorInfo
from trivet.errors import CheckpointError

_READERS: Mapping[str, type[GPTQReader | AWQReader | CompressedTensorsReader | FP8Reader]] = {
    "gptq": GPTQReader,
    "awq": AWQReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": FP8Reader,
}
_SIDE_METHODS: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def open_reader(
    path: Path,
    config: Mapping[str, Any],
    side_configs: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, TensorInfo],
) -> FormatReader | None:
    """The reader of a folder, or None for one that is not quantized.

    config        content of config.json; its ``quantization_config`` says the format
    side_configs  file name -> content of quantize_config.json (GPTQ) and quant_config.json (AWQ),
                  which older folders have instead
    tensors       the folder's tensors as its files name them
    Raises CheckpointError: a format that is not known; what the format's reader finds wrong.
    """
    values: Any = config.get("quantization_config")
    where, file, method = "quantization_config", path / "config.json", None
    if values is None:
        name = next((name for name in _SIDE_METHODS if name in side_configs), None)
        if name is None or not any(tensor.endswith(".qweight") for tensor in tensors):
            return None
        values, where, file, method = side_configs[name], name, path / name, _SIDE_METHODS[name]
    if not isinstance(values, Mapping):
        raise CheckpointError(file, f"{where} is not an object")
    method = values.get("quant_method", method)
    if not isinstance(method, str) or method not in _READERS:
        known = ", ".join(_READERS)
        raise CheckpointError(
            file,
            f"{where}: quant_method is {method!r:.40}, which is not supported; supported: {known}",
        )
    settings, stored = Settings(file, values, where), StoredTensors(tensors)
    if method == "compressed-tensors":
        return CompressedTensorsReader(settings, stored, config.get(ACTIVATIONS))
    return _READERS[method](settings, stored)
