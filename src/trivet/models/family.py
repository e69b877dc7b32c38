"""A model family as a declaration, and how a file's settings become a `ModelSpec`.

A family file holds one `Family`: which architectures it answers to, how its tensors are called and
what it fixes or forbids. Shapes follow from the spec. Nothing here reads weights.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trivet.errors import CheckpointError
from trivet.models.spec import ModelSpec, RopeSpec

MAX_POSITIONS = 1 << 18  # rope tables are stored, so a longer context is capped here

# Role -> tensor name; {i} is the layer. Roles are the names of the packed cache before fusion.
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family apart.

    architectures   entries of config.json ``architectures``; model_types its ``model_type``
    gguf            value of ``general.architecture``
    gguf_permuted   GGUF stores rows of q and k for interleaved rotation; they are put back
    qkv_bias        True, False, or None: config.json ``attention_bias`` says (and means o too)
    refused         config.json switches that must be off
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf: str
    gguf_permuted: bool
    qkv_bias: bool | None
    refused: tuple[str, ...] = ()
    hf_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: HF_NAMES)
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: GGUF_NAMES)


class _Settings:
    """Typed access to config.json or GGUF metadata; every complaint names the key and the value."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def fail(self, key: str, allowed: str) -> CheckpointError:
        shown = repr(self.values.get(key))[:60]
        return CheckpointError(self.path, f"{key} is {shown}; expected {allowed}")

    def count(self, key: str, high: int, default: int | None = None) -> int:
        """An integer from 1 to high."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.fail(key, f"an integer from 1 to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number above 0")
        if not 0 < value <= sys.float_info.max:  # an integer may be beyond every float
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value


def spec_from_hf(family: Family, config: Mapping[str, Any], path: Path) -> ModelSpec:
    """The spec of a Hugging Face folder. path: its config.json, for messages."""
    settings = _Settings(config, path)
    for key in family.refused:
        if config.get(key):
            raise settings.fail(key, "false or absent (not supported)")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise settings.fail("hidden_act", "silu")
    hidden = settings.count("hidden_size", 1 << 17)
    heads = settings.count("num_attention_heads", 1 << 12)
    positions = settings.count("max_position_embeddings", 1 << 40)
    attention_bias = settings.flag("attention_bias", False) if family.qkv_bias is None else False
    spec = ModelSpec(
        family=family.name,
        hidden_size=hidden,
        num_layers=settings.count("num_hidden_layers", 1 << 10),
        num_heads=heads,
        num_kv_heads=settings.count("num_key_value_heads", heads, heads),
        head_dim=settings.count("head_dim", 256, max(hidden // heads, 1)),
        ffn_size=settings.count("intermediate_size", 1 << 20),
        vocab_size=settings.count("vocab_size", 1 << 22),
        max_positions=positions,
        norm_eps=settings.number("rms_norm_eps"),
        rope=_rope_from_hf(config, positions, path),
        tied_embeddings=settings.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or bool(family.qkv_bias),
        o_bias=attention_bias,
        mlp_bias=settings.flag("mlp_bias", False) if family.qkv_bias is None else False,
    )
    return _checked(spec, path)


def _rope_from_hf(config: Mapping[str, Any], positions: int, path: Path) -> RopeSpec:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(path, f"rope_scaling is {scaling!r:.60}; expected an object")
    base = _Settings({**config, **scaling}, path)
    if base.number("partial_rotary_factor", 1.0) != 1.0:
        raise base.fail("partial_rotary_factor", "1 or absent (not supported)")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = base.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeSpec(theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            path, f"rope type is {kind!r:.40}; expected default, linear, llama3 or yarn"
        )
    return _scaled_rope(kind, theta, base, positions)


def _scaled_rope(kind: str, theta: float, settings: _Settings, positions: int) -> RopeSpec:
    factor = settings.number("factor")
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    original = settings.count("original_max_position_embeddings", 1 << 40, positions)
    if kind == "llama3":
        low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
        if high <= low:
            raise settings.fail("high_freq_factor", f"a number above low_freq_factor ({low})")
        return RopeSpec(theta, kind, factor, original, low, high)
    if settings.values.get("mscale") or settings.values.get("mscale_all_dim"):
        raise settings.fail("mscale", "absent (not supported)")
    attention = settings.number("attention_factor", max(0.1 * math.log(factor) + 1.0, 1.0))
    return RopeSpec(
        theta,
        kind,
        factor,
        original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def spec_from_gguf(
    family: Family, metadata: Mapping[str, Any], tensors: Mapping[str, Any], path: Path
) -> ModelSpec:
    """The spec of a GGUF file. ``rope_freqs.weight``, when there, is filled in by the caller."""
    prefix = family.gguf + "."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    settings = _Settings(own, path)
    for key in ("expert_count", "attention.sliding_window"):
        if own.get(key):
            raise settings.fail(key, "0 or absent (not supported)")
    hidden = settings.count("embedding_length", 1 << 17)
    heads = settings.count("attention.head_count", 1 << 12)
    head_dim = settings.count("attention.key_length", 256, max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.count(key, 1 << 16, head_dim) != head_dim:
            raise settings.fail(key, f"{head_dim}, the size of a head")
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) and tokens else None
    positions = settings.count("context_length", 1 << 40)
    names = {role: name.format(i=0) for role, name in family.gguf_names.items()}

    def has_bias(role: str) -> bool:
        return names[role].removesuffix("weight") + "bias" in tensors

    spec = ModelSpec(
        family=family.name,
        hidden_size=hidden,
        num_layers=settings.count("block_count", 1 << 10),
        num_heads=heads,
        num_kv_heads=settings.count("attention.head_count_kv", heads, heads),
        head_dim=head_dim,
        ffn_size=settings.count("feed_forward_length", 1 << 20),
        vocab_size=settings.count("vocab_size", 1 << 22, num_tokens),
        max_positions=positions,
        norm_eps=settings.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(settings, positions),
        tied_embeddings=names["head"] not in tensors,
        qkv_bias=bool(family.qkv_bias) or has_bias("q"),
        o_bias=has_bias("o"),
        mlp_bias=has_bias("gate"),
    )
    return _checked(spec, path)


def _rope_from_gguf(settings: _Settings, positions: int) -> RopeSpec:
    theta = settings.number("rope.freq_base", 10000.0)
    kind = settings.values.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeSpec(theta)
    if kind not in ("linear", "yarn"):
        raise settings.fail("rope.scaling.type", "none, linear or yarn")
    scaling = {
        key.removeprefix("rope.scaling."): value
        for key, value in settings.values.items()
        if key.startswith("rope.scaling.")
    }
    scaling["original_max_position_embeddings"] = scaling.get("original_context_length")
    for name in ("beta_fast", "beta_slow"):
        scaling[name] = scaling.get("yarn_" + name)
    renamed = _Settings(scaling, settings.path)
    if "attn_factor" in scaling:  # llama.cpp multiplies it into yarn's own
        own = max(0.1 * math.log(renamed.number("factor")) + 1.0, 1.0)
        scaling["attention_factor"] = renamed.number("attn_factor") * own
    return _scaled_rope(kind, theta, renamed, positions)


def _checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """Refuse sizes that do not fit together; cap the context at what rope tables are stored for."""
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            path, f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly"
        )
    if spec.head_dim % 2 or spec.head_dim > 256:
        raise CheckpointError(path, f"head size {spec.head_dim} is odd or above 256")
    if not np.isfinite(np.float32(spec.norm_eps)):
        raise CheckpointError(path, f"norm epsilon {spec.norm_eps} is not a float32 number")
    return dataclasses.replace(spec, max_positions=min(spec.max_positions, MAX_POSITIONS))
