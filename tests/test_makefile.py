"""What `make` says while it works: no step of minutes is silent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["install", "test", "test-interop"])
def test_a_line_is_said_before_each_long_step(target: str, tmp_path: Path) -> None:
    """pip is quiet: every run of it, or of all tests, comes after a line that says what it does."""
    command = ["make", "-n", "-B", target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said: list[str] = []
    long_steps = 0
    for line in done.stdout.splitlines():
        if line.startswith("touch "):
            said = []  # another part begins
        elif match := re.fullmatch(r'echo "(.*) \.\.\."', line):
            said.append(match[1])
        elif re.search(r"pip .*\binstall\b|scripts/check|-m pytest", line):
            long_steps += 1
            assert said, line
    assert long_steps >= 4
    native = "building the native core and installing trivet (about 2 minutes)"
    assert f'echo "{native} ..."' in done.stdout
