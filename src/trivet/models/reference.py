"""The network in float32 numpy, straight from a checkpoint: what a model computes before any format.

For tests and for checking that a rewritten model is the same function. No cache, no quantized
activations; the numerics contract is defined elsewhere (`trivet.native.reference`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import SourceTensor
from trivet.checkpoint.source import FloatMatrix
from trivet.models.load import Model
from trivet.models.spec import rope_tables
from trivet.native.weights import WeightTensor, dequantize

Float32 = NDArray[np.float32]


def to_float(source: SourceTensor) -> Float32:
    """A tensor's values in float32."""
    if isinstance(source, WeightTensor):
        return dequantize(source)
    if isinstance(source, FloatMatrix):
        return source.values
    return source.astype(np.float32)


def _normed(x: Float32, gains: Float32, eps: float) -> Float32:
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    result: Float32 = x / np.sqrt(mean_square + np.float32(eps)) * gains
    return result


def _rotated(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate halves; x [T, heads, D], cos and sin [T, D / 2]."""
    low, high = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def float_logits(model: Model, tokens: Sequence[int]) -> Float32:
    """Logits of one text, float32 [len(tokens), vocab_size].

    tokens  ids from position 0; at most the model's context
    """
    spec = model.spec
    length = len(tokens)
    assert 0 < length <= spec.max_positions, length
    table = to_float(model.matrix("embed"))
    cos, sin = (t[:length] for t in rope_tables(spec))
    causal = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    x = table[np.asarray(tokens)]
    for layer in range(spec.num_layers):
        h = _normed(x, model.norm("attn_norm", layer), spec.norm_eps)
        q = _rotated(_heads(model, "q", layer, h), cos, sin)
        k = _rotated(_heads(model, "k", layer, h), cos, sin)
        v = _heads(model, "v", layer, h)
        shared = spec.num_heads // spec.num_kv_heads
        k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(spec.head_dim)) + causal
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(length, spec.q_size)
        x = x + _linear(model, "o", layer, mixed)
        h = _normed(x, model.norm("mlp_norm", layer), spec.norm_eps)
        gate, up = _linear(model, "gate", layer, h), _linear(model, "up", layer, h)
        x = x + _linear(model, "down", layer, gate / (1 + np.exp(-gate)) * up)
    h = _normed(x, model.norm("final_norm"), spec.norm_eps)
    head = table if spec.tied_embeddings else to_float(model.matrix("head"))
    logits: Float32 = h @ head.T
    return logits


def _linear(model: Model, role: str, layer: int, x: Float32) -> Float32:
    y: Float32 = x @ to_float(model.matrix(role, layer)).T
    bias = model.bias(role, layer)
    return y if bias is None else y + bias


def _heads(model: Model, role: str, layer: int, x: Float32) -> Float32:
    return _linear(model, role, layer, x).reshape(len(x), -1, model.spec.head_dim)
