"""A model as a Hugging Face folder in float32: the way from GGUF to other tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.export import write_folder
from trivet.models.family import HF_NAMES
from trivet.models.load import Model, has_bias, matrix_shapes
from trivet.models.reference import to_float
from trivet.models.spec import ModelSpec, RopeSpec

Float32 = NDArray[np.float32]
TensorMap = Callable[[str, int, Float32], Float32]  # (role, layer, values) -> values


def hf_config(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """The config.json that reads back as this spec."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": spec.family,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.eos_ids),
    }
    if spec.o_bias:
        config["attention_bias"] = True
    if spec.mlp_bias:
        config["mlp_bias"] = True
    if spec.rope.scaling != "default":
        config["rope_scaling"] = _rope_scaling(spec.rope)
    return config


def _rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    assert rope.scaling != "factors", "frequency factors have no form in config.json"
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.scaling == "yarn":
        scaling |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
        }
    return scaling


def write_float_folder(model: Model, path: Path, change: TensorMap | None = None) -> None:
    """Write the model in float32 under Hugging Face names.

    change  applied to every tensor (biases have the role ``<role>.bias``)
    Raises CheckpointError: the folder exists, a tensor cannot be read, or the disk is full.
    """
    tokenizer = model.tokenizer_data()
    spec = dataclasses.replace(model.spec, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids)
    config = hf_config(spec, model.family.architectures[0])
    shapes = {_hf_name(role, layer): shape for role, layer, shape in _roles(spec)}

    def tensors() -> Iterator[tuple[str, Float32]]:
        for role, layer, _ in _roles(spec):
            values = _read(model, role, layer)
            yield _hf_name(role, layer), values if change is None else change(role, layer, values)

    write_folder(path, config, shapes, tensors(), tokenizer)


def _roles(spec: ModelSpec) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    table = (spec.vocab_size, spec.hidden_size)
    yield "embed", 0, table
    for layer in range(spec.num_layers):
        yield "attn_norm", layer, (spec.hidden_size,)
        yield "mlp_norm", layer, (spec.hidden_size,)
        for role, shape in matrix_shapes(spec).items():
            yield role, layer, shape
            if has_bias(spec, role):
                yield f"{role}.bias", layer, shape[:1]
    yield "final_norm", 0, (spec.hidden_size,)
    if not spec.tied_embeddings:
        yield "head", 0, table


def _hf_name(role: str, layer: int) -> str:
    name = HF_NAMES[role.removesuffix(".bias")].format(i=layer)
    return name.removesuffix("weight") + "bias" if role.endswith(".bias") else name


def _read(model: Model, role: str, layer: int) -> Float32:
    if role.endswith("_norm"):
        return model.norm(role, layer)
    if role.endswith(".bias"):
        bias = model.bias(role.removesuffix(".bias"), layer)
        assert bias is not None, role
        return bias
    return to_float(model.matrix(role, layer))
