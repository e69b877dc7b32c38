"""``python -m trivet.bench.child``: the measured process; see `trivet.bench.process`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from trivet.errors import ConfigError, TrivetError


def _describe(error: TrivetError) -> dict[str, Any]:
    described: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        value = error.value if isinstance(error.value, (int, float, str)) else str(error.value)
        described["arguments"] = [error.field, value, error.allowed]
    return described


def _calls(session: Any) -> dict[str, Callable[..., Any]]:
    """What the parent may call, by name."""
    from trivet.bench.measure import MixedLoad
    from trivet.bench.session import BatchJob

    return {
        "warm_up": lambda job: session.warm_up(BatchJob(**job)),
        "batch": lambda job: session.batch(BatchJob(**job)),
        "compare_draft": lambda job, off_first: session.compare_draft(BatchJob(**job), off_first),
        "mixed": lambda load, **rest: session.mixed(MixedLoad(**load), **rest),
        "step_rows": lambda rows, **rest: [
            [count, seconds] for count, seconds in session.step_rows(rows, **rest).items()
        ],
    }


def main() -> int:
    """The child's loop."""
    # Answers go to a private copy of standard output; whatever prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    calls: dict[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        message = json.loads(line)
        name = message.pop("call")
        try:
            if name == "open":
                from trivet.bench.session import Session, make_config

                session = Session(make_config(message["config"]))
                calls = _calls(session)
                answer: dict[str, Any] = {"ok": session.describe()}
            else:
                answer = {"ok": calls[name](**message)}
        except TrivetError as error:
            answer = _describe(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
