"""Whole models: planned, quantized, proved, resumed; and what must be refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_models import Variant, build_folder, build_gguf
from trivet.checkpoint import GGUFCheckpoint, resolve_model
from trivet.checkpoint.gguf_write import TensorPlan, write_gguf_file
from trivet.checkpoint.huggingface import read_safetensors_header
from trivet.config import ModelConfig
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.loader import load_model
from trivet.models import open_model
from trivet.models.reference import float_logits
from trivet.quant import load_packed, pipeline
from trivet.quant.observe import LayerWeights
from trivet.quant.plan import loaders, make_plan, parse_target
from trivet.quant.proof import LinearProof, check_proof
from trivet.quantization import quantize

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=3, tied=True)
QUICK: dict[str, Any] = {"samples": 12, "window": 64, "group_size": 32, "gate": "off", "threads": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("quantize") / "model", SHAPE, dtype="F32")


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def logit_error(source: Path, quantized: Path) -> float:
    """Relative change of the logits of a fixed text."""
    tokens = np.random.default_rng(5).integers(3, SHAPE.vocab, 48).tolist()
    want = float_logits(open_model(resolve_model(source)), tokens)
    got = float_logits(open_model(resolve_model(quantized)), tokens)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def proof_of(folder: Path) -> dict[str, Any]:
    proof: dict[str, Any] = json.loads((folder / "quantization.json").read_text())
    return proof


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq", "smoothquant", "fp8"])
def test_every_method_writes_what_the_loader_reads(
    source: Path, tmp_path: Path, method: str
) -> None:
    done = quantize(source, tmp_path / "out", method=method, **QUICK)
    assert done.path == tmp_path / "out"
    assert done.outcome is not None
    assert done.outcome.bytes == done.prediction.bytes
    limit = 0.2 if method in ("smoothquant", "fp8") else 0.5
    assert logit_error(source, tmp_path / "out") < limit
    linears = proof_of(tmp_path / "out")["linears"]
    assert len(linears) == 7 * SHAPE.layers
    for linear in linears:
        assert linear["error_after"] <= linear["error_before"] * 1.0000001
        if method in ("gptq", "awq+gptq") and not linear["replaced"]:
            assert linear["tokens"] > 500
            assert linear["damp"] in (0.01, 0.05, 0.2)  # the asked one, or a retry
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_engine_holds_what_is_written_exactly(
    source: Path, tmp_path: Path, method: str, bits: int
) -> None:
    """Symmetric 8 bits have no code -128, which the engine's int8 does not hold."""
    for group in (32, None):
        out = tmp_path / f"out-{group}"
        quantize(source, out, method=method, bits=bits, **{**QUICK, "group_size": group})
        linears = [
            tensor for tensor in load_packed(out).report if tensor.name.startswith("layers.")
        ]
        assert len(linears) >= 4 * SHAPE.layers
        assert [(t.name, t.form, t.note) for t in linears if not t.exact] == []


