"""Folders of every format: written from a float folder, read back exactly, run by the engine."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from support.grids import rounded
from support.tiny_models import Variant, build_folder
from trivet import files
from trivet.checkpoint import HuggingFaceCheckpoint, resolve_model
from trivet.checkpoint.formats import CodeGrid, Fp8Weight, folder, write
from trivet.checkpoint.formats.fp8 import quantize
from trivet.checkpoint.source import FloatMatrix
from trivet.config import Scheme, WeightFormat
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.models import open_model
from trivet.models.reference import float_logits, to_float
from trivet.native.weights import WeightTensor
from trivet.quant import load_packed
from trivet.quant.rtn import convert

Float32 = NDArray[np.float32]
VARIANT = Variant(hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=384)
TIED = Variant(hidden=128, layers=1, heads=4, kv_heads=2, ffn=256, vocab=384, tied=True)

Make = Callable[[Float32], CodeGrid | Fp8Weight | WeightTensor]


def _grid(bits: int, group: int | None, **keys: Any) -> Make:
    return lambda values: rounded(values, bits, group, **keys)


def _ordered(bits: int, group: int, **keys: Any) -> Make:
    def make(values: Float32) -> CodeGrid:
        k = values.shape[1]
        order = np.random.default_rng(k).permutation(np.arange(k) // group).astype(np.int32)
        return rounded(values, bits, group, order=order, **keys)

    return make


# name -> format, options, how a weight is rounded, form the engine takes it in, exact or not
CASES: dict[str, tuple[str, dict[str, Any], Make, str, bool]] = {
    "gptq4": ("gptq", {}, _grid(4, 64), "w4a8-g64", True),
    "gptq4-zp": ("gptq", {}, _grid(4, 32, symmetric=False, lowest_zero=1), "w4a8-g32-zp", True),
    "gptq4-g16": ("gptq", {}, _grid(4, 16), "w4a8-g16", True),
    "gptq4-row": ("gptq", {}, _grid(4, None), "w4a8-row", True),
    "gptq4-row-zp": (
        "gptq_v2",
        {},
        _grid(4, None, symmetric=False),
        "w4a8-row-zp",
        True,
    ),
    "gptq8-g16": ("gptq_v2", {}, _grid(8, 16), "w8a8-g16", True),
    "gptq3": ("gptq", {}, _grid(3, 32), "w4a8-g32", True),
    "gptq2-zp": ("gptq_v2", {}, _grid(2, 64, symmetric=False), "w4a8-g64-zp", True),
    "gptq8": ("gptq_v2", {}, _grid(8, 128), "w8a8-g128", True),
    "gptq8-zp": (
        "gptq_v2",
        {},
        _grid(8, 32, symmetric=False),
        "w8a8-g32",
        False,
    ),
    "gptq4-act-order": ("gptq", {}, _ordered(4, 32), "w4a8-g32", True),
    "gptq8-act-order": ("gptq_v2", {}, _ordered(8, 64), "w8a8-g64", True),
    "ct4-act-order-zp": (
        "compressed-tensors",
        {},
        _ordered(4, 64, symmetric=False),
        "w4a8-g64-zp",
        True,
    ),
    "awq": ("awq", {}, _grid(4, 64, symmetric=False), "w4a8-g64-zp", True),
    "ct4": ("compressed-tensors", {}, _grid(4, 128), "w4a8-g128", True),
    "ct4-zp": ("compressed-tensors", {}, _grid(4, 32, symmetric=False), "w4a8-g32-zp", True),
    "ct3-padded": ("compressed-tensors", {"padded": True}, _grid(3, 64), "w4a8-g64", True),
    "ct6": ("compressed-tensors", {}, _grid(6, 64), "w8a8-g64", True),
    "ct8": ("compressed-tensors", {}, _grid(8, 64), "w8a8-g64", True),
    "ct-int8": ("compressed-tensors", {"activations": True}, _grid(8, None), "w8a8-g128", True),
    "ct-fp8": ("compressed-tensors", {}, lambda x: quantize(x, "channel"), "fp8-row", True),
    "fp8-block": ("fp8", {}, lambda x: quantize(x, (64, 64)), "fp8-g64", True),
    "fp8-odd-block": ("fp8", {}, lambda x: quantize(x, (128, 40)), "w8a8-g32", False),
    "fp8-tensor": (
        "fp8",
        {"float_type": "F32"},
        lambda x: quantize(x, "tensor"),
        "fp8-row",
        True,
    ),
}


def _quantized(source: Path, make: Make) -> dict[str, CodeGrid | Fp8Weight | WeightTensor]:
    model = open_model(resolve_model(source))
    weights = {}
    for layer in range(model.spec.num_layers):
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            weights[model.file_name(role, layer)] = make(to_float(model.matrix(role, layer)))
    return weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_folder(tmp_path_factory.mktemp("formats") / "source", VARIANT)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"temperature": 0.7}')
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))


def _values(weight: CodeGrid | Fp8Weight | WeightTensor) -> Float32:
    return to_float(weight) if isinstance(weight, WeightTensor) else weight.values()


def _write(source: Path, path: Path, case: str) -> dict[str, CodeGrid | Fp8Weight | WeightTensor]:
    format, options, make, _, _ = CASES[case]
    weights = _quantized(source, make)
    write(path, source_folder=source, weights=weights, format=format, config=options)
    return weights


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_read_back_and_packed(case: str, source: Path, tmp_path: Path) -> None:
    weights = _write(source, tmp_path / case, case)
    _, options, _, form, is_exact = CASES[case]
    narrow_form = form if form.startswith("fp8") else form.replace("row", "g128")
    model = open_model(resolve_model(tmp_path / case))
    for layer in range(2):
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            read = model.matrix(role, layer)
            want = _values(weights[model.file_name(role, layer)])
            np.testing.assert_array_equal(to_float(read), want)
            assert isinstance(read, WeightTensor if is_exact else FloatMatrix)
            narrow = read.shape[1] <= 128  # its row is one group of 128
            assert read.format.name == (narrow_form if narrow else form)
    original = open_model(resolve_model(source))
    kind = {"F16": np.float16, "F32": np.float32}.get(options.get("float_type", "F16"), np.float16)
    if case in (
        "fp8-block",
        "fp8-odd-block",
    ):  # its default type is bf16, which holds the tiny model exactly
        kind = np.float32
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        have = HuggingFaceCheckpoint(tmp_path / case).read(name)
        plain = HuggingFaceCheckpoint(source).read(name)
        assert isinstance(plain, np.ndarray)
        np.testing.assert_array_equal(
            to_float(have).reshape(plain.shape), plain.astype(kind).astype(np.float32)
        )
    assert model.spec.num_layers == original.spec.num_layers
    packed = load_packed(tmp_path / case)
    assert set(packed.weights_form.split("+")) == {form, narrow_form}
    for report in packed.report:
        if not report.name.startswith("layers."):
            continue
        if report.exact:
            assert (report.rel_error, is_exact) == (0.0, True)
            continue
        if is_exact:  # int8 has no -128: groups that hold the code are rounded, and counted
            assert "held the code -128" in report.note
        assert 0 < report.rel_error < 0.01
        assert report.note


@pytest.mark.parametrize("case", ["gptq4", "gptq2-zp", "awq", "ct4-zp", "fp8-block"])
def test_written_bytes_are_the_same_every_time(case: str, source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        _write(source, tmp_path / name, case)
    for path in sorted((tmp_path / "one").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_side_files_are_kept_and_the_source_is_not_touched(source: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    names = write(
        tmp_path / "made",
        source_folder=source,
        weights=_quantized(source, _grid(4, 64)),
        format="gptq",
        config={"damp_percent": 0.01, "static_groups": True},
    )
    assert names == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()} == before
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "made" / name).read_bytes() == before[name]
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    side = json.loads((tmp_path / "made" / "quantize_config.json").read_text())
    assert config["quantization_config"] == side
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_safetensors_library_reads_what_we_write(source: Path, tmp_path: Path) -> None:
    _write(source, tmp_path / "made", "gptq4")
    tensors = safetensors.numpy.load_file(tmp_path / "made" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.qweight"].shape == (128 // 8, 256)
    assert tensors["model.layers.0.mlp.up_proj.g_idx"].tolist() == [0] * 64 + [1] * 64
    assert tensors["model.norm.weight"].dtype == np.float16


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    source = build_folder(tmp_path / "source", TIED)
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    _write(source, tmp_path / "made", "ct4")
    names = safetensors.numpy.load_file(tmp_path / "made" / "model.safetensors")
    assert "lm_head.weight" not in names
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"]["ignore"] == ["lm_head"]  # else loaders look for its codes
    assert open_model(resolve_model(tmp_path / "made")).spec.tied_embeddings


def test_shards_are_cut_and_indexed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(source, tmp_path / "whole", "ct4-zp")
    monkeypatch.setattr(folder, "MAX_SHARD_BYTES", 150_000)
    weights = _write(source, tmp_path / "cut", "ct4-zp")
    shards = sorted(p.name for p in (tmp_path / "cut").glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    whole = safetensors.numpy.load_file(tmp_path / "whole" / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for name, file in index["weight_map"].items():
        part = safetensors.numpy.load_file(tmp_path / "cut" / file)
        np.testing.assert_array_equal(part[name], whole[name])
    model = open_model(resolve_model(tmp_path / "cut"))
    np.testing.assert_array_equal(
        to_float(model.matrix("down", 1)), _values(weights[model.file_name("down", 1)])
    )


def test_layers_may_differ(source: Path, tmp_path: Path) -> None:
    """GPTQ says so by ``dynamic``, compressed-tensors by groups; both leave what is not given."""
    weights = _quantized(source, _grid(4, 64))
    odd, kept = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    weights[odd] = rounded(_values(weights[odd]), 8, 32)
    del weights[kept]
    for format in ("gptq", "gptq_v2", "compressed-tensors"):
        write(tmp_path / format, source_folder=source, weights=weights, format=format)
        model = open_model(resolve_model(tmp_path / format))
        for layer, role in [(1, "down"), (0, "down"), (1, "o")]:
            want = _values(weights[model.file_name(role, layer)])
            np.testing.assert_array_equal(to_float(model.matrix(role, layer)), want)
        plain = model.matrix("o", 0)
        assert isinstance(plain, np.ndarray)
        assert plain.dtype == np.float16
        packed = load_packed(tmp_path / format)
        assert packed.weights_form.startswith("w4a8-g64")
    with pytest.raises(QuantError, match=r"down_proj\.weight: 8 bits"):
        write(tmp_path / "awq", source_folder=source, weights=weights, format="awq")
    assert not (tmp_path / "awq").exists()


def _converted(values: Float32, form: WeightFormat) -> WeightTensor:
    return convert(values, form).weight


def test_engine_weights_are_written_as_they_are(source: Path, tmp_path: Path) -> None:
    """A weight in one of the engine's own forms passes through every format that can hold it."""
    for name, formats in {
        "w4a8-g32": ("gptq", "gptq_v2", "awq", "compressed-tensors"),
        "w4a8-g64-zp": ("gptq_v2", "awq", "compressed-tensors"),
        "w8a8-g32": ("gptq", "compressed-tensors"),
    }.items():
        form = WeightFormat.parse(name)
        weights = _quantized(source, functools.partial(_converted, form=form))
        for format in formats:
            path = tmp_path / f"{name}-{format}"
            write(path, source_folder=source, weights=weights, format=format)
            model = open_model(resolve_model(path))
            read, want = model.matrix("down", 1), weights[model.file_name("down", 1)]
            assert isinstance(read, WeightTensor)
            assert isinstance(want, WeightTensor)
            assert read.format == form
            np.testing.assert_array_equal(read.codes, want.codes)
            assert read.scales is not None
            np.testing.assert_array_equal(read.scales, want.scales)
            if form.scheme is Scheme.ZP:
                np.testing.assert_array_equal(read.zeros, want.zeros)


