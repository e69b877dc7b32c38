"""SmoothQuant: part of the range of activations moves into the weights, so that both fit int8.

s = max|x|^a / max|w|^(1-a) per column, folded into the norms before q, k, v and gate, up. Weights
become int8 with one scale per row; activations are scaled per row as they come, not by stored scales.

Source: arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trivet.models import ModelSpec
from trivet.quant.grid import Float32
from trivet.quant.methods.folds import shared
from trivet.quant.observe import InputStats

ALPHA = 0.8  # what Llama-like models want; the paper's default is 0.5
POINTS = ("attn_in", "ffn_in")
_FLOOR = 1e-5
_SPREAD = 1024.0


def smoothing_factors(
    weights: Mapping[str, Float32],
    stats: InputStats,
    spec: ModelSpec,
    point: str,
    alpha: float = ALPHA,
) -> Float32:
    """Factors float32 [free width]: columns of the weights are to be multiplied by them."""
    x = np.maximum(shared(stats.absmax, spec, point, largest=True), _FLOOR)
    most = np.max([np.abs(weight).max(axis=0) for weight in weights.values()], axis=0)
    w = np.maximum(shared(most, spec, point, largest=True), _FLOOR)
    factors = x**alpha / w ** (1 - alpha)
    factors = factors / np.sqrt(factors.max() * factors.min())
    limited: Float32 = factors.clip(1 / _SPREAD, _SPREAD).astype(np.float32)
    return limited
