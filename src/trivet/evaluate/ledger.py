"""The ledger: a line for every gate that was run, to hold combinations against their parts.

JSONL, appended; by default ``gates.jsonl`` in the user's state folder. A line has about 700 bytes and
nothing is ever removed; only the newest MAX_READ_BYTES are read. A run is described by its
*variables*: what differs from the baseline (weights, kv). A combination is accepted only if it was
tested as one; its interaction is what its figures lose beyond the sum of what each variable loses
alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivet import files
from trivet.errors import CheckpointError, ConfigError
from trivet.json_values import plain

FIGURES = ("delta_ppl", "mean_kl")  # compared between runs, overall
MAX_READ_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """One gate that was run.

    identity   hash of the model's source     baseline  hash of the baseline's
    variables  what was changed, by name      figures   overall delta_ppl and mean_kl
    corpora    hash over the corpora, their tokens and windows: only equal ones compare
    steps      steps of `next_step.ORDER` that were taken to make the candidate
    """

    time: str
    model: str
    identity: str
    baseline: str
    variables: dict[str, str]
    verdict: str
    next_step: str
    figures: dict[str, float | None]
    corpora: str
    gate: str
    steps: list[str]

    @classmethod
    def parse(cls, line: str) -> Entry | None:
        """An entry of a line; None when it is not one of ours."""
        try:
            value = json.loads(line)
            entry = cls(**{field.name: value[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        is_ours = (
            isinstance(entry.variables, dict)
            and isinstance(entry.steps, list)
            and isinstance(entry.figures, dict)
            and all(_is_figure(figure) for figure in entry.figures.values())
        )
        return entry if is_ours else None


def _is_figure(value: object) -> bool:
    """None, or a finite number that floats hold."""
    return value is None or (isinstance(value, (int, float)) and abs(value) < 1e300)


def default_ledger() -> Path:
    """``gates.jsonl`` in the user's state folder.

    Raises ConfigError: XDG_STATE_HOME is not set for a user without a home.
    """
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "trivet" / "gates.jsonl"
    except RuntimeError:
        raise ConfigError("XDG_STATE_HOME", "", "a folder: this user has no home") from None


def now() -> str:
    """The time of an entry, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def append(path: Path, entry: Entry) -> None:
    """Add a line; other processes may do the same. Raises CheckpointError.

    A last line that a crash cut short is ended first, so that it takes no other with it.
    """
    line = json.dumps(plain(dataclasses.asdict(entry)), allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror}") from None


def read(path: Path) -> list[Entry]:
    """The entries, oldest first; lines that are none (a crash, another program) are passed over.

    Raises CheckpointError: it is no regular file, or cannot be read.
    """
    if path.exists():
        files.require_file(path)
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_READ_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    return [entry for line in lines if (entry := Entry.parse(line)) is not None]


def interaction(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any] | None:
    """What a combination loses beyond the sum of its variables' own losses.

    None for a single variable. ``missing`` names the variables that were never measured alone on the
    same model, baseline and corpora; the terms are None then. ``terms`` has one number per figure.
    """
    if len(entry.variables) < 2:
        return None
    singles: dict[str, Entry] = {}
    for other in entries:
        same = (other.identity, other.baseline, other.corpora) == (
            entry.identity,
            entry.baseline,
            entry.corpora,
        )
        if same and len(other.variables) == 1:
            ((name, value),) = other.variables.items()
            if entry.variables.get(name) == value:
                singles[name] = other
    missing = [name for name in entry.variables if name not in singles]
    terms: dict[str, float | None] = dict.fromkeys(FIGURES)
    if not missing:
        for figure in FIGURES:
            alone = [single.figures.get(figure) for single in singles.values()]
            together = entry.figures.get(figure)
            known = [value for value in alone if value is not None]
            if together is not None and len(known) == len(alone):
                terms[figure] = together - sum(known)
    return {
        "variables": entry.variables,
        "missing": [f"{name}={entry.variables[name]}" for name in missing],
        "singles": {name: single.figures for name, single in singles.items()},
        "terms": terms,
    }
