"""An opened model: its spec, and its tensors by role, as the rest of the project thinks of them.

This is where a family's declaration meets a file: names are translated, every shape is checked
against the spec before a weight is read, and the row order of GGUF Llama files is put back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import Checkpoint, ModelSource, SourceTensor, open_checkpoint
from trivet.checkpoint.source import FloatMatrix
from trivet.checkpoint.tokenizer import TokenizerData
from trivet.errors import CheckpointError
from trivet.models.family import GGUF_ROPE_FACTORS, Family, spec_from_gguf, spec_from_hf
from trivet.models.llama import LLAMA
from trivet.models.qwen2 import QWEN2
from trivet.models.spec import ModelSpec, RopeSpec
from trivet.native.weights import WeightTensor

Float32 = NDArray[np.float32]
FAMILIES = (LLAMA, QWEN2)
_READABLE_MATRICES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Role -> (rows, columns) of the matrices of one layer."""
    return {
        "q": (spec.q_size, spec.hidden_size),
        "k": (spec.kv_size, spec.hidden_size),
        "v": (spec.kv_size, spec.hidden_size),
        "o": (spec.hidden_size, spec.q_size),
        "gate": (spec.ffn_size, spec.hidden_size),
        "up": (spec.ffn_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.ffn_size),
    }


def has_bias(spec: ModelSpec, role: str) -> bool:
    """Whether the matrix of a role carries a bias."""
    if role in ("q", "k", "v"):
        return spec.qkv_bias
    return spec.o_bias if role == "o" else spec.mlp_bias


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint read through its family."""

    spec: ModelSpec
    family: Family
    checkpoint: Checkpoint

    def file_name(self, role: str, layer: int = 0) -> str:
        """The file's own name of a role's tensor."""
        gguf = self.checkpoint.kind == "gguf"
        names = self.family.gguf_names if gguf else self.family.hf_names
        return names[role].format(i=layer)

    def matrix(self, role: str, layer: int = 0) -> SourceTensor:
        """The matrix of a role as stored, rows in Hugging Face order."""
        shape = self._shape(role)
        value = self.checkpoint.read_matrix(self.file_name(role, layer), *shape)
        order = self._row_order(role)
        return value if order is None else take_rows(value, order)

    def bias(self, role: str, layer: int) -> Float32 | None:
        """The bias of a role, float32 [rows], or None when the spec has none there."""
        if not has_bias(self.spec, role):
            return None
        name = self.file_name(role, layer).removesuffix("weight") + "bias"
        value = self.checkpoint.read_vector(name, self._shape(role)[0])
        order = self._row_order(role)
        return value if order is None else value[order]

    def norm(self, role: str, layer: int = 0) -> Float32:
        """The gains of a norm, float32 [hidden_size]."""
        return self.checkpoint.read_vector(self.file_name(role, layer), self.spec.hidden_size)

    def tokenizer_data(self) -> TokenizerData:
        """The model's tokenizer; its ids of begin and end are also in the spec."""
        return self.checkpoint.tokenizer_data()

    def check(self) -> None:
        """Raise CheckpointError unless every tensor is there with the right shape and a known type."""
        for name, shape in self._expected():
            info = self.checkpoint.info(name)
            if info.shape != shape:
                raise CheckpointError(
                    info.path,
                    f"has shape {list(info.shape)}, but the config asks for {list(shape)}",
                    tensor=name,
                )
            if info.dtype not in (*_READABLE_MATRICES, *self.checkpoint.quantized_types):
                raise CheckpointError(
                    info.path,
                    f"has the type {info.dtype}, which is not supported;"
                    f" supported: {', '.join(_READABLE_MATRICES)}",
                    tensor=name,
                )
        beyond = self.file_name("attn_norm", self.spec.num_layers)
        if beyond in self.checkpoint.tensors:
            raise CheckpointError(
                self.checkpoint.path,
                f"is there, but the config asks for {self.spec.num_layers} layers",
                tensor=beyond,
            )

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        spec = self.spec
        yield self.file_name("embed"), self._shape("embed")
        if not spec.tied_embeddings:
            yield self.file_name("head"), self._shape("head")
        yield self.file_name("final_norm"), (spec.hidden_size,)
        for layer in range(spec.num_layers):
            for role in ("attn_norm", "mlp_norm"):
                yield self.file_name(role, layer), (spec.hidden_size,)
            for role, shape in matrix_shapes(spec).items():
                name = self.file_name(role, layer)
                yield name, shape
                if has_bias(spec, role):
                    yield name.removesuffix("weight") + "bias", shape[:1]

    def _shape(self, role: str) -> tuple[int, int]:
        if role in ("embed", "head"):
            return self.spec.vocab_size, self.spec.hidden_size
        return matrix_shapes(self.spec)[role]

    def _row_order(self, role: str) -> NDArray[np.intp] | None:
        if role not in ("q", "k") or self.checkpoint.kind != "gguf":
            return None
        if not self.family.gguf_permuted:
            return None
        half = self.spec.head_dim // 2
        heads = self.spec.num_heads if role == "q" else self.spec.num_kv_heads
        stored = np.arange(heads * half * 2).reshape(heads, half, 2)
        return stored.swapaxes(1, 2).reshape(-1)


