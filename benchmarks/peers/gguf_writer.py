"""A Hugging Face Llama folder as a GGUF file in F32 or F16, one tensor in memory at a time.

The tokenizer's keys are copied from a GGUF file that holds the same tokenizer, or more tokens of it: a
shorter vocabulary keeps the first tokens and the merges among them. Rows of q and k are permuted as
llama.cpp's own converter does (pairs of rope neighbours instead of halves).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensor_names(num_layers: int, tied: bool) -> dict[str, str]:
    """GGUF name -> Hugging Face name, in file order."""
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    for layer in range(num_layers):
        for short, long in _LAYER.items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    names["output_norm.weight"] = "model.norm.weight"
    if not tied:
        names["output.weight"] = "lm_head.weight"
    return names


class _Safetensors:
    """Tensors of one safetensors file as float32."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(size))
        self._start = 8 + size

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def read(self, name: str) -> NDArray[np.float32]:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        raw = np.fromfile(self._path, np.uint8, end - begin, offset=self._start + begin)
        if entry["dtype"] == "BF16":
            wide = raw.view("<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(entry["shape"])
        assert entry["dtype"] == "F32", entry["dtype"]
        return raw.view("<f4").reshape(entry["shape"])


def _pairs(values: NDArray[Any], heads: int) -> NDArray[Any]:
    rows, columns = values.shape
    split = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows, columns)


def _copy_tokenizer(writer: gguf.GGUFWriter, donor: Path, vocab_size: int) -> None:
    fields = gguf.GGUFReader(donor).fields
    keys = [key for key in fields if key.startswith("tokenizer.")]
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()[:vocab_size]
    known = set(tokens)
    for key in keys:
        field, value = fields[key], fields[key].contents()
        kind, sub = field.types[0], None
        if key == "tokenizer.ggml.merges":
            value = [m for m in value if set(m.split(" ")) <= known and m.replace(" ", "") in known]
        elif kind == gguf.GGUFValueType.ARRAY:
            value = value[:vocab_size]
        if kind == gguf.GGUFValueType.ARRAY:
            sub = field.types[-1]
        writer.add_key_value(key, value, kind, sub_type=sub)


def write_gguf(folder: Path, target: Path, donor: Path, dtype: str = "F16") -> None:
    """Write ``folder`` (a Llama in one safetensors file, F32 or BF16) as ``target``.

    donor  a GGUF file whose tokenizer is copied, cut to the folder's vocabulary
    dtype  "F16" or "F32"; norms are F32 in both
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    source = _Safetensors(folder / "model.safetensors")
    names = tensor_names(config["num_hidden_layers"], config["tie_word_embeddings"])
    temporary = target.with_suffix(".tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(temporary, "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == "F16" else 0)
    _copy_tokenizer(writer, donor, config["vocab_size"])
    wide = np.dtype(np.float32)
    narrow = np.dtype(np.float16 if dtype == "F16" else np.float32)

    def dtype_of(shape: tuple[int, ...]) -> np.dtype[Any]:
        return wide if len(shape) == 1 else narrow

    def tensors() -> Iterator[NDArray[Any]]:
        for name, long in names.items():
            values = source.read(long)
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                values = _pairs(values, heads if "attn_q" in name else kv_heads)
            yield np.ascontiguousarray(values.astype(dtype_of(values.shape)))

    for name, long in names.items():
        shape = source.shape(long)
        kind = dtype_of(shape)
        writer.add_tensor_info(name, shape, kind, int(np.prod(shape)) * kind.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in tensors():
        writer.write_tensor_data(values)
    writer.flush()
    writer.close()
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.rename(target)
