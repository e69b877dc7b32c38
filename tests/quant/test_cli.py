"""`trivet quantize` as a command: the contract's keys, exit codes, one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.tiny_models import Variant, build_folder, build_gguf
from trivet.cli.app import run
from trivet.evaluate import default_ledger

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=2, tied=True)
KEYS = {"path", "bytes", "predicted_bytes", "seconds", "peak_rss_bytes", "verdict", "loaders"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("cli") / "model", SHAPE, dtype="F32")


def last_line(text: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    return result


def test_the_contract(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["quantize", str(source), "-o", str(out), "--method", "gptq", "--bits", "4"]
    words += ["--group-size", "32", "--sym", "--act-order", "static", "--samples", "8"]
    words += ["--window", "64", "--seed", "0", "--gate", "off", "--threads", "2"]
    assert run([*words, "--json"]) == 0
    captured = capsys.readouterr()
    result = last_line(captured.out)
    assert result.keys() >= KEYS
    assert result["path"] == str(out)
    assert result["bytes"] == result["predicted_bytes"]
    assert result["verdict"] is None
    assert result["loaders"]["trivet"]["loads"] is True
    assert "predicted" in captured.err
    assert (out / "quantization.json").exists()


def test_a_dry_run_says_what_it_would_come_to(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(source), "-o", str(tmp_path / "out"), "--group-size", "32"]
    assert run([*words, "--dry-run", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert result["path"] is None
    assert result["predicted_bytes"] > 0
    assert result["stored_bytes"] == (source / "model.safetensors").stat().st_size
    assert result["stored_dtype"] == "F32"
    assert run([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().err
    share = result["predicted_bytes"] / result["stored_bytes"]
    assert f"{result['stored_bytes']:,} bytes as stored, F32; the result is {share:.0%}" in shown
    assert "of bf16)" in shown
    assert not list(tmp_path.iterdir())


def test_what_is_counted_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(source), "--dry-run", "-o", str(tmp_path / "out"), "--method", "rtn"]
    assert run([*words, "--group-size", "32"]) == 0
    assert "  linears         14 x w4-g32\n" in capsys.readouterr().err
    assert run([*words, "--format", "gguf:Q8_0"]) == 0
    shown = capsys.readouterr().err
    assert "  tensors         15 x Q8_0, 5 x F32\n" in shown
    assert "linears" not in shown
    file = build_gguf(tmp_path / "model.gguf", SHAPE)
    words = ["quantize", str(file), "--dry-run", "-o", str(tmp_path / "out"), "--method", "none"]
    assert run(words) == 0  # to a folder in floats, where nothing is counted
    shown = capsys.readouterr().err
    assert "predicted" in shown
    assert "linears" not in shown


@pytest.mark.parametrize("verdict", ["reject", "undecided"])
def test_a_negative_verdict_ends_with_1(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    def judge(settings: Any, candidate: Path) -> dict[str, Any]:
        assert settings.evaluate["ledger_path"] == default_ledger()
        return {"verdict": verdict, "reasons": ["too far"], "next_step": "more bits"}

    monkeypatch.setattr("trivet.quantization._judge", judge)
    words = ["quantize", str(source), "-o", str(tmp_path / "out"), "--method", "rtn"]
    assert run([*words, "--group-size", "32"]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--group-size", "many"], "group_size"),
        (["--bits", "5"], "bits"),
        (["--method", "smoothquant", "--activations", "often"], "activations: 'often'"),
        (["--activations", "static"], "together with --method smoothquant"),
        (["--keep", "nothing=bf16", "--group-size", "32"], "keep"),
        (["--traffic", "/nowhere.jsonl", "--group-size", "32"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert run(["quantize", str(source), "-o", str(tmp_path / "out"), *words]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
