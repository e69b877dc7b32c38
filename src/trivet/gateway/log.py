"""What a server says on standard error, which may be gone or full: nobody fails for that."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Print a line on standard error, if that can be done."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # gone, closed, never there
        print(line, file=sys.stderr, flush=True)
