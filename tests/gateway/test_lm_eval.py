"""lm-eval's own client against the server, where its environment has been made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.data import demo_file

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "interop" / "lm_eval" / ".installed"


@pytest.mark.demo
@pytest.mark.slow
def test_scores_equal_those_in_process(tmp_path: Path) -> None:
    demo_file()
    if not ENVIRONMENT.exists():
        pytest.skip("LM-EVAL MISSING: run make interop, which installs it under build/interop")
    output = tmp_path / "lm_eval.json"
    script = ROOT / "benchmarks" / "interop" / "lm_eval_client.py"
    done = subprocess.run(
        [sys.executable, str(script), "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["faults"] == []
    for run in report["runs"]:
        assert run["tokenizer"] == "RemoteTokenizer"
        assert [score for score, _ in run["scores"]] == pytest.approx(report["expected"], abs=1e-4)
