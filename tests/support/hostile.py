"""What every damaged or lying file must come to: one line that names it, and little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from trivet.errors import CheckpointError

MAX_BYTES = 32 << 20


def assert_refused(read: Callable[[Path], None], path: Path, *words: str) -> None:
    """Reading raises a CheckpointError of one line with the file's name and the words in it."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 600
    for word in (path.name, *words):
        assert word in message, message
    assert peak < MAX_BYTES, peak
