"""A server whose standard error is gone or full goes on."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

import trivet.gateway
from trivet.gateway.log import say


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nobody_fails_because_a_line_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (_Gone(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        say("a line")


def test_everything_the_gateway_says_goes_that_way() -> None:
    for path in Path(trivet.gateway.__file__).parent.glob("*.py"):
        if path.name != "log.py":
            assert not re.search(r"\bprint\(", path.read_text(encoding="utf-8")), path.name
