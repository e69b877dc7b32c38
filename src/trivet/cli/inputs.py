"""Texts that come from files and from standard input: UTF-8, or one line that says what is wrong."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from trivet.errors import CheckpointError, ConfigError


def read_stdin() -> str:
    """Standard input to its end.

    Raises ConfigError: there is none, or it is not UTF-8, whatever the locale says.
    """
    if sys.stdin is None:
        raise ConfigError("standard input", "closed", "open")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "standard input", error.object[error.start : error.end], "UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """A file's text; ``-`` is standard input. Raises CheckpointError or ConfigError."""
    if str(path) == "-":
        return read_stdin()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(path, "is not UTF-8 text") from None
