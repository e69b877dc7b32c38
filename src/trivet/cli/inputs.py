"""Texts that come from files and from standard input: UTF-8, or one line that says what is wrong."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from trivet import files
from trivet.errors import ConfigError

_MAX_TEXT = 64 << 20  # bytes of a file, characters of standard input; a prompt is far shorter


def read_stdin() -> str:
    """Standard input to its end.

    Raises ConfigError: there is none, it is not UTF-8, whatever the locale says, or does not end.
    """
    if sys.stdin is None:
        raise ConfigError("standard input", "closed", "open")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        text = sys.stdin.read(_MAX_TEXT + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(
            "standard input", error.object[error.start : error.end], "UTF-8"
        ) from None
    if len(text) > _MAX_TEXT:
        raise ConfigError("standard input", text[:20] + "...", f"up to {_MAX_TEXT} characters")
    return text


def read_text(path: Path) -> str:
    """A file's text; ``-`` is standard input. Raises CheckpointError or ConfigError."""
    return read_stdin() if str(path) == "-" else files.read_text(path, _MAX_TEXT)
