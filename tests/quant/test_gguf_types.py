"""The engine runs every GGUF type exactly, in mixes too: each role in its own form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.checkpoint.ggml.imatrix import ImportanceMatrix
from trivet.errors import ConfigError
from trivet.models import open_model
from trivet.models.gguf_export import write_gguf
from trivet.models.reference import float_logits, to_float
from trivet.native import Arena, StepInput, load_model
from trivet.native.packing import LINEARS, linear_names, unpack
from trivet.native.weights import dequantize
from trivet.quant.imatrix import collect_imatrix
from trivet.quant.load import PackedModel, load_packed
from trivet.quant.rtn import own_format

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


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q3_K_M", "Q5_K_S"])
def test_a_mix_is_packed_exactly(mix: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, build_folder(tmp_path / "hf", WIDE), mix)
    packed = load_packed(path)
    assert not packed.notes
    model = open_model(resolve_model(path))
    for report in packed.report:
        assert report.exact, report
        if report.name.startswith("layers."):
            assert report.form == FORMS[report.source]
    for layer in range(WIDE.layers):
        for linear, roles in LINEARS.items():
            names = linear_names(packed.tensors, layer, linear)
            sources = [model.matrix(role, layer) for role in roles]
            assert (len(names) > 1) == (len({own_format(source) for source in sources}) > 1)
            got = [dequantize(unpack(packed.file.weight(name))) for name in names]
            want = [to_float(source) for source in sources]
            np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))


def test_q4_k_m_keeps_q_and_k_in_4_bits_beside_v_in_6(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build_folder(tmp_path / "hf", WIDE), "Q4_K_M")
    packed = load_packed(tmp_path / "m.gguf")
    found = {report.name: report for report in packed.report}
    assert [found[f"layers.1.{role}"].source for role in "qkv"] == ["Q4_K", "Q4_K", "Q6_K"]
    assert packed.weights_form == "w4a8-g32-min+w8a8-g16"
    assert "layers.1.qkv" not in packed.tensors
    tokens = list(range(3, 40))
    want = float_logits(open_model(resolve_model(tmp_path / "m.gguf")), tokens)
    got = _logits(packed, tokens)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def _logits(packed: PackedModel, tokens: list[int]) -> NDArray[np.float32]:
    model = load_model(packed, threads=2)
    arena = Arena(model.kv_geometry(), 2)
    step = StepInput(
        tokens=np.array(tokens, np.int32),
        segments=np.array([[0, len(tokens), 0, 0]], np.int32),
        page_tables=np.array([[0, 1]], np.int32),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
    )
    model.forward(step, arena)
    return model.logits().copy()


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
