"""The measured process: a fresh interpreter that holds one model, driven by its parent.

A process of its own gives an honest start time and peak memory, and lets a ladder keep several
configurations alive and measure them in turns. Messages are JSON, one per line: requests
``{"call": name, ...}`` on standard input, answers ``{"ok": value}`` or ``{"error": kind, ...}`` on
standard output. End of input ends the process.

    parent  EngineProcess (here)      child  python -m trivet.bench.child
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from trivet.config import ModelConfig
from trivet.errors import CheckpointError, ConfigError, EngineError, TrivetError


class EngineProcess:
    """A child process with a loaded model. ``start_s``: from its start until it was ready.

    Raises ConfigError or CheckpointError as `load_model` would in this process.
    """

    def __init__(self, config: ModelConfig) -> None:
        begin = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trivet.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # an interrupt of the terminal goes to the parent alone
        )
        self._is_calling = False
        try:
            fields = dataclasses.asdict(config)
            fields["kv"] = config.kv.value
            self.facts: dict[str, Any] = self.call("open", config=fields)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - begin

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, name: str, **arguments: Any) -> Any:
        """Run one call in the child and return its value."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        self._is_calling = True
        try:
            stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = stdout.readline()
        if not line:
            raise self._died()
        self._is_calling = False
        answer = json.loads(line)
        if "error" in answer:
            raise _rebuild(answer)
        return answer["ok"]

    def _died(self) -> EngineError:
        return EngineError(f"the measured process ended with status {self._process.wait()}")

    def close(self) -> None:
        """End the child and wait for it; one that still works on a call is killed."""
        if self._is_calling:
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _RemoteCheckpointError(CheckpointError):
    """A CheckpointError of the child; its message is already the user's line."""

    def __init__(self, message: str) -> None:
        TrivetError.__init__(self, message)
        self.path, self.tensor, self.reason = "", None, message


def _rebuild(answer: Mapping[str, Any]) -> TrivetError:
    if answer["error"] == "ConfigError":
        field, value, allowed = answer["arguments"]
        return ConfigError(field, value, allowed)
    if answer["error"] == "EngineError":
        return EngineError(answer["message"])
    if answer["error"] == "CheckpointError":
        return _RemoteCheckpointError(answer["message"])
    return TrivetError(answer["message"])
