"""Quantized folders that lie or are damaged: one line that names the file and the tensor."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.grids import rounded
from support.hostile import assert_refused
from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats import write
from trivet.checkpoint.formats.fp8 import quantize
from trivet.checkpoint.formats.gptq import Version
from trivet.checkpoint.formats.stored import Stored, StoredTensors
from trivet.checkpoint.huggingface import HuggingFaceCheckpoint, read_safetensors_header
from trivet.models import open_model
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float

VARIANT = Variant(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=384)
UP = "model.layers.1.mlp.up_proj"

Tensors = dict[str, Stored]
Change = Callable[[Tensors, dict[str, Any]], None]

MAKERS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "gptq": ("gptq", functools.partial(rounded, bits=4, group_size=32), {}),
    "gptq-zp": (
        "gptq",
        functools.partial(rounded, bits=4, group_size=32, symmetric=False, lowest_zero=1),
        {},
    ),
    "awq": ("awq", functools.partial(rounded, bits=4, group_size=32, symmetric=False), {}),
    "ct": (
        "compressed-tensors",
        functools.partial(rounded, bits=4, group_size=32, symmetric=False),
        {},
    ),
    "ct3": ("compressed-tensors", functools.partial(rounded, bits=3, group_size=32), {}),
    "ct-int8": (
        "compressed-tensors",
        functools.partial(rounded, bits=8, group_size=None),
        {"activations": True},
    ),
    "fp8": ("fp8", functools.partial(quantize, block=(32, 32)), {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    source = build_folder(root / "source", VARIANT)
    model = open_model(resolve_model(source))
    for name, (format, make, options) in MAKERS.items():
        weights = {
            model.file_name(role, layer): make(to_float(model.matrix(role, layer)))
            for layer in range(2)
            for role in matrix_shapes(model.spec)
        }
        write(root / name, source_folder=source, weights=weights, format=format, config=options)
    return root


def _copy(folders: Path, name: str, path: Path, change: Change) -> Path:
    """A folder with its tensors and its quantization_config changed."""
    path.mkdir()
    infos = read_safetensors_header(folders / name / "model.safetensors")
    stored = StoredTensors(infos)
    tensors = {tensor: stored.read(tensor) for tensor in infos}
    config = json.loads((folders / name / "config.json").read_text())
    change(tensors, config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    header, blobs, at = {}, [], 0
    for tensor, value in tensors.items():
        raw = value.array.tobytes()
        header[tensor] = {
            "dtype": value.dtype,
            "shape": list(value.array.shape),
            "data_offsets": [at, at + len(raw)],
        }
        at += len(raw)
        blobs.append(raw)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"".join(blobs)
    (path / "model.safetensors").write_bytes(data)
    return path


def _read_all(path: Path) -> None:
    model = open_model(resolve_model(path))
    for layer in range(model.spec.num_layers):
        for role in matrix_shapes(model.spec):
            model.matrix(role, layer)


def _says(key: str, value: Any) -> Change:
    return lambda tensors, config: config.__setitem__(key, value)


def _weights_say(key: str, value: Any) -> Change:
    def change(_: Tensors, config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["weights"][key] = value

    return change


def _drop(suffix: str) -> Change:
    return lambda tensors, config: tensors.__delitem__(f"{UP}.{suffix}")


def _put(suffix: str, dtype: str, value: Any) -> Change:
    return lambda tensors, config: tensors.__setitem__(f"{UP}.{suffix}", Stored(dtype, value))


def _cut(suffix: str) -> Change:
    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        value = tensors[f"{UP}.{suffix}"]
        tensors[f"{UP}.{suffix}"] = Stored(value.dtype, value.array[:-1])

    return change


def _fill(suffix: str, value: Any) -> Change:
    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[f"{UP}.{suffix}"].array.reshape(-1)[3] = value

    return change


def _no_index(tensors: Tensors, config: dict[str, Any]) -> None:
    config["desc_act"] = True
    _drop("g_idx")(tensors, config)


def _shift_zeros(tensors: Tensors, _: dict[str, Any]) -> None:
    """One layer as version 2 writes it, the others stay version 1 (vllm#38966)."""
    value = tensors[f"{UP}.qzeros"].array
    value += 0x11111111


def _both(tensors: Tensors, _: dict[str, Any]) -> None:
    tensors[f"{UP}.weight"] = Stored("F16", np.zeros((128, 64), np.float16))


def _no_scheme(_: Tensors, config: dict[str, Any]) -> None:
    other = json.loads(json.dumps(config["config_groups"]["group_0"]))
    other["targets"], other["weights"]["num_bits"] = ["model.embed_tokens"], 8
    config["config_groups"]["group_0"]["targets"] = [r"re:.*layers\.0\..*"]
    config["config_groups"]["group_1"] = other


I32 = np.int32
CASES: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "gptq bits": ("gptq", _says("bits", 5), ("config.json", "bits is 5", "2, 3, 4, 8")),
    "gptq bits type": ("gptq", _says("bits", "4"), ("bits is '4'",)),
    "gptq bits bool": ("gptq", _says("bits", True), ("bits is True",)),
    "gptq group": ("gptq", _says("group_size", 0), ("group_size is 0",)),
    "gptq other group": ("gptq", _says("group_size", 64), ("qzeros", "has shape")),
    "gptq format": ("gptq", _says("checkpoint_format", "marlin"), ("marlin", "gptq, gptq_v2")),
    "gptq marlin": ("gptq", _says("is_marlin_format", True), ("is_marlin_format is True",)),
    "gptq planar": ("gptq", _says("checkpoint_format", "gptq_p"), ("gptq_p",)),
    "gptq pack": ("gptq", _says("pack_dtype", "int16"), ("pack_dtype", "int32")),
    "gptq sym": ("gptq", _says("sym", "yes"), ("sym is 'yes'", "true or false")),
    "gptq dynamic": ("gptq", _says("dynamic", [1]), ("dynamic is not an object",)),
    "gptq pattern": ("gptq", _says("dynamic", {"+:(": {}}), ("pattern '('", "not valid")),
    "gptq endless pattern": ("gptq", _says("dynamic", {"(a+)+$": {}}), ("too complex",)),
    "gptq rule": ("gptq", _says("dynamic", {"x": 3}), ("x is 3", "an object")),
    "gptq no zeros": ("gptq", _drop("qzeros"), (f"{UP}.qzeros: is missing", "needs it")),
    "gptq no scales": ("gptq", _drop("scales"), (f"{UP}.scales: is missing",)),
    "gptq no index": ("gptq", _no_index, (f"{UP}.g_idx: is missing", "desc_act")),
    "gptq index": ("gptq", _fill("g_idx", 2), (f"{UP}.g_idx", "names groups 0 to 2")),
    "gptq negative index": ("gptq", _fill("g_idx", -1), (f"{UP}.g_idx", "-1 to 1")),
    "gptq short index": ("gptq", _cut("g_idx"), (f"{UP}.g_idx", "has shape [63]")),
    "gptq short codes": ("gptq", _cut("qweight"), (UP, "has shape")),
    "gptq type": ("gptq", _put("qweight", "F32", np.zeros((8, 128), np.float32)), ("F32", "I32")),
    "gptq scalar": ("gptq", _put("qweight", "I32", np.zeros((), I32)), (f"{UP}.qweight", "[]")),
    "gptq empty": ("gptq", _put("qweight", "I32", np.zeros((0, 128), I32)), (UP, "empty shape")),
    "gptq NaN": ("gptq", _fill("scales", np.nan), (f"{UP}.scales", "NaN")),
    "gptq infinite": ("gptq", _fill("scales", np.inf), (f"{UP}.scales", "infinite")),
    "gptq twice": ("gptq", _both, (f"{UP}.weight", "beside")),
    "gptq mixed versions": ("gptq", _shift_zeros, (f"{UP}.qzeros", "of gptq_v2, unlike")),
    "awq version": ("awq", _says("version", "gemv"), ("version is 'gemv'", "gemm")),
    "awq bits": ("awq", _says("bits", 8), ("bits is 8",)),
    "awq sym": ("awq", _says("zero_point", False), ("zero_point is False",)),
    "awq group": ("awq", _says("group_size", 24), (UP.split(".")[0], "multiple of the group 24")),
    "awq no zeros": ("awq", _drop("qzeros"), (f"{UP}.qzeros: is missing",)),
    "awq zeros": ("awq", _cut("qzeros"), (f"{UP}.qzeros", "has shape")),
    "awq NaN": ("awq", _fill("scales", np.nan), (f"{UP}.scales", "NaN")),
    "ct format": ("ct", _says("format", "nvfp4-pack-quantized"), ("nvfp4", "pack-quantized")),
    "ct no groups": ("ct", _says("config_groups", {}), ("config_groups", "at least one")),
    "ct groups": ("ct", _says("config_groups", 3), ("config_groups is not an object",)),
    "ct transform": (
        "ct",
        _says("transform_config", {"config_groups": {"R1": {}}}),
        ("transform_config", "not supported"),
    ),
    "ct sparse": ("ct", _says("sparsity_config", {"format": "sparse-24-bitmask"}), ("sparse-24",)),
    "ct bits": (
        "ct",
        _weights_say("num_bits", 9),
        ("config_groups.group_0.weights: num_bits is 9",),
    ),
    "ct float": ("ct", _weights_say("type", "float"), ("type is 'float'",)),
    "ct strategy": ("ct", _weights_say("strategy", "block"), ("strategy is 'block'",)),
    "ct group": ("ct", _weights_say("group_size", 64), ("weight_scale", "has shape")),
    "ct order": ("ct", _weights_say("actorder", "odd"), ("actorder is 'odd'",)),
    "ct index": ("ct", _weights_say("actorder", "group"), ("weight_g_idx: is missing", "actorder")),
    "ct other bits": ("ct", _weights_say("num_bits", 8), ("words wide", "8 bits")),
    "ct no scheme": ("ct", _no_scheme, ("layers.1", "none of config_groups")),
    "ct no scale": ("ct", _drop("weight_scale"), (f"{UP}.weight_scale: is missing",)),
    "ct no zeros": ("ct", _drop("weight_zero_point"), (f"{UP}.weight_zero_point: is missing",)),
    "ct zeros": ("ct", _cut("weight_zero_point"), (f"{UP}.weight_zero_point", "rows")),
    "ct no shape": ("ct", _drop("weight_shape"), (f"{UP}.weight_shape: is missing",)),
    "ct shape": ("ct", _put("weight_shape", "I64", np.array([128, 1 << 50])), (UP,)),
    "ct negative shape": (
        "ct",
        _put("weight_shape", "I64", np.array([-1, 64])),
        ("says [-1, 64]",),
    ),
    "ct words": ("ct3", _put("weight_packed", "I32", np.zeros((128, 5), I32)), ("6",)),
    "ct NaN": ("ct", _fill("weight_scale", np.nan), (f"{UP}.weight_scale", "NaN")),
    "ct int8 type": (
        "ct-int8",
        _put("weight", "F16", np.zeros((128, 64), np.float16)),
        (f"{UP}.weight", "F16", "I8"),
    ),
    "ct int8 scale": ("ct-int8", _cut("weight_scale"), (f"{UP}.weight_scale", "has shape")),
    "ct int8 alone": ("ct-int8", _drop("weight"), (f"{UP}.weight: is missing",)),
    "fp8 block": ("fp8", _says("weight_block_size", [128]), ("weight_block_size", "two counts")),
    "fp8 huge block": ("fp8", _says("weight_block_size", [1 << 40, 1]), ("weight_block_size",)),
    "fp8 other block": ("fp8", _says("weight_block_size", [64, 64]), ("weight_scale_inv", "shape")),
    "fp8 scheme": ("fp8", _says("activation_scheme", "none"), ("activation_scheme",)),
    "fp8 no scale": ("fp8", _drop("weight_scale_inv"), (f"{UP}.weight_scale_inv: is missing",)),
    "fp8 two scales": (
        "fp8",
        _put("weight_scale", "F32", np.ones(1, np.float32)),
        (f"{UP}.weight_scale_inv", "beside"),
    ),
    "fp8 scale type": (
        "fp8",
        _put("weight_scale_inv", "I32", np.ones((4, 2), I32)),
        (f"{UP}.weight_scale_inv", "I32"),
    ),
    "fp8 NaN": ("fp8", _fill("weight", 0x7F), (f"{UP}.weight", "NaN")),
    "fp8 infinite": (
        "fp8",
        _fill("weight_scale_inv", np.inf),
        (f"{UP}.weight_scale_inv", "infinite"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_folder_is_refused(case: str, folders: Path, tmp_path: Path) -> None:
    name, change, words = CASES[case]
    assert_refused(_read_all, _copy(folders, name, tmp_path / "model", change), *words)


@pytest.mark.parametrize("name", MAKERS)
def test_an_unchanged_copy_is_read(name: str, folders: Path, tmp_path: Path) -> None:
    _read_all(_copy(folders, name, tmp_path / "model", lambda tensors, config: None))


@pytest.mark.parametrize("name", ["gptq", "gptq-zp"])
@pytest.mark.parametrize("version", Version)
@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
def test_labels_of_the_version_are_not_believed(
    name: str, version: Version, label: str | None, folders: Path, tmp_path: Path
) -> None:
    """Zero points of either version under either label or none (vllm#26092, #38966)."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["checkpoint_format"] = label
        for tensor, value in tensors.items():
            if version is Version.V2 and tensor.endswith(".qzeros"):
                words = value.array.view(np.uint32)
                fields = [(words >> 4 * i & 15) + 1 & 15 for i in range(8)]
                words[:] = sum(field << 4 * i for i, field in enumerate(fields))

    model = open_model(resolve_model(_copy(folders, name, tmp_path / "model", change)))
    original = open_model(resolve_model(folders / name))
    for role in ("q", "down"):
        np.testing.assert_array_equal(
            to_float(model.matrix(role, 1)), to_float(original.matrix(role, 1))
        )


def test_a_wrong_sym_label_changes_nothing(folders: Path, tmp_path: Path) -> None:
    for name, says in (("gptq", False), ("gptq-zp", True)):
        path = _copy(folders, name, tmp_path / name, _says("sym", says))
        got = open_model(resolve_model(path)).matrix("down", 1)
        want = open_model(resolve_model(folders / name)).matrix("down", 1)
        np.testing.assert_array_equal(to_float(got), to_float(want))


def test_static_groups_need_no_index(folders: Path, tmp_path: Path) -> None:
    path = _copy(folders, "gptq", tmp_path / "model", _drop("g_idx"))
    got = open_model(resolve_model(path)).matrix("up", 1)
    want = open_model(resolve_model(folders / "gptq")).matrix("up", 1)
    np.testing.assert_array_equal(to_float(got), to_float(want))


def test_an_unset_index_is_the_natural_order(folders: Path, tmp_path: Path) -> None:
    path = _copy(
        folders, "ct", tmp_path / "model", _put("weight_g_idx", "I32", np.full(64, -1, I32))
    )
    got = open_model(resolve_model(path)).matrix("up", 1)
    want = open_model(resolve_model(folders / "ct")).matrix("up", 1)
    np.testing.assert_array_equal(to_float(got), to_float(want))


def test_scales_of_powers_of_two_and_of_kv_caches(folders: Path, tmp_path: Path) -> None:
    """F8_E8M0 scales are read; scales of KV caches and activations are passed over."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for tensor, value in list(tensors.items()):
            if tensor.endswith(".weight_scale_inv"):
                exponents = np.full(value.array.shape, 120, np.uint8)
                tensors[tensor] = Stored("F8_E8M0", exponents)
        tensors[f"{UP}.input_scale"] = Stored("F32", np.ones(1, np.float32))
        config["activation_scheme"] = "static"

    path = _copy(folders, "fp8", tmp_path / "model", change)
    values = to_float(open_model(resolve_model(path)).matrix("up", 1))
    original = HuggingFaceCheckpoint(folders / "fp8").read(f"{UP}.weight")
    blocks = to_float(original)[:32, :32] / values[:32, :32]
    assert np.allclose(blocks[np.isfinite(blocks)], blocks[0, 0])
    assert np.abs(values).max() == 448 * 2.0**-7
    assert f"{UP}.input_scale" not in HuggingFaceCheckpoint(path).tensors
