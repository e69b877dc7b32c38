"""The engine runs every GGUF type exactly; what is fused of several types meets in 8 bits, named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.checkpoint.ggml.imatrix import ImportanceMatrix
from trivet.errors import ConfigError
from trivet.models import open_model
from trivet.models.gguf_export import write_gguf
from trivet.quant.imatrix import collect_imatrix
from trivet.quant.load import PackedModel, load_packed

WIDE = Variant(hidden=256, heads=4, kv_heads=2, ffn=256, layers=2)
FORMS = {
    "Q5_0": "w8a8-g32",
    "Q5_1": "w8a8-g32-min",
    "Q2_K": "w4a8-g16-min",
    "Q3_K": "w4a8-g16",
    "Q4_K": "w4a8-g32-min",
    "Q5_K": "w8a8-g32-min",
    "Q6_K": "w8a8-g16",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", FORMS)
def test_every_type_is_packed_exactly(kind: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", WIDE)
    write_gguf(tmp_path / "m.gguf", folder, f"pure:{kind}")
    packed = load_packed(tmp_path / "m.gguf")
    layers = [report for report in packed.report if report.name.startswith("layers.")]
    assert len(layers) == 8
    for report in layers:
        assert report.source == kind
        assert report.form == FORMS[kind]
        assert report.exact
        assert report.rel_error == 0
        assert not report.note
    assert not packed.notes


def test_a_mix_fuses_what_differs_into_8_bits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build_folder(tmp_path / "hf", WIDE), "Q4_K_M")
    packed = load_packed(tmp_path / "m.gguf")
    found = {report.name: report for report in packed.report}
    assert found["layers.0.o"].form == "w4a8-g32-min"
    assert found["layers.0.o"].exact
    assert found["layers.1.qkv"].source == "Q4_K+Q6_K"
    assert found["layers.1.qkv"].form == "w8a8-g32"
    assert found["layers.1.qkv"].rel_error < 0.01


def _packed(tmp_path: Path) -> PackedModel:
    return load_packed(build_folder(tmp_path / "hf", "smollm2"), "bf16")


def test_importance_is_the_mean_square_of_the_inputs(tmp_path: Path) -> None:
    packed = _packed(tmp_path)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 300, count).tolist() for count in (40, 33, 7)]
    matrix = collect_imatrix(packed, texts, datasets=["random"], threads=2)
    assert matrix.chunk_count == 3
    assert len(matrix.entries) == 7 * packed.spec.num_layers
    model = open_model(resolve_model(tmp_path / "hf"))
    # The input of the first layer's q, k and v is the normed embedding, which is easy to say.
    table = np.asarray(model.matrix("embed"), np.float32)
    x = table[np.concatenate(texts)].astype(np.float64)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + packed.spec.norm_eps)
    x *= model.norm("attn_norm", 0)
    for name in ("attn_q", "attn_k", "attn_v"):
        mean = matrix.mean(f"blk.0.{name}.weight", packed.spec.hidden_size)
        assert mean is not None
        np.testing.assert_allclose(mean, (x * x).mean(axis=0), rtol=1e-4)
    assert matrix.mean("blk.2.ffn_down.weight", packed.spec.ffn_size) is not None


def test_importance_does_not_depend_on_threads(tmp_path: Path) -> None:
    packed = _packed(tmp_path)
    texts = [list(range(3, 60))]

    def sums(matrix: ImportanceMatrix) -> list[bytes]:
        return [entry.sums.tobytes() for entry in matrix.entries.values()]

    one, two = (collect_imatrix(packed, texts, threads=n) for n in (1, 2))
    assert sums(one) == sums(two)


@pytest.mark.parametrize("texts", [[], [[]], [[5] * 300]])
def test_importance_needs_texts_that_fit(texts: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="texts of 1 to 256 tokens"):
        collect_imatrix(_packed(tmp_path), texts)
