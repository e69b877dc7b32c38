"""The short form of `make test-sanitize`: kernels without a report of a sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test-sanitize"
REPORTED = 99
OVERRUN = """
extern "C" int beyond(int count) {
    int* values = new int[4]{1, 2, 3, 4};
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += values[i];
    delete[] values;
    return sum;
}
"""
TEST = """
import ctypes
def test_reads_within(): assert ctypes.CDLL({library!r}).beyond(4) == 10
def test_reads_beyond(): ctypes.CDLL({library!r}).beyond(5)
"""


def _refusal() -> str | None:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return "SANITIZERS NOT RUN: they need Linux and gcc"
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    if not Path(runtime.stdout.strip()).is_absolute():
        return "SANITIZERS NOT RUN: gcc's libasan is not installed"
    if shutil.which("cmake") is None and not (Path(sys.executable).parent / "cmake").exists():
        return "SANITIZERS NOT RUN: building the core needs cmake"
    return None


def _sanitize(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *map(str, options)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_run_without_a_report(tmp_path: Path) -> None:
    reason = _refusal()
    if reason is not None:
        pytest.skip(reason)
    done = _sanitize("--quick")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout
    # The module that ran is instrumented, and a report ends a run of this script.
    module = next((ROOT / "build" / "sanitize").glob("_core.*.so"))
    assert b"__asan_report_load" in module.read_bytes()
    source, library = tmp_path / "overrun.cpp", tmp_path / "overrun.so"
    source.write_text(OVERRUN)
    compiler = ["g++", "-fsanitize=address", "-shared", "-fPIC", "-O1", "-o", str(library)]
    subprocess.run([*compiler, str(source)], check=True)
    broken = tmp_path / "test_overrun.py"
    broken.write_text(TEST.format(library=str(library)))
    done = _sanitize("--quick", "--rootdir", tmp_path, broken, "-k", "reads_beyond")
    assert done.returncode == REPORTED, done.stdout
    assert "heap-buffer-overflow" in done.stderr