def test_the_function_of_the_model_is_kept(source: Path, tmp_path: Path) -> None:
    """Logits of the written folder are those of the float model with the same rounded values."""
    weights = _write(source, tmp_path / "made", "gptq4-act-order")
    plain = build_folder(tmp_path / "plain", VARIANT)
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    tensors = {name: value.astype(np.float16).astype(np.float32) for name, value in tensors.items()}
    tensors |= {name: _values(weight) for name, weight in weights.items()}
    safetensors.numpy.save_file(tensors, plain / "model.safetensors")
    tokens = [5, 9, 200, 31]
    np.testing.assert_array_equal(
        float_logits(open_model(resolve_model(tmp_path / "made")), tokens),
        float_logits(open_model(resolve_model(plain)), tokens),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "gguf"}, "gptq, gptq_v2, awq, compressed-tensors, fp8"),
        ({"config": {"damp": 1}}, "damp_percent"),
        ({"config": {"float_type": "F64"}}, "F16, BF16, F32"),
        ({"weights": {"model.layers.9.o": np.zeros((1, 1), np.float32)}}, "model.layers.9.o"),
        ({"weights": {}}, "nothing would be quantized"),
    ],
)
def test_mistakes_are_refused_and_leave_nothing(
    change: dict[str, Any], words: str, source: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        "source_folder": source,
        "weights": _quantized(source, _grid(4, 64)),
        "format": "gptq",
        "config": {},
    }
    with pytest.raises((ConfigError, CheckpointError, QuantError), match=words) as caught:
        write(tmp_path / "made", **(keys | change))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_fit_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    small = rounded(np.ones((128, 64), np.float32), 4, 64)
    rotated = convert(np.ones((256, 128), np.float32), WeightFormat(8)).weight
    minimum = convert(np.ones((256, 128), np.float32), WeightFormat(4, 32, Scheme.MIN)).weight
    cases: list[tuple[Any, str, str]] = [
        (small, "gptq", f"{name}: has shape"),
        (rotated, "gptq", "hadamard64"),
        (minimum, "awq", "w4a8-g32-min"),
        (quantize(np.ones((256, 128), np.float32), "tensor"), "awq", f"{name}: fp8 codes"),
        (rounded(np.ones((256, 128), np.float32), 4, 64), "fp8", f"{name}: integer codes"),
        (np.full((256, 128), 1e9, np.float32), "gptq", f"{name}: holds a value that F16"),
    ]
    for weight, format, words in cases:
        with pytest.raises(QuantError, match=words):
            write(tmp_path / "made", source_folder=source, weights={name: weight}, format=format)
    assert not (tmp_path / "made").exists()


