"""lm-eval's own client against `trivet serve`; `make test` sets its environment up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.data import demo_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "interop" / "lm_eval_client.py"


@pytest.mark.demo
@pytest.mark.slow
def test_scores_equal_those_in_process(tmp_path: Path) -> None:
    demo_file()
    output = tmp_path / "lm_eval.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["faults"] == []
    assert report["lm_eval"] == "0.4.13"
    assert len(report["runs"]) == 3
    for run in report["runs"]:
        assert run["tokenizer"] == "RemoteTokenizer"
        assert [score for score, _ in run["scores"]] == pytest.approx(report["expected"], abs=1e-4)
