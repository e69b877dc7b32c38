"""Levels this CPU lacks, in software: the native tests again, AVX-512 and AMX emulated.

The emulated core (CMake option TRIVET_EMULATE, sources in native/emulation) is built once under
build/emulated. Levels the CPU has are tested for real by the other files, so this run is skipped
where there are none to emulate.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.native import _core

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulated"


def _refusal() -> str | None:
    """Why this run makes no sense or cannot be had here."""
    levels = dict(_core.isa_levels())
    if levels["avx2"]:
        return f"EMULATED LEVELS NOT TESTED: emulation needs AVX2, but {levels['avx2']}"
    if not levels["avx512"] and not levels["amx"]:
        return "AVX-512 and AMX are tested on the CPU itself"
    if not _tool("cmake").exists() or importlib.util.find_spec("nanobind") is None:
        return "EMULATED LEVELS NOT TESTED: building the core needs cmake and nanobind"
    return None


def _tool(name: str) -> Path:
    """A build tool of the virtual environment, or of the system."""
    own = Path(sys.executable).parent / name
    return own if own.exists() else Path("/usr/bin") / name


def _run(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def emulated_core() -> Path:
    reason = _refusal()
    if reason is not None:
        pytest.skip(reason)
    configure: list[str | Path] = [
        _tool("cmake"), "-S", ROOT, "-B", BUILD, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DTRIVET_EMULATE=ON",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
    ]  # fmt: skip
    _run(configure)
    _run([_tool("cmake"), "--build", BUILD, "--target", "_core"])
    return next(BUILD.glob("_core.*.so"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ["avx512", "amx"])
def test_native_tests_pass_on_the_emulated_level(emulated_core: Path, level: str) -> None:
    env = dict(
        os.environ,
        TRIVET_TEST_CORE=str(emulated_core),
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    )
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "native.replaced_core", "-k", level]
    output = _run([*tests, "tests/native", f"--ignore={Path(__file__).relative_to(ROOT)}"], env)
    assert " passed" in output, output[-500:]
