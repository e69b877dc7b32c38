"""The container is what the gguf package reads; importance matrices and tokenizers survive it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.data import data_file
from trivet.checkpoint import GGUFCheckpoint, Tokenizer
from trivet.checkpoint.ggml import TYPES, decode
from trivet.checkpoint.ggml.imatrix import Entry, ImportanceMatrix, read_imatrix, write_imatrix
from trivet.checkpoint.gguf_vocab import tokenizer_from_gguf, tokenizer_metadata
from trivet.checkpoint.gguf_write import TensorPlan, gguf_bytes, write_gguf_file
from trivet.errors import CheckpointError
from trivet.models.reference import to_float
from trivet.native.weights import WeightTensor

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "text": "snow \u2603",
    "empty": "",
    "yes": True,
    "no": False,
    "small": 7,
    "large": (1 << 40) + 1,
    "negative": -5,
    "half": 0.5,
    "names": ["a", "", "\u4f60"],
    "none": [],
    "numbers": np.array([1, -2, 3], np.int32),
    "scores": np.array([0.5, -1.5], np.float32),
    "flags": np.array([True, False]),
}


def _write(path: Path, kinds: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    plans = [TensorPlan(name, kind, shape) for name, (kind, shape) in kinds.items()]
    data = {}
    for plan in plans:
        form = TYPES[plan.kind]
        raw = rng.integers(0, 120, (plan.num_rows, form.row_bytes(plan.shape[-1])), dtype=np.uint8)
        data[plan.name] = raw
    pieces = [part for raw in data.values() for part in np.array_split(raw, 2)]
    write_gguf_file(path, METADATA, plans, iter(pieces))
    assert path.stat().st_size == gguf_bytes(METADATA, plans)
    return data


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {f"t.{k}": (k, (3, 512)) for k in TYPES}
    kinds["vector"] = ("F32", (5,))
    kinds["cube"] = ("F16", (2, 3, 4))
    data = _write(tmp_path / "m.gguf", kinds)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, value in METADATA.items():
        got = reader.fields[key].contents()
        assert got == (value.tolist() if isinstance(value, np.ndarray) else value), key
    assert reader.fields["small"].types == [gguf.GGUFValueType.UINT32]
    assert reader.fields["negative"].types == [gguf.GGUFValueType.INT32]
    for tensor in reader.tensors:
        kind, shape = kinds[tensor.name]
        assert tensor.tensor_type.name == kind
        assert tuple(int(n) for n in reversed(tensor.shape)) == shape
        assert tensor.data.tobytes() == data[tensor.name].tobytes()
        assert tensor.data_offset % 32 == 0
    ours = GGUFCheckpoint(tmp_path / "m.gguf")
    assert ours.metadata["names"] == METADATA["names"]
    for name, raw in data.items():
        np.testing.assert_array_equal(ours.read_bytes(name), raw)


@pytest.mark.parametrize("kind", [k for k in TYPES if k not in ("F32", "F16", "BF16")])
def test_every_type_is_read_as_its_values(kind: str, tmp_path: Path) -> None:
    """As a grid of the engine's own, and said to be exact."""
    data = _write(tmp_path / "m.gguf", {"w.weight": (kind, (4, 512))})
    value = GGUFCheckpoint(tmp_path / "m.gguf").read("w.weight")
    np.testing.assert_array_equal(to_float(value), decode(kind, data["w.weight"]))
    assert isinstance(value, WeightTensor)
    assert value.shape == (4, 512)
    assert value.exact
    assert value.source == kind


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K", "Q2_K", "Q5_1"])
def test_scales_that_are_no_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    plan = TensorPlan("w.weight", kind, (2, 512))
    raw = np.zeros((2, TYPES[kind].row_bytes(512)), np.uint8)
    at = {"Q6_K": 208, "Q2_K": 80}.get(kind, 0)
    raw[1, at : at + 2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    raw[1, -20 if kind == "Q6_K" else 4 : None if kind != "Q6_K" else -2] |= 1
    write_gguf_file(tmp_path / "m.gguf", {"general.architecture": "llama"}, [plan], [raw])
    with pytest.raises(CheckpointError, match=r"w\.weight.*NaN"):
        GGUFCheckpoint(tmp_path / "m.gguf").read("w.weight")


def test_a_file_is_never_overwritten_and_a_failure_leaves_none(tmp_path: Path) -> None:
    plan = TensorPlan("w.weight", "F32", (2, 2))
    raw = np.zeros(16, np.uint8)
    write_gguf_file(tmp_path / "m.gguf", {}, [plan], [raw])
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_gguf_file(tmp_path / "m.gguf", {}, [plan], [raw])
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_gguf_file(tmp_path / "m.gguf" / "n.gguf", {}, [plan], [raw])

    def broken() -> Any:
        yield raw[:8]
        raise CheckpointError("x", "went away")

    with pytest.raises(CheckpointError, match="went away"):
        write_gguf_file(tmp_path / "n.gguf", {}, [plan], broken())
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


# --- importance matrices -------------------------------------------------------------------------


def _matrix() -> ImportanceMatrix:
    rng = np.random.default_rng(0)

    def entry(width: int, rows: float) -> Entry:
        sums = (rows * rng.random((1, width))).astype(np.float32)
        return Entry(sums, np.array([rows], np.float32))

    entries = {"blk.0.ffn_up.weight": entry(64, 1024), "blk.0.ffn_down.weight": entry(96, 1024)}
    return ImportanceMatrix(entries, ("prose", "code"), 2, 512)


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_importance_survives_both_formats(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    write_imatrix(path, _matrix())
    found = read_imatrix(path)
    assert set(found.entries) == set(_matrix().entries)
    assert found.chunk_count == 2
    assert found.datasets == (("prose", "code") if suffix == "gguf" else ("code",))
    for name, entry in _matrix().entries.items():
        want = entry.sums[0] / 1024
        mean = found.mean(name, want.size)
        assert mean is not None
        np.testing.assert_allclose(mean, want, rtol=1e-6)
    assert found.mean("blk.1.ffn_up.weight", 64) is None
    with pytest.raises(CheckpointError, match="64 columns"):
        found.mean("blk.0.ffn_up.weight", 65)
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_imatrix(path, _matrix())


def test_importance_in_gguf_has_llama_cpps_names_and_shapes(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "m.gguf", _matrix())
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["prose", "code"]
    assert reader.fields["imatrix.chunk_count"].contents() == 2
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    shapes = {t.name: [int(n) for n in t.shape] for t in reader.tensors}
    assert shapes["blk.0.ffn_up.weight.in_sum2"] == [64, 1]
    assert shapes["blk.0.ffn_up.weight.counts"] == [1, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_importance_that_is_no_number_is_refused(value: float) -> None:
    sums = np.ones((1, 8), np.float32)
    sums[0, 3] = value
    with pytest.raises(CheckpointError, match=r"blk\.0\.x\.weight.*negative"):
        ImportanceMatrix({"blk.0.x.weight": Entry(sums, np.ones(1, np.float32))})


def test_damaged_importance_files_are_one_line(tmp_path: Path) -> None:
    good = tmp_path / "good.dat"
    write_imatrix(good, _matrix())
    raw = good.read_bytes()
    cases = [raw[:n] for n in (0, 3, 4, 10, 40, 300, len(raw) - 3)]
    cases += [struct.pack("<i", n) + raw[4:] for n in (-1, 1 << 30, 3)]
    cases += [raw[:4] + struct.pack("<i", 1 << 28) + raw[8:], b"text" * 100]
    for i, case in enumerate(cases):
        path = tmp_path / f"{i}.dat"
        path.write_bytes(case)
        with pytest.raises(CheckpointError) as caught:
            read_imatrix(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_imatrix(tmp_path / "missing.dat")
    os.mkfifo(tmp_path / "pipe.dat")
    with pytest.raises(CheckpointError, match="is a pipe"):
        read_imatrix(tmp_path / "pipe.dat")
    write_gguf_file(tmp_path / "model.gguf", {"general.type": "model"}, [], [])
    with pytest.raises(CheckpointError, match="of type 'model'"):
        read_imatrix(tmp_path / "model.gguf")
    write_gguf_file(tmp_path / "empty.gguf", {"general.type": "imatrix"}, [], [])
    with pytest.raises(CheckpointError, match="in_sum2"):
        read_imatrix(tmp_path / "empty.gguf")


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pre"), [("gpt-2", "gpt-2"), ("phi-3", "default"), ("qwen2", "qwen2")]
)
def test_tokenizers_survive_the_way_through_json(name: str, pre: str) -> None:
    path = data_file(f"tokenizer/vocab/ggml-vocab-{name}.gguf")
    checkpoint = GGUFCheckpoint(path)
    data = checkpoint.tokenizer_data()
    size = len(checkpoint.metadata["tokenizer.ggml.tokens"])
    metadata, _ = tokenizer_metadata(data, size + 3, path)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.model"] == checkpoint.metadata["tokenizer.ggml.model"]
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokens[:size] == checkpoint.metadata["tokenizer.ggml.tokens"]
    assert tokens[size:] == [f"[PAD{size + i}]" for i in range(3)]
    one, two = Tokenizer(data, path), Tokenizer(tokenizer_from_gguf(metadata, path), path)
    text = data_file("corpora/zh_rust_book_part1.txt").read_text()[:3000]
    text += data_file("corpora/wikitext2_valid.txt").read_text()[:5000]
    assert one.encode(text) == two.encode(text)


def _tiny(pre_tokenizer: Any) -> Any:
    import tokenizers
    from tokenizers import decoders, models

    from trivet.checkpoint.tokenizer import BYTE_LEVEL, TokenizerData, byte_alphabet

    vocab = {c: i for i, c in enumerate(byte_alphabet())}
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    merges += [("l", "l"), ("\u0120", "1"), (".", ".")]
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerData(json=tokenizer.to_str(), style=BYTE_LEVEL), len(vocab)


def test_the_rules_of_splitting_are_found_and_unknown_ones_refused(tmp_path: Path) -> None:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as steps

    plain = steps.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = steps.Sequence([steps.Digits(individual_digits=True), plain])
    for step, name in ((plain, "gpt-2"), (digits, "smollm")):
        data, size = _tiny(step)
        metadata, _ = tokenizer_metadata(data, size, tmp_path)
        assert metadata["tokenizer.ggml.pre"] == name
    pairs = steps.Split(Regex("[\\s\\S]{2}"), "isolated")
    unknown = steps.Sequence([pairs, steps.ByteLevel(add_prefix_space=False, use_regex=False)])
    data, size = _tiny(unknown)
    with pytest.raises(CheckpointError, match="no GGUF name"):
        tokenizer_metadata(data, size, tmp_path)
    data, size = _tiny(plain)
    with pytest.raises(CheckpointError, match=f"vocab_size is {size - 1}"):
        tokenizer_metadata(data, size - 1, tmp_path)