@pytest.mark.parametrize("format", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("scale", ["tensor", "channel", "block"])
def test_fp8_weights_keep_their_kind_of_scale_whatever_their_shape(
    tmp_path: Path, format: str, scale: str
) -> None:
    """Matrices of 128 x 128 are one block, and still blocks among others."""
    square = Variant(hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=256, layers=2, tied=True)
    source = build_folder(tmp_path / "source", square, dtype="F32")
    settings = {**QUICK, "method": "fp8", "fp8": scale, "format": format}
    quantize(source, tmp_path / "out", **settings)
    assert logit_error(source, tmp_path / "out") < 0.2
    infos = read_safetensors_header(tmp_path / "out" / "model.safetensors")
    is_fp8_block = (format, scale) == ("fp8", "block")
    suffix = "weight_scale_inv" if is_fp8_block else "weight_scale"
    shapes = {infos[f"model.layers.0.{name}.{suffix}"].shape for name in ("self_attn.q_proj",)}
    assert shapes == {{"tensor": (1,), "channel": (128, 1), "block": (1, 1)}[scale]}


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("sym", [True, False])
def test_formats_hold_the_same_values(source: Path, tmp_path: Path, format: str, sym: bool) -> None:
    quantize(source, tmp_path / "native", method="rtn", sym=sym, **QUICK)
    quantize(source, tmp_path / "other", method="rtn", sym=sym, format=format, **QUICK)
    first, second = (open_model(resolve_model(tmp_path / name)) for name in ("native", "other"))
    for role in ("q", "down"):
        a = LayerWeights.read(first, 1).matrices[role]
        b = LayerWeights.read(second, 1).matrices[role]
        np.testing.assert_array_equal(a, b)


def test_gptq_is_nearer_than_round_to_nearest(source: Path, tmp_path: Path) -> None:
    for method in ("rtn", "gptq"):
        quantize(source, tmp_path / method, method=method, bits=3, **QUICK)
    ratios = [
        linear["error_after"] / linear["error_before"]
        for linear in proof_of(tmp_path / "gptq")["linears"]
    ]
    assert float(np.mean(ratios)) < 0.9


class Killed(BaseException):
    """What a test throws where a process would die."""


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    source: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(source, tmp_path / "whole", method=method, **QUICK)
    whole = hashes(tmp_path / "whole")

    def die_at(layer: int) -> Any:
        def progress(what: str, done: float, total: float) -> None:
            if what == "quantizing" and done == layer:
                raise Killed

        return progress

    for layer in (1, 2):
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", method=method, **QUICK, progress=die_at(layer))
        assert not (tmp_path / "out").exists()
    # A file that was being written when the process died is not taken for a layer.
    partial = tmp_path / "out.candidate.partial"
    (partial / "layer-0001.npz").write_bytes((partial / "layer-0001.npz").read_bytes()[:1000])
    done = quantize(source, tmp_path / "out", method=method, **{**QUICK, "threads": 1})
    assert done.outcome is not None
    assert done.outcome.resumed == 1
    assert hashes(tmp_path / "out") == whole


def test_a_process_killed_outright_leaves_nothing_half_done(source: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trivet", "quantize", str(source), "--group-size", "32"]
    words += ["--samples", "12", "--window", "64", "--gate", "off", "--threads", "2"]
    out, partial = tmp_path / "out", tmp_path / "out.candidate.partial"
    for layer in (0, 1):
        process = subprocess.Popen([*words, "-o", str(out)], stderr=subprocess.DEVNULL)
        while process.poll() is None and not (partial / f"layer-{layer:04d}.npz").exists():
            time.sleep(0.002)
        process.kill()
        process.wait()
    if not out.exists():  # a fast machine may have been done before it was killed
        subprocess.run([*words, "-o", str(out)], check=True, stderr=subprocess.DEVNULL)
    quantize(source, tmp_path / "whole", method="gptq", **QUICK)
    assert hashes(out) == hashes(tmp_path / "whole")


def test_another_seed_does_not_take_over_old_layers(source: Path, tmp_path: Path) -> None:
    def die(what: str, done: float, total: float) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        quantize(source, tmp_path / "out", seed=1, **QUICK, progress=die)
    done = quantize(source, tmp_path / "out", seed=2, **QUICK)
    assert done.outcome is not None
    assert done.outcome.resumed == 0


def test_keep_sets_a_format_by_hand(source: Path, tmp_path: Path) -> None:
    keep = [r"layers\.0\.=bf16", r"mlp\.down_proj=w8-g32"]
    done = quantize(source, tmp_path / "out", method="rtn", keep=keep, **QUICK)
    targets = {p["name"]: p["target"] for p in proof_of(tmp_path / "out")["linears"]}
    assert targets["model.layers.0.self_attn.q_proj"] == "bf16"
    assert targets["model.layers.0.mlp.down_proj"] == "w8-g32"
    assert targets["model.layers.1.self_attn.q_proj"] == "w4-g32"
    assert done.prediction.targets == {"bf16": 6, "w8-g32": 3, "w4-g32": 12}


def test_of_two_patterns_that_match_the_later_decides(source: Path, tmp_path: Path) -> None:
    def targets(name: str, *keep: str, **more: Any) -> dict[str, str]:
        quantize(source, tmp_path / name, method="rtn", keep=keep, **QUICK, **more)
        return {p["name"]: p["target"] for p in proof_of(tmp_path / name)["linears"]}

    down = "model.layers.1.mlp.down_proj"
    assert targets("a", "mlp=w8-g32", "down_proj=bf16")[down] == "bf16"
    assert targets("b", "down_proj=bf16", "mlp=w8-g32")[down] == "w8-g32"
    file = {"format": "gguf:Q4_0"}
    assert targets("c", "ffn=Q8_0", "ffn_down=f16", **file)["blk.1.ffn_down.weight"] == "F16"
    assert targets("d", "ffn_down=F16", "ffn=q8_0", **file)["blk.1.ffn_down.weight"] == "Q8_0"
    with pytest.raises(
        ConfigError, match=r"a pattern that matches a matrix by its GGUF name, such as blk\.0"
    ):
        targets("e", "down_proj=F16", **file)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("nothing_like_it=bf16", "a pattern that matches"),
        ("q_proj=w5-g64", "keep: 'w5-g64'"),
        ("q_proj", "REGEX=FORMAT"),
        ("(=bf16", "regular expression"),
        ("layers.0.self_attn.q_proj=w8-g32", "they run as one"),
    ],
)
def test_keep_that_cannot_be_is_refused(
    source: Path, tmp_path: Path, keep: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(source, tmp_path / "out", method="rtn", keep=[keep], **QUICK)
    assert not list(tmp_path.iterdir())


def test_a_quantized_source_is_refused_unless_asked(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "once", method="rtn", **QUICK)
    with pytest.raises(QuantError, match=r"quantized already.*--requantize"):
        quantize(tmp_path / "once", tmp_path / "twice", method="rtn", **QUICK)
    gguf = build_gguf(tmp_path / "model.gguf", SHAPE, qtype="Q4_0")
    with pytest.raises(QuantError, match="quantized already"):
        quantize(gguf, tmp_path / "twice", method="rtn", **QUICK)
    quantize(gguf, tmp_path / "twice", method="rtn", requantize=True, **QUICK)
    assert proof_of(tmp_path / "twice")["requantized"] is True


def test_values_on_a_grid_are_found_without_a_label() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    assert pipeline.grid_share(weight) == 0
    from trivet.quant.grid import Grid, dequantize
    from trivet.quant.methods.rtn import quantize_rtn

    widened = dequantize(quantize_rtn(weight, Grid(4, 64)))
    assert pipeline.grid_share(widened) > 0.9


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    done = quantize(source, tmp_path / "out", dry_run=True, **QUICK)
    assert done.path is None
    assert not list(tmp_path.iterdir())
    made = quantize(source, tmp_path / "out", method="rtn", **QUICK)
    assert made.outcome is not None
    assert made.outcome.bytes == done.prediction.bytes


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.rejected").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        quantize(source, tmp_path / "out", method="rtn", **QUICK)


def test_a_budget_below_the_prediction_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        quantize(source, tmp_path / "out", method="rtn", max_bytes=1000, **QUICK)


def test_a_group_that_does_not_fit_names_the_layer(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantError, match=r"self_attn.q_proj: group_size 128 does not divide 64"):
        quantize(source, tmp_path / "out", **{**QUICK, "group_size": 128})


def test_a_proof_with_a_hole_is_no_proof() -> None:
    linear = LinearProof("a", "w4-g32", "gptq", 100, 0.01, 0, 0.1, 0.05, 100)
    assert check_proof([linear], ["a"], predicted_bytes=100, written_bytes=100) == []
    with pytest.raises(QuantError, match="left untouched, first b"):
        check_proof([linear], ["a", "b"], predicted_bytes=100, written_bytes=100)
    broken = dataclasses.replace(linear, error_after=float("nan"))
    with pytest.raises(QuantError, match="not a number"):
        check_proof([broken], ["a"], predicted_bytes=100, written_bytes=100)
    raised = dataclasses.replace(linear, damp_raised=2)
    with pytest.raises(QuantError, match="had to be raised"):
        check_proof([raised], ["a"], predicted_bytes=100, written_bytes=100)
    with pytest.raises(QuantError, match="were predicted"):
        check_proof([linear], ["a"], predicted_bytes=100, written_bytes=150)
    with pytest.raises(QuantError, match="one twice"):
        check_proof([linear, linear], ["a"], predicted_bytes=100, written_bytes=100)


def test_who_loads_it_is_known_before(source: Path) -> None:
    spec = open_model(resolve_model(source)).spec

    def loads(target: str, format: str, act_order: str = "static") -> dict[str, bool]:
        answers = loaders(make_plan(spec, parse_target(target)), format, act_order)
        return {name: a["loads"] for name, a in answers.items() if isinstance(a, dict)}

    plain = loads("w4-g32", "gptq")
    assert plain == {
        "trivet": True,
        "vllm-gpu": True,
        "vllm-cpu": True,
        "transformers": True,
        "llama.cpp": False,
    }
    assert not loads("w4-g32-zp", "gptq")["vllm-gpu"]
    assert not loads("w3-g32", "gptq")["vllm-gpu"]
    assert not loads("w4-g32", "gptq", "desc_act")["vllm-gpu"]
    assert not loads("w8-g32", "gptq")["vllm-cpu"]
    assert loads("w4-g32-zp", "awq")["vllm-cpu"]
    assert not loads("w3-g32", "compressed-tensors")["vllm-cpu"]
    for scale in ("tensor", "channel"):  # both have another name for it, or no place
        assert not loads(f"fp8-{scale}", "fp8")["transformers"]
    assert loads("fp8-tensor", "fp8")["vllm-gpu"]
    assert not loads("fp8-channel", "fp8")["vllm-gpu"]
    assert not loads("fp8-block", "fp8")["transformers"]  # 64 columns are part of a block
    assert loaders(make_plan(spec, parse_target("w4-g32")), "gptq", "static")[
        "max_tensor_parallel"
    ] == 2  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "method"),
        ({"format": "exl2"}, "format"),
        ({"gate": "sometimes"}, "gate"),
        ({"method": "fp8", "format": "gptq"}, "format"),
        ({"format": "awq", "bits": 3}, "format"),
        ({"format": "awq", "act_order": "desc_act"}, "act_order"),
        ({"samples": 0}, "samples"),
        ({"method": "kquant", "format": "gguf:Q4_0", "auto": True}, "format"),
        ({"method": "rtn", "format": "gguf:Q4_0", "mixed": "w8-g32"}, "format"),
        ({"mixed": "w8-g32", "auto": True, "max_bytes": 1 << 40}, "mixed"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(source, tmp_path / "out", **{**QUICK, **changes})
    assert not (tmp_path / "out").exists()


def unannounced(prediction: Any) -> None:
    raise AssertionError("what cannot run is not predicted")


@pytest.mark.parametrize("changes", [{"window": 1}, {"general_share": 1.5}, {"samples": 0}])
def test_settings_of_texts_are_named_before_the_model_is_opened(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        quantize(tmp_path / "absent", tmp_path / "out", **{**QUICK, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gptq"},
        {"method": "kquant"},
        {"method": "rtn", "auto": True, "gate": "fast"},
        {"method": "rtn", "mixed": "w8-g32", "max_bytes": 1 << 40},
        {"method": "rtn", "bits": 8, "group_size": None, "activations": "static"},
    ],
    ids=str,
)
def test_unusable_traffic_is_named_before_the_prediction(
    source: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = {**QUICK, **changes, "announce": unannounced, "traffic": tmp_path / "t.jsonl"}
    with pytest.raises(CheckpointError, match="cannot be read"):
        quantize(source, tmp_path / "out", **settings)
    (tmp_path / "t.jsonl").write_text('{"prompt": "good"}\n{"odd": 1}')
    with pytest.raises(CheckpointError, match=r"jsonl:2: has keys \['odd'\]"):
        quantize(source, tmp_path / "out", **settings)
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


def test_traffic_is_not_asked_for_where_no_texts_are_read(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", method="rtn", traffic=tmp_path / "absent.jsonl", **QUICK)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_source_without_a_tokenizer_is_told_of_or_refused_at_once(
    tmp_path: Path, kind: str
) -> None:
    goes: dict[str, Any]
    fails: list[dict[str, Any]]
    if kind == "folder":
        bare = build_folder(tmp_path / "bare", SHAPE)
        (bare / "tokenizer.json").unlink()
        goes = {"method": "rtn"}
        fails = [{"method": "rtn", "format": "gguf:Q4_0"}]
    else:
        whole = GGUFCheckpoint(build_gguf(tmp_path / "whole.gguf", SHAPE))
        bare = tmp_path / "bare.gguf"
        keys = {k: v for k, v in whole.metadata.items() if not k.startswith("tokenizer.")}
        plans = [TensorPlan(t.name, t.dtype, t.shape) for t in whole.tensors.values()]
        write_gguf_file(bare, keys, plans, (whole.read_bytes(t.name) for t in plans))
        goes = {"method": "rtn", "format": "gguf:Q4_0", "requantize": True}
        fails = [{"method": "rtn", "requantize": True}, {"method": "none"}]
    done = quantize(bare, tmp_path / "out", **{**QUICK, **goes})
    assert done.outcome is not None
    [warning] = [w for w in done.outcome.warnings if "cannot be served as text" in w]
    assert "tokenizer" in warning
    assert warning in proof_of(tmp_path / "out")["warnings"]
    assert warning in done.as_json()["warnings"]
    fails += [{"method": method, "requantize": True} for method in ("gptq", "kquant")]
    fails += [{**goes, "gate": "fast"}]
    for settings in fails:
        with pytest.raises(CheckpointError, match="tokenizer"):
            quantize(bare, tmp_path / "other", **{**QUICK, **settings, "announce": unannounced})
    assert not list(tmp_path.glob("other*"))


def test_a_source_with_a_tokenizer_is_not_warned_of(source: Path, tmp_path: Path) -> None:
    for name, format in (("folder", "native"), ("file", "gguf:Q8_0")):
        done = quantize(source, tmp_path / name, method="rtn", format=format, **QUICK)
        assert done.outcome is not None
        assert not [w for w in done.outcome.warnings if "served" in w]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("is_own", [False, True])
def test_the_size_of_a_gguf_file_is_predicted_to_the_byte(
    tmp_path: Path, share: float, is_own: bool
) -> None:
    deep = dataclasses.replace(SHAPE, layers=8)  # an importance matrix changes types of the first
    source = build_folder(tmp_path / "a-name", deep)
    traffic = None
    if is_own:
        traffic = tmp_path / "traffic.txt"
        traffic.write_text("the quick brown fox jumps over the lazy dog again. " * 400)
    for method in ("kquant", "rtn"):
        settings = {**QUICK, "method": method, "format": "gguf:Q4_0", "traffic": traffic}
        done = quantize(source, tmp_path / method, general_share=share, **settings)
        assert done.path is not None
        assert done.prediction.bytes == done.path.stat().st_size
        kinds = Counter(t.dtype for t in GGUFCheckpoint(done.path).tensors.values())
        assert done.prediction.targets == kinds
        assert ("Q4_1" in kinds) == (method == "kquant")
        assert done.prediction.counted == "tensors"


@pytest.mark.parametrize("method", ["rtn", "kquant"])
def test_gguf_files_are_made_with_their_proof(source: Path, tmp_path: Path, method: str) -> None:
    done = quantize(source, tmp_path / "out", method=method, format="gguf:Q4_0", **QUICK)
    assert done.path == tmp_path / "out" / "model.gguf"
    assert done.outcome is not None
    assert done.outcome.bytes == done.path.stat().st_size == done.outcome.predicted_bytes
    assert logit_error(source, done.path) < 0.5
    tokens = {linear["tokens"] for linear in proof_of(tmp_path / "out")["linears"]}
    assert (max(tokens) > 500) == (method == "kquant")


@pytest.mark.parametrize(("method", "windows"), [("kquant", 32), ("gptq", 128)])
def test_how_much_is_calibrated_on_unless_said(
    source: Path, tmp_path: Path, method: str, windows: int
) -> None:
    settings = {**QUICK, "method": method, "samples": None, "window": 16}
    quantize(source, tmp_path / "out", **settings)
    assert proof_of(tmp_path / "out")["calibration"]["tokens_asked"] == 16 * windows


def test_a_model_goes_to_gguf_and_back_without_a_change(source: Path, tmp_path: Path) -> None:
    to = quantize(source, tmp_path / "there", method="none", format="gguf:own", **QUICK)
    assert to.path is not None
    back = quantize(to.path, tmp_path / "back", method="none", **QUICK)
    assert back.path == tmp_path / "back"
    assert logit_error(source, back.path) == 0
    with pytest.raises(ConfigError, match="a folder already"):
        quantize(source, tmp_path / "again", method="none", **QUICK)
    with pytest.raises(ConfigError, match="format: 'gptq'"):
        quantize(to.path, tmp_path / "again", method="none", format="gptq", **QUICK)


def test_keep_counts_in_a_conversion_or_is_refused(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, "method": "none", "keep": ["ffn_down=F16"]}
    done = quantize(source, tmp_path / "to", format="gguf:F32", **settings)
    assert done.path is not None
    assert done.prediction.bytes == done.path.stat().st_size
    assert GGUFCheckpoint(done.path).info("blk.1.ffn_down.weight").dtype == "F16"
    for model, format in ((source, "gguf:own"), (done.path, "native")):
        with pytest.raises(ConfigError, match=f"keep: .* nothing with {format}"):
            quantize(model, tmp_path / "other", format=format, **settings)


def test_the_memory_of_a_gguf_file_is_predicted_from_the_model(
    source: Path, tmp_path: Path
) -> None:
    def predicted(method: str, threads: int) -> int:
        settings = {**QUICK, "method": method, "format": "gguf:Q4_0", "threads": threads}
        return quantize(source, tmp_path / "out", dry_run=True, **settings).prediction.memory_bytes

    assert 160 << 20 < predicted("rtn", 1) < predicted("rtn", 4) < 256 << 20
    assert predicted("kquant", 1) > predicted("rtn", 1)


def test_a_method_that_gguf_has_not_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rtn or kquant"):
        quantize(source, tmp_path / "out", method="gptq", format="gguf:Q4_0", **QUICK)


def fake_gate(verdict: str) -> Any:
    def judge(settings: Any, candidate: Path) -> dict[str, Any]:
        assert candidate.exists()
        return {"verdict": verdict, "reasons": ["because"], "next_step": "try another"}

    return judge


@pytest.mark.parametrize(
    ("verdict", "name"),
    [("pass", "out"), ("reject", "out.rejected"), ("undecided", "out.undecided")],
)
def test_the_folder_has_its_name_only_on_pass(
    source: Path, tmp_path: Path, verdict: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.quantization._judge", fake_gate(verdict))
    done = quantize(source, tmp_path / "out", method="rtn", **{**QUICK, "gate": "fast"})
    assert done.path == tmp_path / name
    assert done.verdict == verdict
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert json.loads((tmp_path / name / "gate.json").read_text())["verdict"] == verdict


@pytest.mark.parametrize("format", ["native", "gguf:Q8_0"])
def test_no_packed_cache_of_a_candidate_stays(
    source: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    seen: list[str] = []

    def judge(settings: Any, candidate: Path) -> dict[str, Any]:
        load_model(ModelConfig(model=str(candidate), threads=1))
        seen.extend(path.suffix for path in (tmp_path / "cache").iterdir())
        return {"verdict": "pass", "reasons": []}

    monkeypatch.setattr("trivet.quantization._judge", judge)
    settings = {**QUICK, "gate": "fast", "group_size": 64}
    quantize(source, tmp_path / "out", method="rtn", bits=8, format=format, **settings)
    assert ".trivet" in seen
    assert list((tmp_path / "cache").iterdir()) == []


def test_auto_proves_8_bits_and_stops_at_the_first_pass_at_4(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def judge(settings: Any, candidate: Path) -> dict[str, Any]:
        proof = proof_of(candidate)
        [target] = proof["targets"]
        seen.append(f"{proof['method']} {target}")
        passes = target == "w8-g64" or proof["method"] == "awq+gptq"
        return {"verdict": "pass" if passes else "reject", "reasons": []}

    monkeypatch.setattr("trivet.quantization._judge", judge)
    settings = {**QUICK, "gate": "fast"}
    done = quantize(source, tmp_path / "out", auto=True, **settings)
    assert seen == ["rtn w8-g64", "gptq w4-g64", "gptq w4-g32", "awq+gptq w4-g64"]
    assert done.path == tmp_path / "out"
    assert done.verdict == "pass"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [attempt["verdict"] for attempt in done.attempts] == ["pass", "reject", "reject", "pass"]


def test_auto_keeps_8_bits_when_nothing_smaller_passes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(settings: Any, candidate: Path) -> dict[str, Any]:
        passes = proof_of(candidate)["method"] == "rtn"
        return {"verdict": "pass" if passes else "reject", "reasons": []}

    monkeypatch.setattr("trivet.quantization._judge", judge)
    done = quantize(source, tmp_path / "out", auto=True, **{**QUICK, "gate": "fast"})
    assert done.path == tmp_path / "out"
    assert done.form == "w8-g64"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_auto_goes_no_further_when_8_bits_fail(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.quantization._judge", fake_gate("reject"))
    done = quantize(source, tmp_path / "out", auto=True, **{**QUICK, "gate": "fast"})
    assert done.verdict == "reject"
    assert [p.name for p in tmp_path.iterdir()] == ["out.rejected"]
    assert len(done.attempts) == 1
