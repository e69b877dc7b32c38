"""Files and folders that appear whole or not at all: another name, flushed to the disk, renamed.

Everything that another process may read, or that must survive a crash, is written through here. Texts
that a user names are read through here too: regular files of a bounded size, for a pipe or a device
may never end.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trivet.errors import CheckpointError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def temporary_name(path: Path) -> Path:
    """What a file or folder is called beside ``path`` until it is complete; this process's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def left_behind(path: Path) -> Iterator[Path]:
    """Temporary names of ``path`` that processes which died have left."""
    return path.parent.glob(f".{path.name}.*.tmp")


def flush(path: Path) -> None:
    """Bring a file or the entries of a folder to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(temporary: Path, path: Path) -> None:
    """Flush a complete file, or folder with all that is in it, and give it its name. Raises OSError."""
    inside = temporary.rglob("*") if temporary.is_dir() else iter(())
    for part in (*inside, temporary):
        flush(part)
    temporary.replace(path)
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder
        flush(path.parent)


def require_folder(path: Path) -> None:
    """Make a folder that is to be written to later. Raises CheckpointError: that cannot be done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise CheckpointError(path, "cannot be written: the folder is not yours to write")


def require_file(path: Path) -> None:
    """Raises CheckpointError: there is no such file, or it is a folder, a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
        raise CheckpointError(path, f"is {kind}; expected a regular file")


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file that a user named; every line ends in a line feed.

    Raises CheckpointError: it is no regular file, has more than ``max_bytes`` or is not UTF-8.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)  # a file may grow, and those of /proc have no size
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {_reason(error)}") from None
    if len(raw) > max_bytes:
        raise CheckpointError(path, f"has more than {max_bytes} bytes, the most that is read")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise CheckpointError(path, "is not UTF-8 text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _reason(error: Exception) -> str:
    """Why the system refuses, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def write(path: Path, data: str | bytes) -> None:
    """Write a small file, in the place of an older one if there is one. Raises OSError."""
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        settle(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the reason is already on its way
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The name to write a new file under; it becomes ``path`` at the end and goes after a failure.

    Raises CheckpointError: the path exists, or cannot be written.
    """
    with _new(path) as temporary:
        yield temporary


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder that becomes ``path`` at the end and goes after a failure.

    Raises CheckpointError: the path exists, or cannot be written.
    """
    with _new(path) as temporary:
        temporary.mkdir()
        yield temporary


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Path]:
    if path.exists():
        raise CheckpointError(path, "exists; a model is never overwritten")
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)  # of a process that died and had the same number
        yield temporary
        settle(temporary, path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    """Remove a file or folder if it is there, as far as that can be done."""
    if path.is_dir():
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
