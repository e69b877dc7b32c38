"""The command line: `trivet VERB`. One thin verb per file; each calls the Python API.

`main` is what the console script runs. It imports nothing heavy itself, and every verb imports what it
needs when it runs, so that ``trivet --version`` and ``--help`` answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 done; 1 the job ran and its verdict is negative, or the engine failed; 2 bad usage or bad input,
    with one line on standard error; 130 interrupted.
    """
    _fill_descriptors()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        from trivet import __version__

        print(f"trivet {__version__}")
        return 0
    try:
        if words[:1] == ["serve"] and "--help" not in words:
            return _serve(words)
        from trivet.cli.app import run

        return run(words)
    except KeyboardInterrupt:  # while `run` is imported; a verb's own is caught there
        print("trivet: interrupted", file=sys.stderr)
        return 130


def _fill_descriptors() -> None:
    """Standard input, output and error that the caller has closed become /dev/null.

    Else the next socket would take their number, and a worker is spawned with these three replaced.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _serve(words: Sequence[str]) -> int:
    """`trivet serve` with a head start: a worker is spawned before the command line is even read.

    Nothing that is imported on the way to the ready line is garbage: collections wait until then.
    """
    import contextlib
    import gc
    import signal

    # Until the event loop takes over, Ctrl-C ends the process there and then: a KeyboardInterrupt in
    # the middle of an import can be lost, and leave the import lock held for ever. The worker ends
    # with its parent.
    previous = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread: no signal comes here
        signal.signal(signal.SIGINT, _interrupted)

    from trivet.gateway.spawn import spawn_worker

    worker = None
    gc.disable()
    try:
        with contextlib.suppress(OSError):  # the server tries again, and its error is one line
            worker = spawn_worker()
        from trivet.cli.app import run

        return run(words, worker)
    finally:
        if worker is not None:
            worker.discard()
        gc.enable()
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, previous)


def _interrupted(*_: object) -> None:
    os.write(2, b"trivet: interrupted\n")
    os._exit(130)


__all__ = ["main"]
