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
FAULTS = """
extern "C" int read_values(int size, int count) {
    int* values = new int[size]();
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += values[i];
    delete[] values;
    return sum;
}
extern "C" int shift(int count) { return 1 << count; }
"""
TESTS = """
import ctypes
faults = ctypes.CDLL({library!r})
def test_sound(): assert faults.read_values(4, 4) == 0 and faults.shift(3) == 8
def test_overrun(): faults.read_values(4, 5)
def test_undefined_shift(): faults.shift(40)
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
    source, library = tmp_path / "faults.cpp", tmp_path / "faults.so"
    source.write_text(FAULTS)
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-shared", "-fPIC", "-O1"]
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    tests = tmp_path / "test_faults.py"
    tests.write_text(TESTS.format(library=str(library)))
    options: list[str | Path] = ["--quick", "--rootdir", tmp_path, tests, "-k"]
    assert _sanitize(*options, "sound").returncode == 0
    for name, report in (
        ("overrun", "heap-buffer-overflow"),
        ("undefined_shift", "shift exponent 40 is too large"),
    ):
        done = _sanitize(*options, name)
        assert done.returncode == REPORTED, done.stdout
        assert report in done.stderr
