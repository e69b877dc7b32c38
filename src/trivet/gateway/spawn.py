"""Start worker processes. Imports next to nothing: a worker starts before its gateway is loaded.

A worker is ``python -m trivet.worker`` with one end of a socket pair; nothing is forked without an
exec. The kernel kills it when the thread that spawned it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet.worker.frames import WorkerConfig

DEFAULT_FACTORY = "trivet.worker.load:load_engine"
# No BLAS runs in a worker, and starting BLAS's threads takes longer than all of numpy's other imports.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class SpawnedWorker:
    """A process that imports its engine and waits to be told what to load, and our socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.socket = sock
        self._is_started = False

    def start(self, config: WorkerConfig) -> None:
        """Tell it what to load, if nobody has: the first message on the socket."""
        if self._is_started:
            return
        from trivet.worker.frames import Start, encode_frame

        self._is_started = True
        with contextlib.suppress(OSError):  # it died: whoever watches the socket will see
            self.socket.sendall(encode_frame([Start(config)]))

    def discard(self) -> None:
        """End it, whatever it does. Safe to call twice."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def num_workers_of(spec: str) -> int:
    """The number of workers in a ``--workers`` value; `ServerConfig` has checked its form."""
    return int(spec.removeprefix("mixed:"))


def spawn_worker(factory: str = DEFAULT_FACTORY) -> SpawnedWorker:
    """Start a worker whose engine ``factory``, a ``module:function``, will build."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "trivet.worker", "--fd", str(theirs.fileno())]
        command += ["--parent", str(os.getpid()), "--factory", factory]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # Inherited, so that Ctrl-C ends no worker that has not come to ignore it yet.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": path},
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return SpawnedWorker(process, ours)
