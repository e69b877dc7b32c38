"""Scripts under benchmarks that no other test runs: each in a short form, to its JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _run(script: str, *words: str | Path, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in codes, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_engine_overhead(tmp_path: Path) -> None:
    result = _run("engine_overhead.py", "--steps", "2", "-o", tmp_path / "overhead.json")
    assert result == json.loads((tmp_path / "overhead.json").read_text())
    cases = {(row["draft"], row["batch"]) for row in result["rows"]}
    assert cases == {(draft, batch) for draft in ("off", "ngram") for batch in (1, 8, 32, 64)}
    assert all(0 < row["p10_us"] <= row["p90_us"] for row in result["rows"])


def test_start(tiny_model: Path, tmp_path: Path) -> None:
    words = ("--model", tiny_model, "--runs", "1", "--loads", "0", "-o", tmp_path / "start.json")
    result = _run("start.py", *words, "--threads", "1")
    assert result == json.loads((tmp_path / "start.json").read_text())
    assert result["options"] == ["--threads", "1"]
    figures = result["trees"]["installed"]
    for name in (
        "ready_s",
        "first_token_s",
        "second_first_token_s",
        "gateway_cpu_s",
        "worker_cpu_s",
    ):
        assert figures[name] > 0
        assert figures["spread"][name] == [figures[name]] * 2


def test_timer_cost(tiny_model: Path, tmp_path: Path) -> None:
    words = ("--model", tiny_model, "--pairs", "8", "-o", tmp_path / "out" / "timer_cost.json")
    result = _run("timer_cost.py", *words, codes=(0, 1))  # 1: certainly above a share of the step
    assert result == json.loads((tmp_path / "out" / "timer_cost.json").read_text())
    assert result["phases"]["decode"]["pairs"] == 8


@pytest.mark.slow
def test_roofline(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    words = ("--model", tiny_model, "--threads", "1", "-o", tmp_path / "roofline.json")
    result = _run("roofline.py", *words, codes=(0, 1))  # 1: the machine was busy
    assert result == json.loads((tmp_path / "roofline.json").read_text())
    assert result["roofline"]["limits"]["decode_tok_s"] > 0
    assert {"cpu", "trivet", "isa_levels"} <= result["machine"].keys()
    is_kept = result["roofline"]["path"] is not None
    assert is_kept == (result["roofline"]["not_kept"] is None)


@pytest.mark.demo
@pytest.mark.slow
def test_busy_neighbours(tmp_path: Path) -> None:
    words = ("-o", tmp_path / "busy.json", "--weights", "w8a8", "--rounds", "1", "--steps", "5")
    _run("busy_neighbours.py", *words)
    [one] = json.loads((tmp_path / "busy.json").read_text())["rounds"]
    assert one["ratio"] == one["busy_p99_s"] / one["quiet_p99_s"] > 0


def test_served_formats(tiny_model: Path, tmp_path: Path) -> None:
    """Act-order and fp8, which run in forms of their own, against the native formats."""
    words = (
        "--model", tiny_model, "--work", tmp_path / "work", "--rounds", "2",
        "-o", tmp_path / "served.json",
        "--only", "gptq w4-g32 act-order", "compressed-tensors fp8-channel",
    )  # fmt: skip
    result = _run("served_formats.py", *words)
    assert result == json.loads((tmp_path / "served.json").read_text())
    forms = {name: (case["form"], case["native"]) for name, case in result["cases"].items()}
    assert forms == {
        "gptq w4-g32 act-order": ("w4a8-g32", "w4a8-g32"),
        "compressed-tensors fp8-channel": ("fp8-row", "w8a8-g128"),
    }
    for case in result["cases"].values():
        assert all(len(case[kind]["served"]) == 2 for kind in ("decode", "prefill"))
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["float"]
    again = _run("served_formats.py", *words[:-2], "gguf Q8_0")
    assert again["cases"].keys() == {*result["cases"], "gguf Q8_0"}
    one = "compressed-tensors fp8-channel"
    assert again["cases"][one] == result["cases"][one]


def test_gate_corruptions(tiny_model: Path, tmp_path: Path) -> None:
    """Good forms in turn over the seeds; a second run goes on where the file ends."""
    output = tmp_path / "rates.json"
    words = ("--model", tiny_model, "--part", "good", "--per-seed", "1", "-o", output)
    first = _run("gate_corruptions.py", *words, "--seeds", "1")
    result = _run("gate_corruptions.py", *words, "--seeds", "2")
    found = json.loads(output.read_text())
    assert result == found["summary"]
    assert (first["good"], result["good"], result["good_candidates"]) == (1, 2, 2)
    cases = [(case["weights"], case["kv"], case["seed"]) for case in found["good"]]
    assert cases == [("auto", "bf16", 0), ("auto", "int8", 1)]
    assert all(case["verdict"] != "pass" for case in found["good"])  # random weights: no votes
