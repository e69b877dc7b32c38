"""The nouns of the gate: verdicts, and what one check found."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

UNKNOWN = "unknown"  # a format that a server does not tell


class Verdict(enum.StrEnum):
    """What the gate says in the end."""

    PASS = "pass"
    REJECT = "reject"
    UNDECIDED = "undecided"


class Finding(enum.StrEnum):
    """What one check says. Only the first three bear on a verdict by themselves.

    no_signal       the task has no vote: the baseline itself is not above chance, or nothing here
                    isolates the code that it would run
    not_run         it could not run here, and is named: the verdict is at most undecided
    left_out        a task for which the budget had no time: it says nothing about its kind
    not_applicable  it has nothing to look at, or is for reading
    """

    PASS = "pass"
    REJECT = "reject"
    UNDECIDED = "undecided"
    NO_SIGNAL = "no signal"
    NOT_RUN = "not run"
    LEFT_OUT = "left out"
    NOT_APPLICABLE = "not applicable"


class Kind(enum.StrEnum):
    """What a model is used for. MODEL stands for checks that concern every use."""

    MODEL = "model"
    CHAT = "chat"
    SUMMARY = "summary"
    CLASSIFICATION = "classification"
    KNOWLEDGE = "knowledge"
    MATHS = "maths"
    CODE = "code"
    SQL = "sql"
    STRUCTURED_OUTPUT = "structured-output"
    LONG_CONTEXT = "long-context"


TASK_KINDS = tuple(kind for kind in Kind if kind is not Kind.MODEL)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check: its finding, why in one line, and the figures behind it.

    check    name of the check, the same as its file's; ``name`` tells several of one check apart
    is_task  items with right and wrong answers were compared: the check counts as a vote
    """

    check: str
    name: str
    kind: Kind
    finding: Finding
    reason: str
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_task: bool = False
    seconds: float = 0.0

    @property
    def votes(self) -> bool:
        """Whether the check has a say on items: neither silent nor without signal."""
        said = (Finding.PASS, Finding.REJECT, Finding.UNDECIDED)
        return self.is_task and self.finding in said

    def as_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "kind": self.kind.value,
            "finding": self.finding.value,
            "votes": self.votes,
        }
