"""Tiny random models of every family, as Hugging Face folders and as GGUF files.

Weights are multiples that bf16 holds exactly, so one model can be stored in several types without
changing. Everything follows from the variant's name and the seed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

Float32 = NDArray[np.float32]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A shape to build. ``extra`` goes into config.json as it is."""

    family: str = "llama"
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    ffn: int = 96
    vocab: int = 384
    positions: int = 256
    theta: float = 10000.0
    eps: float = 1e-5
    tied: bool = False
    rope: dict[str, Any] | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


VARIANTS = {
    "llama2": Variant(kv_heads=4),
    "tinyllama": Variant(heads=8, kv_heads=1),
    "llama3": Variant(theta=500000.0),
    "llama31": Variant(theta=500000.0, rope=_LLAMA3_ROPE),
    "llama32": Variant(theta=500000.0, rope=_LLAMA3_ROPE, tied=True, head_dim=32),
    "smollm2": Variant(
        hidden=96, heads=3, kv_heads=1, head_dim=32, ffn=160, theta=1e5, tied=True, layers=3
    ),
    "linear": Variant(rope={"rope_type": "linear", "factor": 4.0}),
    "biases": Variant(extra={"attention_bias": True, "mlp_bias": True}),
    "qwen2": Variant(family="qwen2", theta=1e6, eps=1e-6),
    "qwen25": Variant(family="qwen2", theta=1e6, eps=1e-6, tied=True, heads=6, hidden=96),
    "yarn": Variant(
        family="qwen2",
        theta=1e6,
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


def config_of(variant: Variant) -> dict[str, Any]:
    """The config.json of a variant."""
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[variant.family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": variant.family,
        "hidden_size": variant.hidden,
        "num_hidden_layers": variant.layers,
        "num_attention_heads": variant.heads,
        "num_key_value_heads": variant.kv_heads,
        "intermediate_size": variant.ffn,
        "vocab_size": variant.vocab,
        "max_position_embeddings": variant.positions,
        "rope_theta": variant.theta,
        "rms_norm_eps": variant.eps,
        "hidden_act": "silu",
        "tie_word_embeddings": variant.tied,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **variant.extra,
    }
    if variant.head_dim is not None:
        config["head_dim"] = variant.head_dim
    if variant.rope is not None:
        config["rope_scaling"] = variant.rope
    return config


def weights_of(variant: Variant, seed: int = 0) -> dict[str, Float32]:
    """Random weights under Hugging Face names; every value is a bf16 number."""
    rng = np.random.default_rng(seed)
    head_dim = variant.head_dim or variant.hidden // variant.heads
    q_size, kv_size = variant.heads * head_dim, variant.kv_heads * head_dim

    def random(*shape: int, scale: float, center: float = 0.0) -> Float32:
        values = (center + scale * rng.standard_normal(shape)).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    def matrix(rows: int, columns: int) -> Float32:
        return random(rows, columns, scale=1.4 / float(np.sqrt(columns)))

    weights = {"model.embed_tokens.weight": random(variant.vocab, variant.hidden, scale=0.5)}
    if not variant.tied:
        weights["lm_head.weight"] = matrix(variant.vocab, variant.hidden)
    weights["model.norm.weight"] = random(variant.hidden, scale=0.2, center=1.0)
    has_qkv_bias = variant.family == "qwen2" or variant.extra.get("attention_bias", False)
    for layer in range(variant.layers):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (q_size, variant.hidden, has_qkv_bias),
            "self_attn.k_proj": (kv_size, variant.hidden, has_qkv_bias),
            "self_attn.v_proj": (kv_size, variant.hidden, has_qkv_bias),
            "self_attn.o_proj": (
                variant.hidden,
                q_size,
                variant.extra.get("attention_bias", False),
            ),
            "mlp.gate_proj": (variant.ffn, variant.hidden, variant.extra.get("mlp_bias", False)),
            "mlp.up_proj": (variant.ffn, variant.hidden, variant.extra.get("mlp_bias", False)),
            "mlp.down_proj": (variant.hidden, variant.ffn, variant.extra.get("mlp_bias", False)),
        }
        for name, (rows, columns, has_bias) in shapes.items():
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns)
            if has_bias:
                weights[f"{prefix}{name}.bias"] = random(rows, scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = random(variant.hidden, scale=0.2, center=1.0)
    return weights


def tiny_tokenizer(vocab: int = 384) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with the special tokens first."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["the quick brown fox jumps over the lazy dog and the other dogs"] * 4
    texts += ["a model reads a prompt and writes the next token after the other tokens"] * 4
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_folder(
    path: Path, variant: str | Variant, *, dtype: str = "F32", shards: int = 1, seed: int = 0
) -> Path:
    """Write a Hugging Face folder. dtype: F32, F16 or BF16."""
    shape = VARIANTS[variant] if isinstance(variant, str) else variant
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(shape)))
    tiny_tokenizer(shape.vocab).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": SPECIAL_TOKENS[0],
                "eos_token": {"content": SPECIAL_TOKENS[2]},
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    weights = weights_of(shape, seed)
    names = sorted(weights)
    parts = [names[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    for file, part in zip(files, parts, strict=True):
        _save(path / file, {name: weights[name] for name in part}, dtype)
    if shards > 1:
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def _save(path: Path, weights: dict[str, Float32], dtype: str) -> None:
    if dtype == "BF16":  # numpy has no bf16: write the bits as the library writes any tensor
        specs = {}
        blobs = []
        offset = 0
        for name, value in weights.items():
            raw = (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            specs[name] = {
                "dtype": "BF16",
                "shape": list(value.shape),
                "data_offsets": [offset, offset + len(raw)],
            }
            offset += len(raw)
            blobs.append(raw)
        header = json.dumps(specs).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(blobs))
        return
    kind = {"F32": np.float32, "F16": np.float16}[dtype]
    safetensors.numpy.save_file({n: v.astype(kind) for n, v in weights.items()}, path)


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"


def build_gguf(
    path: Path, variant: str | Variant, *, qtype: str | dict[str, str] = "F32", seed: int = 0
) -> Path:
    """Write a GGUF file with the gguf package.

    qtype  type of the matrices, or a table from part of a GGUF name to type (others F32)
    """
    shape = VARIANTS[variant] if isinstance(variant, str) else variant
    head_dim = shape.head_dim or shape.hidden // shape.heads
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, shape.family)
    writer.add_block_count(shape.layers)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    _add_rope_scaling(writer, shape, head_dim)
    _add_tokenizer(writer, tiny_tokenizer(shape.vocab))
    for name, value in weights_of(shape, seed).items():
        permuted = value
        if shape.family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = shape.heads if "q_proj" in name else shape.kv_heads
            rows = value.reshape(heads, 2, head_dim // 2, *value.shape[1:])
            permuted = rows.swapaxes(1, 2).reshape(value.shape)
        own_name = gguf_name(name)
        if isinstance(qtype, dict):
            kind = next((t for part, t in qtype.items() if part in own_name), "F32")
        else:
            kind = qtype
        _add_tensor(writer, own_name, permuted, kind if value.ndim == 2 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_scaling(writer: gguf.GGUFWriter, shape: Variant, head_dim: int) -> None:
    """As llama.cpp's converter does it: llama3 becomes a tensor of divisors, the others keys."""
    if shape.rope is None:
        return
    kind, factor = shape.rope["rope_type"], shape.rope["factor"]
    if kind == "llama3":
        original = shape.rope["original_max_position_embeddings"]
        low, high = shape.rope["low_freq_factor"], shape.rope["high_freq_factor"]
        freqs = shape.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = original * freqs / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        divisors = 1 / ((1 - smooth) / factor + smooth)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(shape.rope["original_max_position_embeddings"])


def _add_tensor(writer: gguf.GGUFWriter, name: str, value: Float32, kind: str) -> None:
    raw_type = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(value))
    elif kind == "F16":
        writer.add_tensor(name, value.astype(np.float16))
    else:
        packed = gguf.quants.quantize(np.ascontiguousarray(value), raw_type)
        writer.add_tensor(name, packed, raw_dtype=raw_type)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: tokenizers.Tokenizer) -> None:
    content = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL_TOKENS else 1 for t in tokens])
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
