#!/usr/bin/env python3
"""A Llama of 1.1B random weights: a model that fits no cache, for measurements of speed alone.

22 layers, hidden 2048, FFN 5632, 32 heads, 4 KV heads, vocabulary 32000, untied head; bf16 safetensors
in Hugging Face layout, written one tensor at a time. Weights are normal with deviation 1/sqrt(inputs),
o and down by 1/sqrt(2 x layers) smaller, so that activations keep their size through the network. The
tokenizer is the demo model's, cut to its first 32000 tokens. Each tensor has its own random stream, so
the bytes depend on the seed alone.

    benchmarks/make_shape.py --seed 0 -o DIR [--layers 22]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import resolve_model
from trivet.errors import TrivetError
from trivet.files import new_folder
from trivet.models import open_model

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 4, 32000
LOGIT_DEVIATION = 3.0


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape, in file order."""
    kv = HIDDEN // HEADS * KV_HEADS
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        result |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return result | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def draw(
    name: str, shape: tuple[int, ...], layers: int, seed: int, index: int
) -> NDArray[np.uint16]:
    """One tensor as bf16 codes."""
    rng = np.random.Generator(np.random.PCG64([seed, index]))
    values = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        values = np.float32(1.0) + np.float32(0.1) * values
    elif name == "model.embed_tokens.weight":
        pass
    else:
        deviation = shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= (2 * layers) ** 0.5
        if name == "lm_head.weight":
            deviation *= LOGIT_DEVIATION
        values *= np.float32(deviation)
    bits = values.view(np.uint32)
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def cut_tokenizer(text: str) -> str:
    """tokenizer.json with the first VOCAB tokens and the merges among them."""
    data = json.loads(text)
    model = data["model"]
    vocab = {token: i for token, i in model["vocab"].items() if i < VOCAB}
    model["vocab"] = vocab

    def parts(merge: Any) -> list[str]:
        return merge.split(" ") if isinstance(merge, str) else merge

    model["merges"] = [
        m for m in model["merges"] if set(parts(m)) <= vocab.keys() and "".join(parts(m)) in vocab
    ]
    data["added_tokens"] = [t for t in data["added_tokens"] if t["id"] < VOCAB]
    return json.dumps(data, ensure_ascii=False)


def config(layers: int) -> dict[str, Any]:
    """The folder's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_weights(path: Path, layers: int, seed: int) -> str:
    """Write the safetensors file; returns its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes(layers).items():
        size = 2 * int(np.prod(shape))
        offsets = [offset, offset + size]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        offset += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(raw).to_bytes(8, "little"), raw):
            file.write(part)
            digest.update(part)
        for index, (name, shape) in enumerate(shapes(layers).items()):
            data = draw(name, shape, layers, seed, index).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def write_model(path: Path, *, seed: int, layers: int = 22) -> dict[str, Any]:
    """Write the folder, whole or not at all.

    Returns path, sha256 of the weights, bytes. Raises TrivetError without the demo model (for its
    tokenizer), or when the folder exists.
    """
    source = open_model(resolve_model("demo")).tokenizer_data()
    files = {
        "config.json": json.dumps(config(layers), indent=2),
        "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": 2}),
        "tokenizer.json": cut_tokenizer(source.json),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 8192,
                "clean_up_tokenization_spaces": False,
                **source.special_tokens,
            },
            indent=2,
        ),
    }
    with new_folder(path) as temporary:
        digest = write_weights(temporary / "model.safetensors", layers, seed)
        for name, text in files.items():
            (temporary / name).write_text(text + "\n", encoding="utf-8")
    num_bytes = (path / "model.safetensors").stat().st_size
    return {"path": str(path), "sha256": digest, "bytes": num_bytes}


def main() -> int:
    """Write the folder, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        result = write_model(options.output, seed=options.seed, layers=options.layers)
    except TrivetError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
