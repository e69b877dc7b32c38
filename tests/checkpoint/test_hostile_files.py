"""Damaged and hostile files: one CheckpointError that names the file, and little memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.hostile import assert_refused
from support.tiny_models import build_folder, build_gguf
from trivet.checkpoint import resolve_model
from trivet.errors import CheckpointError
from trivet.models import open_model
from trivet.models.load import matrix_shapes


def _read_all(path: Path) -> None:
    model = open_model(resolve_model(path))
    model.tokenizer_data()
    model.matrix("embed")
    model.norm("final_norm")
    for layer in range(model.spec.num_layers):
        model.norm("attn_norm", layer)
        for role in matrix_shapes(model.spec):
            model.matrix(role, layer)
            model.bias(role, layer)


def _assert_refused(path: Path, *words: str) -> None:
    assert_refused(_read_all, path, *words)


# GGUF: the file is bytes; a mutation finds its place by a key or a tensor's name.

Mutation = Callable[[bytearray], bytearray]


def _put(layout: str, at: int, value: int) -> Mutation:
    def mutate(data: bytearray) -> bytearray:
        struct.pack_into(layout, data, at, value)
        return data

    return mutate


def _after(name: str, layout: str, skip: int, value: int) -> Mutation:
    """Overwrite what stands ``skip`` bytes after a length-prefixed name."""

    def mutate(data: bytearray) -> bytearray:
        raw = struct.pack("<Q", len(name)) + name.encode()
        at = data.index(raw) + len(raw) + skip
        struct.pack_into(layout, data, at, value)
        return data

    return mutate


def _cut(share: float) -> Mutation:
    return lambda data: data[: int(len(data) * share)]


def _swap(old: bytes, new: bytes) -> Mutation:
    assert len(old) == len(new)

    def mutate(data: bytearray) -> bytearray:
        assert old in data
        return bytearray(bytes(data).replace(old, new))

    return mutate


UP = "blk.1.ffn_up.weight"  # two dimensions: u32 count, u64 x 2, u32 type, u64 offset
GGUF_MUTATIONS: dict[str, tuple[Mutation, tuple[str, ...]]] = {
    "wrong magic": (_put("<I", 0, 0x46554746), ("magic",)),
    "version 1": (_put("<I", 4, 1), ("version 1",)),
    "big-endian version": (_put("<I", 4, 3 << 24), ("version",)),
    "absurd tensor count": (_put("<Q", 8, 1 << 60), ("tensors",)),
    "tensor count beyond the file": (_put("<Q", 8, 100000), ()),
    "absurd key count": (_put("<Q", 16, 1 << 60), ("keys",)),
    "key count beyond the file": (_put("<Q", 16, 60000), ()),
    "key length": (_put("<Q", 24, 1 << 62), ("key",)),
    "unknown value type": (_after("llama.block_count", "<I", 0, 77), ("type 77",)),
    "array count": (_after("tokenizer.ggml.tokens", "<Q", 8, 1 << 61), ("tokenizer.ggml.tokens",)),
    "array of small count": (_after("tokenizer.ggml.token_type", "<Q", 8, 3), ()),
    "string length": (_after("tokenizer.ggml.tokens", "<Q", 16, 1 << 61), ()),
    "array element type": (_after("tokenizer.ggml.token_type", "<I", 4, 99), ("99",)),
    "dimensions 0": (_after(UP, "<I", 0, 0), (UP,)),
    "dimensions 9": (_after(UP, "<I", 0, 9), (UP,)),
    "huge shape": (_after(UP, "<Q", 4, 1 << 62), (UP,)),
    "zero shape": (_after(UP, "<Q", 4, 0), (UP,)),
    "shape not in blocks": (_after(UP, "<Q", 4, 65), (UP,)),
    "shape unlike the config": (_after(UP, "<Q", 12, 64), (UP, "shape")),
    "unsupported type": (_after(UP, "<I", 20, 12), (UP, "Q4_K")),
    "unknown type": (_after(UP, "<I", 20, 4096), (UP, "4096")),
    "another type": (_after(UP, "<I", 20, 0), ()),
    "offset beyond the file": (_after(UP, "<Q", 24, 1 << 40), (UP, "beyond")),
    "offset overflow": (_after(UP, "<Q", 24, (1 << 64) - 32), (UP,)),
    "offset not aligned": (_after(UP, "<Q", 24, 33), (UP, "aligned")),
    "overlap": (_after(UP, "<Q", 24, 0), ("overlaps",)),
    "missing tensor": (_swap(b"blk.1.ffn_up", b"blk.7.ffn_up"), (UP, "missing")),
    "tensor twice": (_swap(b"blk.1.ffn_up", b"blk.0.ffn_up"), ("blk.0.ffn_up.weight", "twice")),
    "key twice": (_swap(b"llama.context_length", b"llama.block_count\0\0\0"), ("context_length",)),
    "unknown architecture": (_swap(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"), ("mamba",)),
    "heads 0": (_after("llama.attention.head_count", "<I", 4, 0), ("head_count",)),
    "heads unlike kv heads": (_after("llama.attention.head_count", "<I", 4, 3), ()),
    "layers": (_after("llama.block_count", "<I", 4, 1 << 20), ("block_count",)),
    "layers beyond": (_after("llama.block_count", "<I", 4, 3), ("blk.2", "missing")),
    "layers left over": (_after("llama.block_count", "<I", 4, 1), ("blk.1", "1 layers")),
    "vocabulary": (_after("llama.vocab_size", "<I", 4, 1 << 21), ("token_embd.weight",)),
    "context 0": (_after("llama.context_length", "<I", 4, 0), ("context_length",)),
    "pre-tokenizer": (_swap(b"\5\0\0\0\0\0\0\0gpt-2", b"\5\0\0\0\0\0\0\0gpt-9"), ("gpt-9",)),
    "tokenizer model": (_swap(b"\4\0\0\0\0\0\0\0gpt2", b"\4\0\0\0\0\0\0\0bert"), ("bert",)),
    "bos outside": (_after("tokenizer.ggml.bos_token_id", "<I", 4, 1 << 30), ("bos",)),
    "cut in the data": (_cut(0.9), ("beyond",)),
    "cut in the header": (_cut(0.02), ()),
    "only the magic": (lambda data: data[:4], ()),
    "empty": (lambda data: data[:0], ()),
}


@pytest.mark.parametrize("name", GGUF_MUTATIONS)
def test_damaged_gguf_is_refused(name: str, tmp_path: Path) -> None:
    mutate, words = GGUF_MUTATIONS[name]
    path = build_gguf(tmp_path / "model.gguf", "llama3", qtype={"ffn_up": "Q4_0"})
    path.write_bytes(mutate(bytearray(path.read_bytes())))
    _assert_refused(path, *words)


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        (0, 6 << 30, "beyond"),
        (8, 1 << 28, "elements"),
        (9, 1 << 24, "arrays hold"),
        (8, 1 << 24, "arrays hold"),
    ],
)
def test_a_large_sparse_file_does_not_buy_memory(
    kind: int, count: int, words: str, tmp_path: Path
) -> None:
    """An array that the file has room for, because the file is a hole of 8 GiB."""
    path = tmp_path / "model.gguf"
    key = struct.pack("<Q", 5) + b"a.key" + struct.pack("<IIQ", 9, kind, count)
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key)
        file.truncate(8 << 30)
    _assert_refused(path, words)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    _assert_refused(path, "split")


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16", "Q4_1", "Q8_0"])
def test_gguf_with_nan_is_refused(qtype: str, tmp_path: Path) -> None:
    path = build_gguf(tmp_path / "model.gguf", "llama3", qtype={"ffn_up": qtype})
    info = open_model(resolve_model(path)).checkpoint.tensors[UP]
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    _assert_refused(path, UP, "NaN")


# Hugging Face: the header and the config are JSON.


def _edit_header(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


HF_UP = "model.layers.1.mlp.up_proj.weight"
HEADER_EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "missing tensor": (lambda h: h.pop(HF_UP), (HF_UP, "missing")),
    "offset beyond": (lambda h: h[HF_UP].update(data_offsets=[0, 1 << 50]), (HF_UP, "beyond")),
    "offsets reversed": (lambda h: h[HF_UP].update(data_offsets=[512, 0]), (HF_UP,)),
    "offset negative": (lambda h: h[HF_UP].update(data_offsets=[-4, 0]), (HF_UP,)),
    "offset a float": (lambda h: h[HF_UP].update(data_offsets=[0.0, 1.0]), (HF_UP,)),
    "offsets missing": (lambda h: h[HF_UP].pop("data_offsets"), (HF_UP,)),
    "shape too large": (lambda h: h[HF_UP].update(shape=[1 << 40, 1 << 20]), (HF_UP,)),
    "shape negative": (lambda h: h[HF_UP].update(shape=[-96, -64]), (HF_UP,)),
    "shape of many": (lambda h: h[HF_UP].update(shape=[1] * 99), (HF_UP,)),
    "shape turned": (lambda h: h[HF_UP].update(shape=[64, 96]), (HF_UP, "shape")),
    "type unlike the size": (lambda h: h[HF_UP].update(dtype="F16"), (HF_UP,)),
    "type unknown": (lambda h: h[HF_UP].update(dtype="F7"), (HF_UP, "F7")),
    "type not readable": (lambda h: h[HF_UP].update(dtype="I32"), (HF_UP, "I32")),
    "type a list": (lambda h: h[HF_UP].update(dtype=["F32"]), (HF_UP,)),
    "entry a string": (lambda h: h.update({HF_UP: "x"}), (HF_UP,)),
    "overlap": (
        lambda h: h[HF_UP].update(data_offsets=h["model.layers.0.mlp.up_proj.weight"]["data_offsets"]),
        ("overlaps",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADER_EDITS)
def test_bad_safetensors_header_is_refused(name: str, tmp_path: Path) -> None:
    edit, words = HEADER_EDITS[name]
    folder = build_folder(tmp_path / "model", "llama3")
    _edit_header(folder, edit)
    _assert_refused(folder, "model.safetensors" if name != "missing tensor" else "", *words)


RAW_FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "five bytes": lambda data: data[:5],
    "header length": lambda data: (1 << 63).to_bytes(8, "little") + data[8:],
    "header of 90 MB": lambda data: (90_000_000).to_bytes(8, "little") + data[8:],
    "not JSON": lambda data: data[:8] + b"x" + data[9:],
    "deep JSON": lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "a list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "a name twice": lambda data: (26).to_bytes(8, "little") + b'{"a":{},"a":{}}'.ljust(26),
    "cut": lambda data: data[:-100],
    "not UTF-8": lambda data: data[:8] + b"\xff\xfe" + data[10:],
}


@pytest.mark.parametrize("name", RAW_FILES)
def test_damaged_safetensors_is_refused(name: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    path = folder / "model.safetensors"
    path.write_bytes(RAW_FILES[name](path.read_bytes()))
    _assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize("bits", ["7fc00000", "7f800000", "ff800000"])
def test_safetensors_with_nan_or_inf_is_refused(bits: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    path = folder / "model.safetensors"
    info = open_model(resolve_model(folder)).checkpoint.tensors[HF_UP]
    data = bytearray(path.read_bytes())
    data[info.offset + 40 : info.offset + 44] = bytes.fromhex(bits)[::-1]
    path.write_bytes(data)
    _assert_refused(folder, HF_UP, "NaN")


CONFIG_EDITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown architecture": (
        {"architectures": ["MambaForCausalLM"]},
        ("MambaForCausalLM", "known"),
    ),
    "no architecture": ({"architectures": None, "model_type": None}, ("known",)),
    "architectures of another kind": ({"architectures": [7]}, ("known",)),
    "hidden a string": ({"hidden_size": "64"}, ("hidden_size",)),
    "hidden negative": ({"hidden_size": -64}, ("hidden_size",)),
    "hidden huge": ({"hidden_size": 1 << 40}, ("hidden_size",)),
    "hidden other": ({"hidden_size": 128}, ("shape",)),
    "layers huge": ({"num_hidden_layers": 10**9}, ("num_hidden_layers",)),
    "layers beyond": ({"num_hidden_layers": 3}, ("model.layers.2", "missing")),
    "layers left over": ({"num_hidden_layers": 1}, ("model.layers.1", "1 layers")),
    "heads 0": ({"num_attention_heads": 0}, ("num_attention_heads",)),
    "kv heads": ({"num_key_value_heads": 3}, ("KV heads",)),
    "head size odd": ({"head_dim": 15}, ("head size",)),
    "vocabulary": ({"vocab_size": 999}, ("model.embed_tokens.weight", "shape")),
    "eps": ({"rms_norm_eps": "small"}, ("rms_norm_eps",)),
    "eps NaN": ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
    "eps beyond floats": ({"rms_norm_eps": 10**400}, ("rms_norm_eps",)),
    "theta beyond floats": ({"rope_theta": 10**400}, ("rope_theta",)),
    "theta": ({"rope_theta": -1}, ("rope_theta",)),
    "rope type": ({"rope_scaling": {"rope_type": "spiral"}}, ("spiral",)),
    "rope a list": ({"rope_scaling": [1]}, ("rope_scaling",)),
    "rope factor": ({"rope_scaling": {"rope_type": "linear"}}, ("factor",)),
    "tied a number": ({"tie_word_embeddings": 3}, ("tie_word_embeddings",)),
    "activation": ({"hidden_act": "gelu"}, ("hidden_act",)),
    "quantized": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ("bitsandbytes", "gptq, awq, compressed-tensors, fp8"),
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
}


@pytest.mark.parametrize("name", CONFIG_EDITS)
def test_bad_config_is_refused(name: str, tmp_path: Path) -> None:
    edit, words = CONFIG_EDITS[name]
    folder = build_folder(tmp_path / "model", "llama3")
    config = json.loads((folder / "config.json").read_text()) | edit
    (folder / "config.json").write_text(json.dumps(config))
    _assert_refused(folder, *words)


def test_sliding_window_is_refused(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "qwen2")
    config = json.loads((folder / "config.json").read_text()) | {"use_sliding_window": True}
    (folder / "config.json").write_text(json.dumps(config))
    _assert_refused(folder, "use_sliding_window")


SIDE_FILES: dict[str, tuple[str, bytes | None, tuple[str, ...]]] = {
    "config not JSON": ("config.json", b"{", ("config.json",)),
    "config a list": ("config.json", b"[]", ("config.json",)),
    "config deep": ("config.json", b"[" * 200_000, ("config.json",)),
    "tokenizer missing": ("tokenizer.json", None, ("tokenizer.json", "missing")),
    "tokenizer not JSON": ("tokenizer.json", b"x", ("tokenizer.json",)),
    "tokenizer empty": ("tokenizer.json", b"{}", ("tokenizer.json", "decoder")),
    "tokenizer of another kind": (
        "tokenizer.json",
        b'{"decoder": {"type": "WordPiece"}}',
        ("WordPiece",),
    ),
    "tokenizer's decoders a number": (
        "tokenizer.json",
        b'{"decoder": {"type": "Sequence", "decoders": 5}}',
        ("decoders is 5",),
    ),
    "decoder of control characters": (
        "tokenizer.json",
        b'{"decoder": {"type": "' + b"\\u0000\\ud800" * 5000 + b'"}}',
        ("has the decoder",),
    ),
    "special token no text": (
        "tokenizer_config.json",
        b'{"bos_token": "\\ud800"}',
        ("bos_token has a lone surrogate",),
    ),
    "end token no text": (
        "tokenizer_config.json",
        b'{"eos_token": {"content": "\\ud800"}}',
        ("eos_token has a lone surrogate",),
    ),
    "chat template no text": (
        "tokenizer_config.json",
        b'{"chat_template": "\\ud800"}',
        ("chat_template has a lone surrogate",),
    ),
    "tokenizer broken": (
        "tokenizer.json",
        b'{"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE"}}',
        ("cannot be built",),
    ),
    "weights missing": ("model.safetensors", None, ("model.safetensors",)),
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_bad_side_files_are_refused(name: str, tmp_path: Path) -> None:
    file, content, words = SIDE_FILES[name]
    folder = build_folder(tmp_path / "model", "llama3")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    _assert_refused(folder, *words)


INDEX_EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "no map": (lambda i: i.clear(), ("weight_map",)),
    "path outside": (
        lambda i: i["weight_map"].update({HF_UP: "../secret.safetensors"}),
        (HF_UP, "outside"),
    ),
    "file missing": (lambda i: i["weight_map"].update({HF_UP: "none.safetensors"}), ("none",)),
    "wrong shard": (
        lambda i: i["weight_map"].update(
            dict.fromkeys(i["weight_map"], "model-00001-of-00002.safetensors")
        ),
        ("missing",),
    ),
    "tensor not listed": (lambda i: i["weight_map"].pop(HF_UP), (HF_UP, "missing")),
}


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_bad_index_is_refused(name: str, tmp_path: Path) -> None:
    edit, words = INDEX_EDITS[name]
    folder = build_folder(tmp_path / "model", "llama3", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    edit(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _assert_refused(folder, *words)


def test_a_pipe_among_the_weights_is_refused(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "smollm2", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name}: is a pipe"):
        open_model(resolve_model(folder))


def test_random_damage_never_escapes(tmp_path: Path) -> None:
    """Flipped bytes anywhere in the metadata: refused in one line, or harmless."""
    path = build_gguf(tmp_path / "model.gguf", "llama3")
    whole = path.read_bytes()
    header = min(i.offset for i in open_model(resolve_model(path)).checkpoint.tensors.values())
    rng = np.random.default_rng(7)
    messages = []
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.integers(0, header, 3):
            data[place] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            _read_all(path)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(message.isprintable() and len(message) < 1000 for message in messages)


def test_names_and_values_of_a_file_are_cut_and_printable() -> None:
    error = CheckpointError("a\nb.gguf", f"type {'x' * 5000}\0", "\0\ud800" * 500)
    assert str(error).startswith("a\\nb.gguf: tensor \\x00\\ud800")
    assert str(error).isprintable()
    assert len(str(error)) < 600
