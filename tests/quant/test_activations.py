"""Rules for the activations of 8-bit rows: decided in calibration, kept in the folder, run by the
engine; each measured on a model with outliers planted in its inputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats.compressed_tensors import ACTIVATIONS
from trivet.checkpoint.huggingface import read_safetensors_header
from trivet.config import PAGE_TOKENS, ModelConfig, WeightFormat
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate.checks import weights as weights_check
from trivet.evaluate.results import Finding
from trivet.loader import load_model
from trivet.models import open_model
from trivet.models.reference import float_logits
from trivet.native import StepInput
from trivet.native.packing import unpack
from trivet.native.reference_linear import mul32, quantize_row
from trivet.native.weights import dequantize
from trivet.quant import load_packed
from trivet.quant.methods.activations import InputRule, parse_activations
from trivet.quant.observe import InputStats
from trivet.quantization import quantize

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=2, tied=True)
OUTLIERS = (5, 33, 60)  # columns of the inputs of q, k, v and gate, up
QUICK: dict[str, Any] = {"samples": 8, "window": 64, "gate": "off", "threads": 2}
ROWS: dict[str, Any] = {**QUICK, "method": "rtn", "bits": 8, "group_size": None}
RULES = ("row", "hadamard64", "static", "outliers3", "hadamard64+outliers3")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose norms make three columns 64 times larger, which the weights take back."""
    folder = build_folder(tmp_path_factory.mktemp("activations") / "model", SHAPE, dtype="F32")
    path = folder / "model.safetensors"
    weights = safetensors.numpy.load_file(path)
    factors = np.ones(SHAPE.hidden, np.float32)
    factors[list(OUTLIERS)] = 64
    for name, values in weights.items():
        if name.endswith("layernorm.weight"):
            weights[name] = values * factors
        elif any(role in name for role in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            weights[name] = values / factors
    safetensors.numpy.save_file(weights, path)
    return folder


@pytest.fixture(scope="module")
def folders(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model with 8-bit rows and each rule."""
    place = tmp_path_factory.mktemp("rules")
    for rule in RULES:
        quantize(source, place / rule, activations=rule, **ROWS)
    return {rule: place / rule for rule in RULES}


def _proof(folder: Path) -> dict[str, Any]:
    proof: dict[str, Any] = json.loads((folder / "quantization.json").read_text())
    return proof


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _engine_error(source: Path, folder: Path, weights: str = "auto") -> float:
    """Relative change of the engine's logits of a fixed text against the float model."""
    tokens = np.random.default_rng(5).integers(3, SHAPE.vocab, 48).astype(np.int32)
    want = float_logits(open_model(resolve_model(source)), tokens.tolist())
    model = load_model(ModelConfig(model=str(folder), weights=weights, threads=1))
    arena = model.new_arena(-(-len(tokens) // PAGE_TOKENS))
    step = StepInput(
        tokens=tokens,
        segments=np.array([[0, len(tokens), 0, 0]], np.int32),
        page_tables=np.arange(arena.num_pages, dtype=np.int32)[None, :],
        logit_rows=np.arange(len(tokens), dtype=np.int32),
    )
    model.runner.forward(step, arena)
    got = model.runner.logits()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("rule", RULES)
def test_the_engine_runs_the_rule_that_the_folder_was_made_with(
    folders: dict[str, Path], rule: str
) -> None:
    packed = load_packed(folders[rule])
    assert packed.weights_form == f"w8a8+{rule}"
    if rule in ("row", "static"):  # the codes of the file, with nothing taken out or turned
        assert [t.name for t in packed.report if t.name.startswith("layers.") and not t.exact] == []


def test_each_rule_is_measured_alone_and_helps_where_it_should(
    source: Path, folders: dict[str, Path]
) -> None:
    errors = {rule: _engine_error(source, folder) for rule, folder in folders.items()}
    assert errors["outliers3"] < 0.5 * errors["row"]
    assert errors["hadamard64"] < 0.9 * errors["row"]
    assert errors["hadamard64+outliers3"] < 0.5 * errors["row"]
    assert errors["row"] < 1.1 * errors["static"]


def test_the_proof_says_what_the_rule_is_and_what_it_costs(folders: dict[str, Path]) -> None:
    for rule, folder in folders.items():
        proof = _proof(folder)
        assert proof["recipe"]["activations"] == rule
        for linear in proof["linears"]:
            facts = linear["activations"]
            assert set(facts["error"]) == {rule, "row"}
            assert (facts["input_scale"] is not None) == (rule == "static")
            assert (facts["outlier_columns"] is not None) == ("outliers" in rule)
            reads_planted = "self_attn.q_proj" in linear["name"] or "gate" in linear["name"]
            if "outliers" in rule and reads_planted:
                assert sorted(facts["outlier_columns"]) == list(OUTLIERS)
                assert facts["error"][rule] < 0.5 * facts["error"]["row"]


def test_static_scales_are_stored_as_the_format_has_them(folders: dict[str, Path]) -> None:
    """As vLLM and transformers look for them; readers of other rules find plain int8 rows."""
    folder = folders["static"]
    infos = read_safetensors_header(folder / "model.safetensors")
    linears = {linear["name"]: linear for linear in _proof(folder)["linears"]}
    for name, linear in linears.items():
        info = infos[f"{name}.input_scale"]
        assert (info.dtype, info.shape) == ("F32", (1,))
        stored = np.fromfile(info.path, np.float32, 1, offset=info.offset)
        assert stored == np.float32(linear["activations"]["input_scale"])
    [group] = _config(folder)["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["dynamic"] is False
    assert group["input_activations"]["strategy"] == "tensor"
    assert ACTIVATIONS not in _config(folder)
    for rule in set(RULES) - {"static"}:
        infos = read_safetensors_header(folders[rule] / "model.safetensors")
        assert not [name for name in infos if "input" in name.rpartition(".")[2]]
        [group] = _config(folders[rule])["quantization_config"]["config_groups"].values()
        assert group["input_activations"]["strategy"] == "token"
        assert _config(folders[rule])[ACTIVATIONS]["form"] == f"w8a8+{rule}"


def test_one_folder_runs_with_other_rules(source: Path, folders: dict[str, Path]) -> None:
    """So that a rule is turned on and off over the same codes."""
    folder = folders["outliers3"]
    plain = load_packed(folder, "w8a8+row")
    grouped = load_packed(folder, "w8a8-g32")
    name = "layers.0.qkv"
    np.testing.assert_array_equal(
        dequantize(unpack(plain.file.weight(name))), dequantize(unpack(grouped.file.weight(name)))
    )
    assert all(t.exact for t in (*plain.report, *grouped.report) if t.name.startswith("layers."))
    errors = {
        weights: _engine_error(source, folder, weights)
        for weights in ("w8a8+row", "w8a8+outliers1", "w8a8+outliers3", "w8a8-g32")
    }
    assert errors["w8a8+outliers3"] < errors["w8a8+outliers1"] <= errors["w8a8+row"] * 1.05
    assert errors["w8a8-g32"] < errors["w8a8+row"]


@pytest.mark.parametrize(
    ("rule", "weights", "message"),
    [
        ("row", "w8a8+static", r"w8a8\+static needs a static input scale.*--activations static"),
        ("static", "w8a8+outliers2", "needs 2 outlier columns and the model names 0"),
        ("outliers3", "w8a8+outliers4", "needs 4 outlier columns and the model names 3"),
    ],
)
def test_a_rule_that_the_folder_cannot_serve_is_refused(
    folders: dict[str, Path], rule: str, weights: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_packed(folders[rule], weights)


def test_a_model_in_floats_knows_no_scale_and_no_columns(source: Path) -> None:
    assert load_packed(source, "w8a8+row").weights_form == "w8a8+row"
    with pytest.raises(CheckpointError, match="needs a static input scale"):
        load_packed(source, "w8a8+static")


@pytest.mark.parametrize("rule", RULES)
def test_the_gate_compares_the_weights_of_every_rule(tmp_path: Path, rule: str) -> None:
    source = build_folder(tmp_path / "model", SHAPE, dtype="F32")
    quantize(source, tmp_path / "out", activations=rule, **ROWS)
    base = load_model(ModelConfig(model=str(source), weights="bf16", threads=1))
    model = load_model(ModelConfig(model=str(tmp_path / "out"), threads=1))
    found = weights_check.check(model, base, list(range(3, 60)))
    assert found.finding is Finding.PASS, found.reason
    ratios = found.metrics["worst_output_error_over_rounding"]
    assert ratios
    assert all(0 < ratio < 1.3 for ratio in ratios.values())


def test_smoothing_and_a_rule_are_two_variables(source: Path, tmp_path: Path) -> None:
    """Static scales on outliers that nothing has smoothed are what SmoothQuant was made against."""
    for method in ("rtn", "smoothquant"):
        quantize(source, tmp_path / method, activations="static", **{**ROWS, "method": method})
    smoothed, plain = (_engine_error(source, tmp_path / m) for m in ("smoothquant", "rtn"))
    assert smoothed < 0.7 * plain
    assert "folds" in _proof(tmp_path / "smoothquant")


def test_a_run_that_was_stopped_ends_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(what: str, done: float, total: float) -> None:
        if what == "quantizing" and done == 1:
            raise StoppedError

    rule = {"activations": "outliers3", **ROWS}
    with pytest.raises(StoppedError):
        quantize(source, tmp_path / "out", progress=stop, **rule)
    done = quantize(source, tmp_path / "out", **{**rule, "threads": 1})
    assert done.outcome is not None
    assert done.outcome.resumed == 1
    quantize(source, tmp_path / "whole", **rule)
    for name in ("model.safetensors", "config.json", "quantization.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_bytes_are_predicted_with_the_scales(source: Path, tmp_path: Path) -> None:
    done = quantize(source, tmp_path / "out", activations="static", **ROWS)
    assert done.outcome is not None
    assert done.outcome.bytes == done.prediction.bytes


def test_linears_kept_in_another_format_have_no_rule(source: Path, tmp_path: Path) -> None:
    keep = [r"down_proj=bf16", r"o_proj=w8-g32"]
    quantize(source, tmp_path / "out", activations="static", keep=keep, **ROWS)
    forms = {t.name: t.form for t in load_packed(tmp_path / "out").report}
    assert forms["layers.0.qkv"] == "w8a8+static"
    assert forms["layers.0.o"] == "w8a8-g32"
    assert forms["layers.0.down"] == "bf16"
    rules = {p["name"]: p["activations"] for p in _proof(tmp_path / "out")["linears"]}
    assert rules["model.layers.0.mlp.down_proj"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "dynamic"}, "activations: 'dynamic'.*row, hadamard64, static, outliersM"),
        ({"activations": "static+outliers3"}, "activations"),
        ({"activations": "outliers0"}, "activations"),
        ({"activations": "outliers64"}, "M from 1 to 63"),
        ({"activations": "static", "bits": 4}, "--bits 8 --group-size row"),
        ({"activations": "static", "group_size": 32}, "--bits 8 --group-size row"),
        ({"activations": "static", "format": "gptq"}, "native or compressed-tensors"),
        ({"activations": "static", "method": "fp8"}, "together with --method smoothquant"),
        ({"activations": "static", "auto": True, "gate": "fast"}, "activations"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(source, tmp_path / "out", **{**ROWS, **changes})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is not an object"),
        ({"form": "w8a8-g32"}, "form is 'w8a8-g32'"),
        ({"form": "w8a8+static"}, r"form is 'w8a8\+static'"),
        ({"form": 8}, "form is 8"),
        ({"form": "w8a8+outliers1"}, "missing in outlier_columns"),
        ({"form": "w8a8+row", "outlier_columns": [1]}, "outlier_columns is"),
        ({"form": "w8a8+row", "outlier_columns": {"a": [1, 1]}}, "each once"),
        ({"form": "w8a8+row", "outlier_columns": {"a": [-1]}}, "each once"),
    ],
)
def test_damaged_rules_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, value: Any, message: str
) -> None:
    folder = _copy(folders["row"], tmp_path / "model", {ACTIVATIONS: value})
    with pytest.raises(CheckpointError, match=message):
        load_packed(folder)


def test_columns_and_scales_beyond_their_range_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    rules = _config(folders["outliers3"])[ACTIVATIONS]
    rules["outlier_columns"]["model.layers.1.self_attn.q_proj"] = [1, 2, 64]
    folder = _copy(folders["outliers3"], tmp_path / "columns", {ACTIVATIONS: rules})
    with pytest.raises(CheckpointError, match="names the column 64"):
        load_packed(folder)
    rules["outlier_columns"]["model.layers.1.self_attn.q_proj"] = [1, 2, 3]
    folder = _copy(folders["outliers3"], tmp_path / "fused", {ACTIVATIONS: rules})
    apart = load_packed(folder).file
    named = {role: apart.weight(f"layers.1.{role}").outliers for role in "qkv"}
    assert named["q"] is not None
    assert named["q"].tolist() == [1, 2, 3]
    assert named["k"] is not None
    assert named["v"] is not None
    assert named["k"].tolist() == named["v"].tolist() != [1, 2, 3]
    folder = _copy(folders["static"], tmp_path / "scales", {})
    _set_scale(folder, "model.layers.1.mlp.down_proj", 0.0)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.input_scale.*above zero"):
        load_packed(folder)
    path = folder / "model.safetensors"
    path.write_bytes(
        path.read_bytes().replace(b"1.mlp.down_proj.input_s", b"1.mlp.down_proj.other_s")
    )
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.down_proj.input_scale.*is missing"):
        load_packed(folder)


def test_of_several_static_scales_of_one_input_the_largest_counts(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As vLLM has it: q, k and v run as one there too."""
    folder = _copy(folders["static"], tmp_path / "model", {})
    for role, scale in (("q", 0.5), ("k", 2.0), ("v", 1.0)):
        _set_scale(folder, f"model.layers.0.self_attn.{role}_proj", scale)
    amax = load_packed(folder).file.weight("layers.0.qkv").amax
    assert amax is not None
    assert amax.tolist() == [254.0]


def _copy(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy of a folder with another config."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = {**_config(folder), **changes}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _set_scale(folder: Path, module: str, scale: float) -> None:
    """Write another static scale into a folder."""
    info = read_safetensors_header(folder / "model.safetensors")[f"{module}.input_scale"]
    with info.path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float32(scale).tobytes())


@pytest.mark.parametrize("rule", RULES)
def test_the_error_is_that_of_the_contract(rule: str) -> None:
    """What the proof is computed from equals the reference, up to the rotation's last bits."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 96)).astype(np.float32)
    x[:, [7, 50, 51]] *= 40
    x[4] = 0
    form = parse_activations(rule, 96)
    decided = InputRule.of(form, InputStats.of(x[:10], sizes=True))
    kept = x.copy()
    if decided.outliers is not None:
        assert sorted(decided.outliers.tolist()) == [7, 50, 51]
        kept[:, decided.outliers] = 0
    rows = quantize_row(kept, None if form.is_rotated else 1, decided.amax)
    values = mul32(rows.codes.astype(np.float32), rows.scales)
    got = decided.rounded(x)
    if form.is_rotated:
        assert np.linalg.norm(got - x) < 0.05 * np.linalg.norm(x)
        return
    if decided.outliers is not None:
        np.testing.assert_allclose(got[:, decided.outliers], x[:, decided.outliers], rtol=2**-8)
        values[:, decided.outliers] = got[:, decided.outliers]
    np.testing.assert_array_equal(got, values)


def test_names_of_forms_are_read_back() -> None:
    for name in ("w8a8", "w8a8+row", "w8a8+static", "w8a8+outliers32", "w8a8+hadamard64+outliers1"):
        form = WeightFormat.parse(name)
        assert form.name == name
        assert WeightFormat.parse(form.full_form) == form
    assert WeightFormat.parse("w8a8+row+outliers3").name == "w8a8+outliers3"
    for name in ("w8a8+", "w8a8+outliers", "w8a8+outliers257", "w8a8+static+outliers2", "w8a8-row"):
        with pytest.raises(ConfigError, match=r"w8a8\+static"):
            WeightFormat.parse(name)
