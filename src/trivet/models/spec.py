"""What a model is, in numbers: the one description every later part works from.

A `ModelSpec` says nothing about files, tensors' names or quantization. It is stored in the packed
cache as JSON and is what the native core compiles to its list of operations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base ``theta`` and how the frequencies are scaled.

    scaling         ``default``, ``linear``, ``llama3``, ``yarn`` or ``factors``
    factor          linear, llama3, yarn: how much longer the context becomes
    original_positions, low_freq_factor, high_freq_factor   llama3; yarn uses original_positions
    beta_fast, beta_slow, attention_factor                  yarn
    freq_factors    ``factors``: one divisor per frequency (a GGUF file's ``rope_freqs.weight``)
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama shape: RMSNorm, rotary grouped-query attention, gated SiLU MLP.

    num_heads * head_dim need not equal hidden_size. ``eos_ids`` end a request; ``bos_id`` is put
    first when the tokenizer says so. Biases: ``qkv_bias`` on q, k and v, ``o_bias`` on the attention
    output, ``mlp_bias`` on gate, up and down. ``max_positions`` is the longest context.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Rows of q: all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k, and of v: all KV heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms, an embedding shared with the head counted once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + tables + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Rebuild a spec from `to_json`. Raises TypeError on unknown or missing keys."""
        fields = dict(data)
        rope = dict(fields.pop("rope"))
        rope["freq_factors"] = tuple(rope["freq_factors"])
        fields["eos_ids"] = tuple(fields["eos_ids"])
        return cls(rope=RopeSpec(**rope), **fields)


def rope_frequencies(rope: RopeSpec, head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Angular frequencies, float64 [head_dim / 2], and the factor on cos and sin.

    Source: transformers ``modeling_rope_utils`` (linear, llama3, yarn). Differs: float64 throughout.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    freqs = rope.theta**-exponents
    if rope.scaling == "linear":
        return freqs / rope.factor, 1.0
    if rope.scaling == "factors":
        return freqs / np.asarray(rope.freq_factors, np.float64), 1.0
    if rope.scaling == "llama3":
        wavelength = 2 * np.pi / freqs
        low = rope.original_positions / rope.low_freq_factor
        high = rope.original_positions / rope.high_freq_factor
        smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
        scaled = np.where(wavelength > low, freqs / rope.factor, freqs)
        return np.where((wavelength <= low) & (wavelength >= high), blended, scaled), 1.0
    if rope.scaling == "yarn":

        def correction(rotations: float) -> float:
            turns = rope.original_positions / (rotations * 2 * np.pi)
            return float(head_dim * np.log(turns) / (2 * np.log(rope.theta)))

        low_dim = max(np.floor(correction(rope.beta_fast)), 0.0)
        high_dim = min(np.ceil(correction(rope.beta_slow)), head_dim - 1.0)
        if low_dim == high_dim:
            high_dim += 0.001
        ramp = np.clip((np.arange(head_dim // 2) - low_dim) / (high_dim - low_dim), 0, 1)
        return freqs / rope.factor * ramp + freqs * (1 - ramp), rope.attention_factor
    assert rope.scaling == "default", rope.scaling
    return freqs, 1.0


def rope_tables(spec: ModelSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Tables cos and sin, float32 [max_positions, head_dim / 2], computed in float64."""
    freqs, factor = rope_frequencies(spec.rope, spec.head_dim)
    cos = np.empty((spec.max_positions, spec.head_dim // 2), np.float32)
    sin = np.empty_like(cos)
    for begin in range(0, spec.max_positions, 4096):
        positions = np.arange(begin, min(begin + 4096, spec.max_positions), dtype=np.float64)
        angles = positions[:, None] * freqs[None, :]
        cos[begin : begin + 4096] = np.cos(angles) * factor
        sin[begin : begin + 4096] = np.sin(angles) * factor
    return cos, sin
