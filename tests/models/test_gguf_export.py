"""Folder to GGUF and back: values, tokenizer, rope and metadata survive; others read the files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from support.tiny_models import (
    CHAT_TEMPLATE,
    VARIANTS,
    Variant,
    build_folder,
    build_gguf,
    gguf_name,
    weights_of,
)
from trivet.checkpoint import GGUFCheckpoint, Tokenizer, resolve_model
from trivet.checkpoint.ggml.imatrix import Entry, ImportanceMatrix
from trivet.errors import CheckpointError, ConfigError
from trivet.models import open_model, rope_tables
from trivet.models.gguf_export import plan_gguf, write_gguf
from trivet.models.gguf_import import gguf_to_folder
from trivet.models.reference import float_logits

TOKENS = [0, 17, 300, 45, 45, 2, 120, 77]
TEXTS = ["the quick brown fox 1234", "we'll  say: caf\u00e9\n\n\t\u4f60\u597d<|im_end|>", "", " a "]
WIDE = Variant(hidden=256, heads=4, kv_heads=2, ffn=512, vocab=384, layers=8)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [(name, "F32") for name in sorted(VARIANTS)]
    + [(name, dtype) for name in ("smollm2", "qwen2") for dtype in ("F16", "BF16")],
)
def test_there_and_back_computes_the_same(variant: str, dtype: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", variant, dtype=dtype)
    before = open_model(resolve_model(folder))
    write_gguf(tmp_path / "m.gguf", folder)
    file = open_model(resolve_model(tmp_path / "m.gguf"))
    assert file.checkpoint.info("blk.0.ffn_up.weight").dtype == dtype
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "back")
    after = open_model(resolve_model(tmp_path / "back"))
    assert after.checkpoint.info(after.file_name("up")).dtype == dtype
    assert after.checkpoint.info(after.file_name("final_norm")).dtype == dtype
    want = float_logits(before, TOKENS)
    np.testing.assert_array_equal(float_logits(after, TOKENS), want)
    # llama3's rope is stored as float32 divisors, from which the tables are computed again.
    np.testing.assert_allclose(float_logits(file, TOKENS), want, rtol=0, atol=2e-4)
    if before.spec.rope.scaling != "llama3":
        np.testing.assert_array_equal(float_logits(file, TOKENS), want)
    for ours, theirs in zip(rope_tables(after.spec), rope_tables(before.spec), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert after.spec.rope == before.spec.rope
    assert after.spec.max_positions == before.spec.max_positions
    _assert_same_tokenizer(
        [Tokenizer(m.tokenizer_data()) for m in (before, file, after)], CHAT_TEMPLATE
    )


def _assert_same_tokenizer(found: list[Tokenizer], template: str | None) -> None:
    first = found[0]
    for other in found[1:]:
        assert other.eos_ids == first.eos_ids
        assert other.bos_id == first.bos_id
        assert other.special_ids == first.special_ids
        assert other.chat_template == first.chat_template == template
        for text in TEXTS:
            assert other.encode(text) == first.encode(text), text
            ids = first.encode(text)
            assert other.decode(ids, False) == first.decode(ids, False)


@pytest.mark.parametrize("variant", ["smollm2", "llama31", "qwen25", "yarn", "biases"])
def test_the_file_is_what_the_package_would_write(variant: str, tmp_path: Path) -> None:
    """Same tensors, values and rope keys as a file made the way llama.cpp's converter makes it."""
    write_gguf(tmp_path / "ours.gguf", build_folder(tmp_path / "hf", variant), "F32")
    theirs = gguf.GGUFReader(build_gguf(tmp_path / "theirs.gguf", variant))
    ours = gguf.GGUFReader(tmp_path / "ours.gguf")
    assert {t.name for t in ours.tensors} == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        same = next(t for t in ours.tensors if t.name == tensor.name)
        assert list(same.shape) == list(tensor.shape)
        np.testing.assert_allclose(same.data, tensor.data, rtol=1e-6, atol=0)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.name",):
            got = ours.fields[key].contents()
            want = field.contents()
            if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
                got = got[: len(want)]  # ids up to vocab_size are filled up
            assert got == (pytest.approx(want) if isinstance(want, float) else want), key
            assert ours.fields[key].types == field.types, key


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q2_K", "Q3_K_L", "Q5_K_S", "Q6_K", "Q5_1", "Q8_0"])
def test_mixes_are_written_with_the_planned_bytes(mix: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", WIDE)
    plan = plan_gguf(folder, mix)
    written = write_gguf(tmp_path / "m.gguf", folder, mix, name="tiny")
    assert written.num_bytes == plan.num_bytes == (tmp_path / "m.gguf").stat().st_size
    assert sum(t.num_bytes for t in written.tensors) < plan.num_bytes
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds == {t.name: t.kind for t in plan.tensors}
    assert reader.fields["general.name"].contents() == "tiny"
    weights = weights_of(WIDE)
    up = weights["model.layers.3.mlp.up_proj.weight"]
    stored = next(t for t in reader.tensors if t.name == "blk.3.ffn_up.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    error = float(np.linalg.norm(values - up) / np.linalg.norm(up))
    report = next(t for t in written.tensors if t.name == "blk.3.ffn_up.weight")
    assert report.rel_error == pytest.approx(error, rel=1e-3)
    limit = {"Q2_K": 0.3, "Q3_K": 0.17}.get(report.kind, 0.09)
    assert 0 < error < limit


def test_threads_do_not_change_bytes(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", WIDE)
    for threads in (1, 3):
        write_gguf(tmp_path / f"{threads}.gguf", folder, "Q4_K_M", threads=threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = build_folder(tmp_path / "hf", "smollm2")
    write_gguf(tmp_path / "m.gguf", folder, "Q8_0", progress=lambda *step: seen.append(step))
    assert seen[-1][1] > 0.9 * seen[-1][2]
    seen.clear()
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out", lambda *step: seen.append(step))
    assert seen[-1][1] == seen[-1][2] == len(seen)


def test_importance_changes_only_what_it_knows(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", WIDE)
    sums = np.exp(np.random.default_rng(0).standard_normal((1, 256))).astype(np.float32)
    matrix = ImportanceMatrix({"blk.2.ffn_up.weight": Entry(sums, np.ones(1, np.float32))})
    plain = write_gguf(tmp_path / "plain.gguf", folder, "Q4_K_S")
    weighted = write_gguf(tmp_path / "weighted.gguf", folder, "Q4_K_S", matrix)
    assert [t.name for t in weighted.tensors if t.has_importance] == ["blk.2.ffn_up.weight"]
    assert any("no importance" in note for note in weighted.notes)
    assert not any(t.has_importance for t in plain.tensors)
    one, two = (GGUFCheckpoint(tmp_path / f"{n}.gguf") for n in ("plain", "weighted"))
    changed = [n for n in one.tensors if not np.array_equal(one.read_bytes(n), two.read_bytes(n))]
    assert changed == ["blk.2.ffn_up.weight"]
    narrow = ImportanceMatrix({"blk.2.ffn_up.weight": Entry(sums[:, :64], np.ones(1, np.float32))})
    with pytest.raises(CheckpointError, match="64 columns"):
        write_gguf(tmp_path / "bad.gguf", folder, "Q4_K_S", narrow)
    assert not (tmp_path / "bad.gguf").exists()


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_a_type_that_stays_is_copied_bit_for_bit(qtype: str, tmp_path: Path) -> None:
    source = build_gguf(tmp_path / "a.gguf", "smollm2", qtype=qtype)
    write_gguf(tmp_path / "b.gguf", source)
    one, two = GGUFCheckpoint(source), GGUFCheckpoint(tmp_path / "b.gguf")
    for name, info in one.tensors.items():
        assert two.tensors[name].dtype == info.dtype
        np.testing.assert_array_equal(one.read_bytes(name), two.read_bytes(name))
    tokens = one.metadata["tokenizer.ggml.tokens"]
    assert two.metadata["tokenizer.ggml.tokens"] == tokens
    assert two.metadata["llama.rope.freq_base"] == one.metadata["llama.rope.freq_base"]


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q2_K", "Q5_K_M"])
def test_a_folder_holds_what_the_blocks_stand_for(mix: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", build_folder(tmp_path / "hf", WIDE), mix)
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    before = open_model(resolve_model(tmp_path / "m.gguf"))
    after = open_model(resolve_model(tmp_path / "out"))
    np.testing.assert_array_equal(float_logits(before, TOKENS), float_logits(after, TOKENS))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "half", float_type="BF16")
    half = open_model(resolve_model(tmp_path / "half"))
    assert half.checkpoint.info(half.file_name("up")).dtype == "BF16"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["smollm2", "llama31", "qwen2"])
def test_transformers_loads_the_folder(variant: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = build_folder(tmp_path / "hf", variant)
    write_gguf(tmp_path / "m.gguf", source, "Q8_0")
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0].numpy()
    ours = float_logits(open_model(resolve_model(tmp_path / "out")), TOKENS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = Tokenizer(open_model(resolve_model(source)).tokenizer_data())
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == own.encode(text), text
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    ) == own.apply_chat_template(chat)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", "smollm2")
    write_gguf(tmp_path / "m.gguf", folder)
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_gguf(tmp_path / "m.gguf", folder)
    with pytest.raises(CheckpointError, match="never overwritten"):
        gguf_to_folder(tmp_path / "m.gguf", folder)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        gguf_to_folder(folder, tmp_path / "x")
    with pytest.raises(ConfigError, match="Q9_K"):
        plan_gguf(folder, "Q9_K")
    with pytest.raises(ConfigError, match="float_type"):
        gguf_to_folder(tmp_path / "m.gguf", tmp_path / "x", float_type="F8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match="embed_tokens"):
        plan_gguf(folder, "Q8_0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", "smollm2")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match="NaN"):
        write_gguf(tmp_path / "m.gguf", folder, "Q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_names_are_the_converters(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "hf", "biases")
    plan = plan_gguf(folder, "F32")
    weights = weights_of(VARIANTS["biases"])
    assert {t.name for t in plan.tensors} == {gguf_name(name) for name in weights}
