"""The names beside its output that a run of `quantize` works under, and who may use them.

A run of output DIR works in DIR.candidate, DIR.candidate.partial and, when it tries several ways, in
DIR.attempt-N. While it runs it holds ``.DIR.lock``; one that is stopped leaves the file beside its
work, so that the next run knows whose the work is. Names without the file are someone else's and stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trivet import files
from trivet.errors import CheckpointError, ConfigError

_WORK = (".candidate", ".candidate.partial")
_RESULTS = (".rejected", ".undecided")


def named(target: Path, ending: str) -> Path:
    return target.with_name(f"{target.name}.{ending}")


def free_candidate(target: Path) -> Path:
    """Where a result lies until it is judged; what a run that was killed left there is removed."""
    candidate = named(target, "candidate")
    for left in (candidate, *files.left_behind(candidate)):
        shutil.rmtree(left, ignore_errors=True)
    return candidate


def free_attempt(target: Path, index: int) -> Path:
    """The output of one of several attempts; what a run that was killed left there is removed."""
    place = named(target, f"attempt-{index}")
    for ending in ("", *_RESULTS):
        shutil.rmtree(place.with_name(place.name + ending), ignore_errors=True)
    return place


@contextlib.contextmanager
def claimed(target: Path, source: Path) -> Iterator[None]:
    """Hold an output against other runs, with the names that belong to it.

    source  the model that is read
    Raises ConfigError: the model lies where the work would. CheckpointError: another run works on this
    output, a name is taken by something else, or the folder cannot be written.
    """
    lock = target.with_name(f".{target.name}.lock")
    model = source.resolve()
    for path in _work_of(target):
        if path.resolve() == model or path.resolve() in model.parents:
            allowed = f"another name: {path.name} is where the work on it lies, and it is the model"
            raise ConfigError("output", str(target), allowed)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        is_known = lock.exists()
        foreign = (path for path in _work_of(target) if not (path / "run.json").is_file())
        taken = None if is_known else next(foreign, None)
        if taken is not None:
            reason = f"exists, and is where work on {target.name} would lie; no run left it there"
            raise CheckpointError(taken, reason)
        descriptor = _locked(lock)
    except OSError as error:
        raise CheckpointError(target, f"cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        if next(_work_of(target), None) is None:
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def _work_of(target: Path) -> Iterator[Path]:
    """What is there under the names of work on an output."""
    for ending in _WORK:
        if os.path.lexists(path := target.with_name(target.name + ending)):
            yield path
    prefix = f"{target.name}.attempt-"
    if target.parent.is_dir():
        for path in sorted(target.parent.iterdir()):
            number = path.name.removeprefix(prefix)
            for ending in (*_WORK, *_RESULTS):
                number = number.removesuffix(ending)
            if path.name.startswith(prefix) and number.isdigit():
                yield path


def _locked(path: Path) -> int:
    """A descriptor that holds the lock. Raises CheckpointError: another process does; OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):  # removed by the run that ended just now
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(path, "held by another run that makes this output") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
