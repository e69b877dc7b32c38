"""Write a Hugging Face folder: config, safetensors, tokenizer. The folder appears whole or not at all.

The bytes depend on the arguments alone (no time, no version), so that a hash names the content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.tokenizer import SENTENCEPIECE, TokenizerData
from trivet.files import new_folder

Float32 = NDArray[np.float32]


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Float32]]
) -> None:
    """Write float32 tensors in the order of ``shapes``, one in memory at a time; nothing is flushed.

    tensors  (name, values) in that same order
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for (name, shape), (given, values) in zip(shapes.items(), tensors, strict=True):
            assert name == given, (name, given)
            assert values.shape == shape, (name, values.shape, shape)
            file.write(np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data)


def tokenizer_files(data: TokenizerData, max_positions: int) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of a tokenizer, name -> text."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        **data.special_tokens,
    }
    if data.style == SENTENCEPIECE:
        settings["legacy"] = False
    if data.chat_template is not None:
        settings["chat_template"] = data.chat_template
    return {"tokenizer.json": data.json, "tokenizer_config.json": _text(settings)}


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, Float32]],
    tokenizer: TokenizerData,
) -> None:
    """Write a model folder under a temporary name and rename it.

    config  the content of config.json
    Raises CheckpointError: the folder exists, or cannot be written.
    """
    with new_folder(path) as temporary:
        eos_ids = list(tokenizer.eos_ids)
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos_ids}
        files = {
            "config.json": _text(config),
            "generation_config.json": _text(generation),
            **tokenizer_files(tokenizer, int(config["max_position_embeddings"])),
        }
        for name, text in files.items():
            (temporary / name).write_text(text, "utf-8")
        write_safetensors(temporary / "model.safetensors", shapes, tensors)