def take_rows(value: SourceTensor, order: NDArray[np.intp]) -> SourceTensor:
    """The rows ``order`` of a matrix, codes and scales alike; nothing is rounded."""
    if isinstance(value, FloatMatrix):
        return dataclasses.replace(value, values=value.values[order])
    if not isinstance(value, WeightTensor):
        taken: NDArray[Any] = value[order]
        return taken

    def rows(part: NDArray[Any] | None) -> Any:
        return None if part is None else part[order]

    return dataclasses.replace(
        value,
        codes=rows(value.codes),
        scales=rows(value.scales),
        minima=rows(value.minima),
        zeros=rows(value.zeros),
    )


def open_model(source: ModelSource) -> Model:
    """Open a model, derive its spec and check that every tensor is there with its shape.

    Raises CheckpointError: unknown architecture, settings or tensors that do not fit.
    """
    checkpoint = open_checkpoint(source)
    metadata = checkpoint.metadata
    if checkpoint.kind == "gguf":
        family = _gguf_family(checkpoint)
        spec = spec_from_gguf(family, metadata, checkpoint.tensors, source.path)
        if GGUF_ROPE_FACTORS in checkpoint.tensors:
            spec = dataclasses.replace(spec, rope=_rope_factors(checkpoint, spec))
    else:
        family = _hf_family(metadata, source)
        spec = spec_from_hf(family, metadata, source.path / "config.json")
    model = Model(spec, family, checkpoint)
    model.check()
    return model


def _rope_factors(checkpoint: Checkpoint, spec: ModelSpec) -> RopeSpec:
    factors = checkpoint.read_vector(GGUF_ROPE_FACTORS, spec.head_dim // 2)
    if not (factors > 0).all():
        raise CheckpointError(checkpoint.path, "holds a factor <= 0", tensor=GGUF_ROPE_FACTORS)
    return RopeSpec(spec.rope.theta, "factors", freq_factors=tuple(factors.tolist()))


def _known(names: Mapping[str, Family]) -> str:
    return ", ".join(sorted(names))


def _gguf_family(checkpoint: Checkpoint) -> Family:
    known = {f.gguf: f for f in FAMILIES}
    name = checkpoint.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(
            checkpoint.path, f"architecture {name!r:.40} is not known; known: {_known(known)}"
        )
    return known[name]


def _hf_family(config: Mapping[str, Any], source: ModelSource) -> Family:
    known = {name: f for f in FAMILIES for name in f.architectures}
    types = {name: f for f in FAMILIES for name in f.model_types}
    names = config.get("architectures")
    if isinstance(names, list) and names:
        for name in names:
            if isinstance(name, str) and name in known:
                return known[name]
        shown: object = names[0]
    else:
        shown = config.get("model_type")
        if isinstance(shown, str) and shown in types:
            return types[shown]
    raise CheckpointError(
        source.path / "config.json",
        f"architecture {shown!r:.40} is not known; known: {_known(known)}",
    )
