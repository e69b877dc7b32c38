"""The short form of benchmarks/soak.py: clients that leave at random leak no page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.toy_server import toy_server

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_clients_that_leave_leak_no_page(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    # Pages for about half of the requests: the others wait or are preempted.
    with toy_server("toy:pages=96", max_num_seqs=48) as server:
        command = [sys.executable, "-W", "error", str(SCRIPT), "--url", server.url]
        command += ["--seconds", "3", "--concurrency", "64", "--leave", "0.3", "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result == json.loads(done.stdout.splitlines()[-1])
    assert result["completed"] > 10
    assert result["left"] > 3
    assert result["failed"] == 0
    assert result["all_pages_free"]
    [worker] = result["workers_after_reset"]
    assert worker["pages"]["free"] == 96
