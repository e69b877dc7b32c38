"""The command line: `trivet VERB`. One thin verb per file; each calls the Python API.

`main` is what the console script runs. It imports nothing heavy itself, and every verb imports what it
needs when it runs, so that ``trivet --version`` and ``--help`` answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 done; 1 the job ran and its verdict is negative, or the engine failed; 2 bad usage or bad input,
    with one line on standard error; 130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        from trivet import __version__

        print(f"trivet {__version__}")
        return 0
    from trivet.cli.app import run

    return run(words)


__all__ = ["main"]
