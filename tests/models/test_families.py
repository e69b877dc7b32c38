"""Random tiny models of each family compute what transformers computes, in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from support.tiny_models import VARIANTS, build_folder, build_gguf, weights_of
from trivet.checkpoint import resolve_model
from trivet.models import open_model, rope_tables
from trivet.models.reference import float_logits, to_float

TOKENS = [0, 17, 300, 45, 45, 2, 381, 9, 120, 77, 250, 33, 8, 199, 64, 5]


def _transformers_logits(folder: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    return np.asarray(logits, np.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / variant, variant)
    ours = float_logits(open_model(resolve_model(folder)), TOKENS)
    theirs = _transformers_logits(folder)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ["llama3", "smollm2", "qwen2", "qwen25", "biases"])
def test_gguf_and_folder_are_the_same_model(variant: str, tmp_path: Path) -> None:
    folder = open_model(resolve_model(build_folder(tmp_path / "hf", variant)))
    file = open_model(resolve_model(build_gguf(tmp_path / "model.gguf", variant)))
    assert file.spec.tied_embeddings == folder.spec.tied_embeddings
    np.testing.assert_array_equal(float_logits(file, TOKENS), float_logits(folder, TOKENS))


@pytest.mark.parametrize("variant", ["llama31", "llama32", "linear", "yarn"])
def test_gguf_rope_scaling_equals_that_of_the_folder(variant: str, tmp_path: Path) -> None:
    folder = open_model(resolve_model(build_folder(tmp_path / "hf", variant)))
    file = open_model(resolve_model(build_gguf(tmp_path / "model.gguf", variant)))
    for ours, want in zip(rope_tables(file.spec), rope_tables(folder.spec), strict=True):
        np.testing.assert_allclose(ours, want, rtol=0, atol=3e-6)
    plain = build_gguf(tmp_path / "plain.gguf", dataclasses.replace(VARIANTS[variant], rope=None))
    unscaled = rope_tables(open_model(resolve_model(plain)).spec)[0]
    assert np.abs(unscaled - rope_tables(file.spec)[0]).max() > 0.1


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_folder_types_and_shards_hold_the_weights(dtype: str, shards: int, tmp_path: Path) -> None:
    folder = build_folder(tmp_path, "qwen2", dtype=dtype, shards=shards)
    model = open_model(resolve_model(folder))
    weights = weights_of(VARIANTS["qwen2"])
    want = weights["model.layers.1.mlp.up_proj.weight"]
    if dtype == "F16":
        want = want.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(to_float(model.matrix("up", 1)), want)
    bias = model.bias("q", 0)
    assert bias is not None
    assert bias.shape == (model.spec.q_size,)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16"])
def test_gguf_row_order_is_put_back_on_codes(qtype: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = open_model(resolve_model(build_gguf(tmp_path / "m.gguf", "smollm2", qtype=qtype)))
    value = weights_of(VARIANTS["smollm2"])["model.layers.2.self_attn.q_proj.weight"]
    kind = gguf.GGMLQuantizationType[qtype]
    # Rows are quantized one by one, so quantizing before and after the permutation is the same.
    want = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    np.testing.assert_array_equal(to_float(model.matrix("q", 2)), want)
