"""Factors moved from a linear's input into the layer before it; the function stays as it is.

    attn_in   gains of the attention norm / s      columns of q, k, v * s
    o_in      rows of v / s                        columns of o * s
    ffn_in    gains of the MLP norm / s            columns of gate, up * s
    down_in   rows of up / s                       columns of down * s

With grouped queries several heads of o read one head of v: they share its factors.
"""

from __future__ import annotations

import numpy as np

from trivet.models import ModelSpec
from trivet.quant.grid import Float32
from trivet.quant.observe import POINTS, LayerWeights


def free_width(spec: ModelSpec, point: str) -> int:
    """How many factors a point has: its width, and at o the rows of v."""
    return {
        "attn_in": spec.hidden_size,
        "o_in": spec.kv_size,
        "ffn_in": spec.hidden_size,
        "down_in": spec.ffn_size,
    }[point]


def shared(values: Float32, spec: ModelSpec, point: str, *, largest: bool = False) -> Float32:
    """Per-column figures [K] of a point brought to its free width: means (or maxima) over sharers."""
    if point != "o_in":
        return values
    group = spec.num_heads // spec.num_kv_heads
    by_head = values.reshape(spec.num_kv_heads, group, spec.head_dim)
    joined = by_head.max(axis=1) if largest else by_head.mean(axis=1)
    result: Float32 = joined.reshape(-1)
    return result


def spread(factors: Float32, spec: ModelSpec, point: str) -> Float32:
    """Factors [free width] as one per column [K]."""
    if point != "o_in":
        return factors
    group = spec.num_heads // spec.num_kv_heads
    by_head = factors.reshape(spec.num_kv_heads, 1, spec.head_dim)
    return np.repeat(by_head, group, axis=1).reshape(-1)


def fold(weights: LayerWeights, spec: ModelSpec, point: str, factors: Float32) -> None:
    """Multiply the columns that read a point by factors [free width] and divide what makes it."""
    columns = spread(factors, spec, point)
    for role in POINTS[point]:
        weights.matrices[role] = weights.matrices[role] * columns
    if point == "attn_in":
        weights.attn_norm = weights.attn_norm / factors
    elif point == "ffn_in":
        weights.mlp_norm = weights.mlp_norm / factors
    else:
        role = "v" if point == "o_in" else "up"
        weights.matrices[role] = weights.matrices[role] / factors[:, None]
        if role in weights.biases:
            weights.biases[role] = weights.biases[role] / factors
