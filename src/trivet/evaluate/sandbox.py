"""Run a program that a model wrote: no network, a read-only root, a user and limits of its own.

Every program runs in a process of new network, mount, process, IPC and host-name namespaces. Its root
holds the interpreter and the system libraries, read-only, and 8 MiB at /tmp that vanish; nothing of the
user's files is there. As root the process becomes a user that owns nothing; otherwise it is one user in
a namespace of its own without capabilities. Memory, processor time, wall time and output are limited.

`isolation` says what this machine could set up. MINIMUM must be there, or nothing runs: `run_program`
raises SandboxError, and a caller that asks `is_isolated` first can leave the code out. Linux only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trivet.errors import TrivetError

MINIMUM = ("network", "root", "user", "limits")  # of the isolation report
_SETUP_S = 20.0  # to set everything up, on a busy machine
_CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxError(TrivetError):
    """This machine cannot isolate a program well enough to run it."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one program. ``cpu_s`` is whole seconds of processor time."""

    memory_bytes: int = 512 << 20
    cpu_s: int = 4
    wall_s: float = 15.0
    output_bytes: int = 1 << 16


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    is_complete  it ran to its last line      status  exit code, 128 + signal, or None: out of time
    output       what it printed
    """

    is_complete: bool
    status: int | None
    output: str


@functools.cache
def isolation() -> dict[str, Any]:
    """What the sandbox isolates here, tried with an empty program; ``error``: why something is not."""
    if sys.platform != "linux":
        return {"error": f"there is no sandbox on {sys.platform}"}
    try:
        return _run("pass", Limits())[1]
    except SandboxError as error:
        return {"error": str(error)}


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run Python source to its end in a sandbox. Raises SandboxError: the isolation is not enough."""
    if sys.platform != "linux":
        raise SandboxError(f"there is no sandbox on {sys.platform}")
    return _run(source, limits or Limits())[0]


def is_isolated() -> bool:
    """Whether everything in MINIMUM is there."""
    return shortcoming(isolation()) is None


def shortcoming(report: dict[str, Any]) -> str | None:
    """What of MINIMUM is not there and why, in words; None: nothing is missing."""
    missing = [name for name in MINIMUM if not report.get(name)]
    if not missing:
        return None
    reason = report.get("error") or "not supported here"
    return f"no isolation of {', '.join(missing)} ({reason})"


def check_isolation(report: dict[str, Any]) -> None:
    """Raise SandboxError unless everything in MINIMUM is there."""
    lacking = shortcoming(report)
    if lacking is not None:
        raise SandboxError(f"code is not run: {lacking}")


def _run(source: str, limits: Limits) -> tuple[Outcome, dict[str, Any]]:
    mark = f"complete {secrets.token_hex(8)}"
    program = f"{source}\n\nprint({mark!r}, flush=True)\n"
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="trivet-sandbox-"))
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdout = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(program.encode())
        stdin.seek(0)
        report_in, report_out = os.pipe()
        go_in, go_out = os.pipe()
        options = {
            **dataclasses.asdict(limits),
            "root": root,
            "python": python,
            "report": report_out,
            "go": go_in,
        }
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(_CHILD), json.dumps(options)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=(report_out, go_in),
            start_new_session=True,
            env={"LANG": "C.UTF-8"},
        )
        os.close(report_out)
        os.close(go_in)
        try:
            report = _read_report(report_in)
            check_isolation(report)
            os.write(go_out, b"g")
            status = _wait(process, limits.wall_s)
        finally:
            os.close(report_in)
            os.close(go_out)
            _kill(process)
        stdout.seek(0)
        output = stdout.read(limits.output_bytes).decode("utf-8", "replace")
    is_complete = status == 0 and output.rstrip().endswith(mark)
    return Outcome(is_complete, status, output.replace(mark, "").rstrip("\n")), report


def _read_report(fd: int) -> dict[str, Any]:
    """The line the child sends when it is set up."""
    until = time.monotonic() + _SETUP_S
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
        part = os.read(fd, 65536) if ready else b""
        if not part:
            raise SandboxError("code is not run: the sandbox did not start")
        data += part
    found: dict[str, Any] = json.loads(data)
    return found


def _wait(process: subprocess.Popen[bytes], wall_s: float) -> int | None:
    try:
        return process.wait(wall_s)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and, by the death of its parent, the program."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
