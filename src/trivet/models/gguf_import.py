"""A GGUF file as a Hugging Face folder: config, weights, tokenizer, chat template.

Float tensors keep their type and bits. Blocks become the values they stand for: float32 holds every
one of them exactly, which is the default; a narrower type is rounded to, when asked for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trivet.checkpoint import SourceTensor, resolve_model
from trivet.checkpoint.export import tokenizer_files
from trivet.checkpoint.formats.folder import ShardWriter
from trivet.checkpoint.formats.stored import Stored
from trivet.checkpoint.ggml import encode
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.files import new_folder
from trivet.models.export import hf_config
from trivet.models.family import HF_NAMES
from trivet.models.gguf_export import rope_divisors
from trivet.models.load import Model, has_bias, matrix_shapes, open_model
from trivet.models.reference import to_float
from trivet.models.spec import ModelSpec, RopeSpec
from trivet.native.weights import WeightTensor

Progress = Callable[[str, int, int], None]

FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_ENTRY_BYTES = 160  # of a safetensors header, name included


def gguf_to_folder(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    float_type: str = "F32",
) -> list[str]:
    """Write a folder that transformers loads; returns the names of its files, sorted.

    path        a GGUF file, or what `resolve_model` finds one for
    folder      must not exist; it appears whole or not at all
    progress    called with (what, tensors done, tensors in all)
    float_type  F32, F16 or BF16: type of what was quantized in the file
    Raises ConfigError: no such type; CheckpointError: not a GGUF file, the folder exists, a tensor is
    not sound or too large for the type, rope divisors that no config.json can say, the disk is full.
    """
    target = Path(folder)
    if float_type not in FLOAT_TYPES:
        raise ConfigError("float_type", float_type, ", ".join(FLOAT_TYPES))
    model = open_model(resolve_model(path))
    if model.checkpoint.kind != "gguf":
        raise CheckpointError(path, "is not a GGUF file")
    tokenizer = model.tokenizer_data()
    spec = dataclasses.replace(
        model.spec,
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
        rope=_named_rope(model),
    )
    kind = _common_type(model, float_type)
    config = hf_config(spec, model.family.architectures[0])
    config["torch_dtype"] = FLOAT_TYPES[kind]
    positions = model.checkpoint.metadata.get(f"{model.family.gguf}.context_length")
    config["max_position_embeddings"] = int(positions or spec.max_positions)
    eos_ids = list(tokenizer.eos_ids)
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos_ids}
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json(generation),
        **tokenizer_files(tokenizer, config["max_position_embeddings"]),
    }
    with new_folder(target) as temporary:
        index = _write_tensors(model, temporary, kind, float_type, progress)
        if index is not None:
            texts["model.safetensors.index.json"] = _json(index)
        for name, text in texts.items():
            (temporary / name).write_text(text, "utf-8")
    return sorted(found.name for found in target.iterdir())


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _common_type(model: Model, float_type: str) -> str:
    """The type of most of the folder: that of the first layer's matrices, if it is a float type."""
    kind = model.checkpoint.info(model.file_name("gate", 0)).dtype
    return kind if kind in FLOAT_TYPES else float_type


def _write_tensors(
    model: Model, folder: Path, kind: str, float_type: str, progress: Progress | None
) -> dict[str, Any] | None:
    roles = list(_roles(model.spec))
    with ShardWriter(folder, 64 + _ENTRY_BYTES * len(roles)) as writer:
        for done, (name, role, layer) in enumerate(roles, 1):
            writer.add(name, _stored(model, role, layer, kind, float_type))
            if progress is not None:
                progress("writing", done, len(roles))
        return writer.finish()


def _roles(spec: ModelSpec) -> Iterator[tuple[str, str, int]]:
    """(tensor name, role, layer) of everything in the folder."""
    yield HF_NAMES["embed"], "embed", 0
    for layer in range(spec.num_layers):
        for role in ("attn_norm", *matrix_shapes(spec), "mlp_norm"):
            name = HF_NAMES[role].format(i=layer)
            yield name, role, layer
            if not role.endswith("_norm") and has_bias(spec, role):
                yield name.removesuffix("weight") + "bias", f"{role}.bias", layer
    yield HF_NAMES["final_norm"], "final_norm", 0
    if not spec.tied_embeddings:
        yield HF_NAMES["head"], "head", 0


def _stored(model: Model, role: str, layer: int, kind: str, float_type: str) -> Stored:
    """A tensor as it goes into the folder. Vectors take the common type where it keeps them."""
    if role.endswith(("_norm", ".bias")):
        if role.endswith("_norm"):
            values = model.norm(role, layer)
        else:
            bias = model.bias(role.removesuffix(".bias"), layer)
            assert bias is not None, role
            values = bias
        narrow = _converted(values, kind)
        kept = narrow is not None and np.array_equal(narrow.floats().astype(np.float32), values)
        return narrow if kept and narrow is not None else Stored("F32", values)
    source: SourceTensor = model.matrix(role, layer)
    if isinstance(source, np.ndarray):
        return Stored("F16" if source.dtype == np.float16 else "F32", source)
    if isinstance(source, WeightTensor) and source.format.bits == 16:
        return Stored("BF16", source.codes)
    stored = _converted(to_float(source), float_type)
    if stored is None:
        name = model.file_name(role, layer)
        raise CheckpointError(
            model.checkpoint.path, f"a value is too large for {float_type}", tensor=name
        )
    return stored


def _converted(values: np.ndarray[Any, np.dtype[np.float32]], kind: str) -> Stored | None:
    """Values in a float type; None when one is too large for it."""
    rows = values if values.ndim == 2 else values[None]
    try:
        raw = encode(kind, rows)
    except QuantError:
        return None
    return Stored(kind, raw.view(_STORED[kind]).reshape(values.shape))


def _named_rope(model: Model) -> RopeSpec:
    """The rope as config.json can say it.

    A GGUF file holds Llama 3's scaling as divisors only. Its rule has few parameters, which are found
    by trying those of the published models and comparing all divisors.
    """
    rope, path = model.spec.rope, model.checkpoint.path
    if rope.scaling != "factors":
        return rope
    divisors = np.array(rope.freq_factors, np.float64)
    if (divisors == divisors[0]).all():
        factor = float(divisors[0])
        return RopeSpec(rope.theta) if factor == 1 else RopeSpec(rope.theta, "linear", factor)
    for original in (1 << power for power in (13, *range(4, 13), *range(14, 18))):
        tried = RopeSpec(rope.theta, "llama3", float(divisors.max()), original, 1.0, 4.0)
        found = rope_divisors(dataclasses.replace(model.spec, rope=tried))
        if np.allclose(found, divisors, rtol=1e-6, atol=0):
            return tried
    raise CheckpointError(path, "holds rope divisors of no rule that config.json has a name for")
