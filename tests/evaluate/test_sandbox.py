"""A program in the sandbox reaches no network, no files, no other process, and stays in its limits."""

from __future__ import annotations

import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.evaluate import sandbox
from trivet.evaluate.sandbox import Limits, Outcome, SandboxError, run_program

# `conftest.py` says so at the end of the run when these are skipped.
pytestmark = pytest.mark.skipif(
    not sandbox.is_isolated(),
    reason=f"NO SANDBOX HERE: {sandbox.shortcoming(sandbox.isolation())}",
)
QUICK = Limits(memory_bytes=256 << 20, cpu_s=2, wall_s=6.0, output_bytes=4096)


def _run(source: str) -> Outcome:
    return run_program(textwrap.dedent(source), QUICK)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on this machine that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_program_runs_and_its_output_comes_back() -> None:
    outcome = _run("import math, typing, re, json, sqlite3\nprint(math.comb(5, 2))")
    assert outcome == Outcome(True, 0, "10")


def test_leaving_early_is_no_success() -> None:
    assert not _run("raise SystemExit(0)").is_complete
    assert not _run("import os; os._exit(0)").is_complete
    assert not _run("assert 1 == 2").is_complete


def test_no_network(listener: int) -> None:
    outcome = _run(f"""
        import socket
        try:
            socket.create_connection(("127.0.0.1", {listener}), timeout=2)
        except OSError as error:
            print("refused", error)
        else:
            print("connected")
    """)
    assert outcome.output.startswith("refused")


def test_no_files_of_the_user_and_a_read_only_root(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    outcome = _run(f"""
        import os, sys
        found = []
        for path in ({str(secret)!r}, {__file__!r}, "/etc/passwd", "/etc/shadow"):
            if os.path.exists(path):
                found.append(path)
        for path in ("/x", "/usr/x", os.path.join(sys.prefix, "x"), "/dev/x"):
            try:
                open(path, "w").write("x")
                found.append(path)
            except OSError:
                pass
        open("/tmp/own", "w").write("fine")
        print(found)
    """)
    assert outcome.output == "[]"
    assert not Path("/tmp/own").exists()


def test_no_way_back_to_the_old_root_or_to_power() -> None:
    outcome = _run("""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        won = []
        if os.geteuid() == 0: won.append("root")
        for name, call in (
            ("remount", lambda: libc.mount(None, b"/", None, 32 | 4096, None)),
            ("mount", lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)),
            ("chroot", lambda: libc.chroot(b"/tmp")),
            ("setuid", lambda: libc.setuid(0)),
            ("mount namespace", lambda: libc.unshare(0x20000)),
            ("user namespace", lambda: libc.unshare(0x10000000)),
        ):
            if call() == 0: won.append(name)
        try:
            os.kill(1, 0) if os.getpid() != 1 else None
            others = [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]
            won += [f"process {p}" for p in others]
        except OSError:
            pass
        print(won)
    """)
    assert outcome.output == "[]"


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(2 << 30)",
        "while True: print('x' * 1000)",
        "open('/tmp/big', 'wb').write(bytes(16 << 20))",
    ],
)
def test_limits_hold(source: str) -> None:
    outcome = _run(source)
    assert not outcome.is_complete
    assert len(outcome.output) <= 4096


def test_children_do_not_outlive_the_program(tmp_path: Path) -> None:
    outcome = _run("""
        import os
        try:
            for _ in range(50):
                if os.fork() == 0:
                    while True: pass
        except OSError:
            print("no children")
    """)
    mine = [
        entry
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and b"-I\0-S\0-B\0-\0" in _command(entry)
    ]
    assert mine == []
    assert outcome.status is not None or not outcome.is_complete


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_what_is_isolated_is_said_and_less_is_refused() -> None:
    report = sandbox.isolation()
    assert {name for name in sandbox.MINIMUM if report[name]} == set(sandbox.MINIMUM)
    for name in sandbox.MINIMUM:
        with pytest.raises(SandboxError, match=f"no isolation of {name}"):
            sandbox.check_isolation({**report, name: None})
