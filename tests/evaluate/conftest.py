"""Says loudly when this machine cannot isolate code: the tests that try to escape were skipped then."""

from __future__ import annotations

import pytest

from trivet.evaluate import sandbox


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line at the end of every run in which this folder's tests took part."""
    lacking = sandbox.shortcoming(sandbox.isolation())
    if lacking is not None:
        terminalreporter.section("NO SANDBOX HERE", sep="!", red=True, bold=True)
        terminalreporter.line(f"code is not run and the tests of escapes were skipped: {lacking}")
