"""Start worker processes. Imports next to nothing: a worker can start before its gateway is loaded.

A worker is ``python -m trivet.worker`` with one end of a socket pair; nothing is forked without an
exec. The kernel kills it when the thread that spawned it ends.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys

DEFAULT_FACTORY = "trivet.worker.load:load_engine"


@dataclasses.dataclass(frozen=True)
class SpawnedWorker:
    """A process that imports its engine and waits to be told what to load, and our socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def discard(self) -> None:
        """End it, if nobody took it over."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def num_workers_of(spec: str) -> int:
    """The number of workers in a ``--workers`` value; `ServerConfig` has checked its form."""
    return int(spec.removeprefix("mixed:"))


def spawn_worker(factory: str) -> SpawnedWorker:
    """Start a worker whose engine ``factory``, a ``module:function``, will build."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "trivet.worker", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--factory", factory]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError:
            ours.close()
            raise
    return SpawnedWorker(process, ours)