def test_nothing_is_overwritten_and_nothing_quantized_is_a_source(
    source: Path, tmp_path: Path
) -> None:
    _write(source, tmp_path / "made", "ct4")
    with pytest.raises(CheckpointError, match="never overwritten"):
        _write(source, tmp_path / "made", "ct4")
    weights = _quantized(source, _grid(4, 64))
    with pytest.raises(CheckpointError, match="is quantized"):
        write(tmp_path / "two", source_folder=tmp_path / "made", weights=weights, format="awq")


def test_a_failure_while_writing_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(CheckpointError, match="No space left"):
        _write(source, tmp_path / "made", "ct4")
    assert list(tmp_path.iterdir()) == []


def test_older_folders_have_their_config_beside(source: Path, tmp_path: Path) -> None:
    """quantize_config.json of GPTQ, quant_config.json of AWQ with its own keys; their file names."""
    for case, name in (("gptq4", "quantize_config.json"), ("awq", "quant_config.json")):
        weights = _write(source, tmp_path / case, case)
        config_path = tmp_path / case / "config.json"
        config = json.loads(config_path.read_text())
        said = config.pop("quantization_config")
        config_path.write_text(json.dumps(config))
        if case == "awq":
            said = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
        (tmp_path / case / name).write_text(json.dumps(said))
        own_name = "gptq_model-4bit-64g.safetensors"
        (tmp_path / case / "model.safetensors").rename(tmp_path / case / own_name)
        model = open_model(resolve_model(tmp_path / case))
        want = _values(weights[model.file_name("up", 1)])
        np.testing.assert_array_equal(to_float(model.matrix("up", 1)), want)
        assert name in [path.name for path in resolve_model(tmp_path / case).files]
        shutil.rmtree(tmp_path / case)
