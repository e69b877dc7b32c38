"""The line protocol between run.py and an engine's child process. Standard library only.

One JSON object per line on standard input, one answer per line on standard output:

    {"op": "load", ...}                      -> {"ok": true, "version": ..., "settings": {...}}
    {"op": "run", "prompts": [[ids]...], "output_tokens": N}
                                             -> {"first_token_s": t, "total_s": t, "tokens": [[ids]...]}
    {"op": "text", "ids": [...]}             -> {"text": ...}
    {"op": "exit"}

``first_token_s`` is the time until every prompt has its first token (only meaningful for one prompt);
``total_s`` the time until all have ``output_tokens`` tokens. End-of-sequence is ignored by all engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


class Child:
    """One engine in its own process and environment."""

    def __init__(self, python: Path, script: Path, log: Path, env: dict[str, str]) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **env},
        )
        self.pid = self._process.pid

    def call(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended; its log: {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write('{"op": "exit"}\n')
                self._process.stdin.close()
                self._process.wait(20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
