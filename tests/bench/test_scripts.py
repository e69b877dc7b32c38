"""Scripts under benchmarks that no other test runs: each in a short form, to its JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _run(script: str, *words: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_engine_overhead() -> None:
    result = _run("engine_overhead.py", "--steps", "2")
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


@pytest.mark.demo
@pytest.mark.slow
def test_busy_neighbours(tmp_path: Path) -> None:
    words = ("-o", tmp_path / "busy.json", "--weights", "w8a8", "--rounds", "1", "--steps", "5")
    _run("busy_neighbours.py", *words)
    [one] = json.loads((tmp_path / "busy.json").read_text())["rounds"]
    assert one["ratio"] == one["busy_p99_s"] / one["quiet_p99_s"] > 0
