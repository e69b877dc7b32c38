#!/usr/bin/env python3
"""Reference B: the demo model rescaled so that no group of its weights lies on a 4-bit grid.

The demo's weights were rounded to Q4_1, so packing them on that grid costs nothing and proves
nothing. This script multiplies per-channel factors (log-uniform in 0.8..1.25) into matching pairs of
tensors, which leaves the function as it is:

    norm gains             x f    columns of q, k, v (gate, up)    / f
    rows of v, per head    x f    columns of o                     / f
    rows of up             x f    columns of down                  / f

and writes a float32 Hugging Face folder. Factors are multiples of 2^-12, and everything else is one
float32 product or quotient, so the bytes are the same on every machine.

    benchmarks/make_reference.py --seed 0 -o DIR [--model demo]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import resolve_model
from trivet.errors import TrivetError
from trivet.models import Model, ModelSpec, open_model
from trivet.models.export import write_float_folder
from trivet.models.reference import float_logits

Float32 = NDArray[np.float32]
LOW, HIGH = 0.8, 1.25
MAX_DIFFERENCE = 1e-4  # of logits, relative to the largest
HASH_FILE = Path(__file__).with_name("reference_b.sha256")


@dataclasses.dataclass(frozen=True)
class Factors:
    """One layer's factors: of the attention norm, the MLP norm, the rows of v and of up."""

    attn_norm: Float32
    mlp_norm: Float32
    v: Float32
    up: Float32


def draw_factors(spec: ModelSpec, seed: int) -> list[Factors]:
    """Factors of all layers, from one stream in layer order."""
    rng = np.random.Generator(np.random.PCG64(seed))

    def draw(count: int) -> Float32:
        exponents = rng.random(count)
        factors = LOW * (HIGH / LOW) ** exponents
        return (np.rint(factors * 4096) / 4096).astype(np.float32)

    return [
        Factors(
            draw(spec.hidden_size), draw(spec.hidden_size), draw(spec.kv_size), draw(spec.ffn_size)
        )
        for _ in range(spec.num_layers)
    ]


def rescale(spec: ModelSpec, seed: int) -> Callable[[str, int, Float32], Float32]:
    """The change to every tensor, for `write_float_folder`."""
    all_factors = draw_factors(spec, seed)
    shared = spec.num_heads // spec.num_kv_heads

    def change(role: str, layer: int, values: Float32) -> Float32:
        factors = all_factors[layer]
        per_head = factors.v.reshape(spec.num_kv_heads, spec.head_dim)
        o_columns = np.repeat(per_head, shared, axis=0).reshape(-1)
        if role == "attn_norm":
            return values * factors.attn_norm
        if role == "mlp_norm":
            return values * factors.mlp_norm
        if role in ("q", "k"):
            return values / factors.attn_norm
        if role == "v":
            return values / factors.attn_norm * factors.v[:, None]
        if role == "v.bias":
            return values * factors.v
        if role == "o":
            return values / o_columns
        if role == "gate":
            return values / factors.mlp_norm
        if role == "up":
            return values / factors.mlp_norm * factors.up[:, None]
        if role == "up.bias":
            return values * factors.up
        return values / factors.up if role == "down" else values

    return change


def difference(before: Model, after: Model) -> float:
    """Largest difference of logits on a fixed text of ids, over the largest logit."""
    rng = np.random.Generator(np.random.PCG64(1))
    tokens = rng.integers(0, before.spec.vocab_size, 48).tolist()
    want, got = float_logits(before, tokens), float_logits(after, tokens)
    return float(np.abs(got - want).max() / np.abs(want).max())


def main() -> int:
    """Write the folder, check it, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        before = open_model(resolve_model(options.model))
        write_float_folder(before, options.output, rescale(before.spec, options.seed))
        after = open_model(resolve_model(options.output))
        error = difference(before, after)
    except TrivetError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    weights = options.output / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    is_known = options.model == "demo" and options.seed == 0
    committed = HASH_FILE.read_text().split()[0] if HASH_FILE.exists() else None
    matches = digest == committed if is_known and committed is not None else None
    result = {
        "path": str(options.output),
        "sha256": digest,
        "matches_committed": matches,
        "max_logit_difference": error,
        "bytes": weights.stat().st_size,
    }
    print(json.dumps(result))
    return 0 if error <= MAX_DIFFERENCE and matches is not False else 1


if __name__ == "__main__":
    sys.exit(main())
