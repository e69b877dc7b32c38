"""A start of `trivet serve` that does not come to its end: nothing stays, no traceback is shown."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trivet.checkpoint.cache import CacheQuery, writing
from trivet.cli import main
from trivet.config import WeightFormat
from trivet.quant import load_packed


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_an_interrupt_of_the_group_ends_a_start(tiny_model: Path, delay: float) -> None:
    """Ctrl-C reaches gateway and worker, whatever they are doing."""
    load_packed(tiny_model)
    command = [sys.executable, "-m", "trivet", "serve", str(tiny_model), "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 30
        while not _children(process.pid):
            assert time.monotonic() < deadline
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        message = process.stderr.read()  # ends when no process holds the pipe any more
        # Python ends by the signal itself, caught or not, when it came inside an exec of text.
        assert process.wait(30) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in message


def test_a_worker_that_cannot_be_spawned_is_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert main(["serve", str(tiny_model), "--port", "0"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "trivet: no more processes"
    assert gc.isenabled()


@pytest.mark.parametrize("words", [["serve", "--help"], ["--help"]], ids=" ".join)
def test_help_spawns_no_worker(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was spawned")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert main(words) == 0
    assert "Usage" in capsys.readouterr().out


def test_a_start_that_waits_for_another_packer_ends_at_once(tiny_gguf: Path) -> None:
    query = CacheQuery.of(tiny_gguf, WeightFormat.parse("w8a8-g128"))
    command = [sys.executable, "-m", "trivet", "serve", str(tiny_gguf), "--port", "0"]
    command += ["--weights", "w8a8-g128"]
    with writing(query.paths[0]), subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode is not None


def test_closed_descriptors_are_no_obstacle(tiny_model: Path) -> None:
    load_packed(tiny_model)
    words = f"exec {sys.executable} -m trivet serve {tiny_model} --port 0 <&- >&-"
    with subprocess.Popen(["bash", "-c", words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any(line.startswith("ready http") for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


_INTERRUPT_IN_A_CALLBACK = """
import os, signal, sys, weakref
import trivet.gateway.spawn as spawn
from trivet.cli import main

class Thing: ...

def interrupt(_):  # an exception in here is printed and dropped, as in those of the import system
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

def spawn_worker():
    thing = Thing()
    reference = weakref.ref(thing, interrupt)
    del thing
    raise OSError

spawn.spawn_worker = spawn_worker
raise SystemExit(main(["serve", sys.argv[1], "--port", "0"]))
"""


def test_no_interrupt_of_a_start_is_lost(tiny_model: Path) -> None:
    command = [sys.executable, "-c", _INTERRUPT_IN_A_CALLBACK, str(tiny_model)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "trivet: interrupted\n")
