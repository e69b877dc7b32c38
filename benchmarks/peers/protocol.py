"""The line protocol between run.py and an engine's child process. Standard library only.

One JSON object per line on standard input, one answer per line on standard output:

    {"op": "load", "path": ..., "threads": N, "context": N, "settings": {...}, ...}
                          -> {"version": ..., "settings": {...}, "weight_bytes": N or null}
    {"op": "run", "prompts": [[ids]...], "output_tokens": N}
                          -> {"first_token_s": t, "total_s": t, "tokens": [[ids]...]}
    {"op": "text", "ids": [...]}            -> {"text": ...}
    {"op": "nll", "ids": [...]}             -> {"nll": [...]}
    {"op": "exit"}

``settings`` of a load are what settings.py searches; the answer lists all that were used.
``first_token_s`` is the time until the prompt has its first token (one prompt only); ``total_s`` the
time until all prompts have ``output_tokens`` tokens. End-of-sequence is ignored by all engines. All
prompts of one run have one length. ``nll`` is -log p of ids[1:], each given all ids before it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handlers: dict[str, Handler]) -> None:
    """Answer requests until ``exit``. Anything else an engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "exit":
            break
        try:
            answer = handlers[message["op"]](message)
        except Exception as error:  # the parent decides; the child only reports
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class EngineError(Exception):
    """An engine answered with an error, ended, or did not answer in time. Says which."""


class Child:
    """One engine in its own process and environment."""

    def __init__(self, python: Path, script: Path, log: Path, env: Mapping[str, str]) -> None:
        self._log = log.open("w")
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **env},
        )

    @property
    def is_alive(self) -> bool:
        """False once the process has ended; it is not started again."""
        return self._process.poll() is None

    def call(self, *, timeout_s: float = 600.0, **message: Any) -> dict[str, Any]:
        """Send one message, return the answer. Raises EngineError; a timeout ends the child."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(timeout_s)
        except BrokenPipeError:
            line = b""
        if not line:
            raise EngineError(f"the process ended; its log: {Path(self._log.name).name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._end()
                raise EngineError(f"no answer within {timeout_s:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                return b""
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def memory_bytes(self) -> int | None:
        """Proportional set size of the process now; None where the kernel does not say."""
        try:
            text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        except OSError:
            return None
        for line in text.splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, kindly if it listens."""
        if self.is_alive:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(b'{"op": "exit"}\n')
                self._process.stdin.close()
                self._process.wait(20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
