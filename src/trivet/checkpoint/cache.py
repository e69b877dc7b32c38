"""Where packed caches lie, when they are stale, and who may write one.

A cache is found by its source's files (name, inode, size, modification time) and by what it holds.
It lies in ``$TRIVET_CACHE`` when that is set, else beside the model in ``.trivet``, else (read-only,
full or belonging to an installed package) in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trivet.checkpoint.header import CONTRACT_VERSION, PackedHeader
from trivet.checkpoint.resolve import ModelSource, resolve_model
from trivet.config import WeightFormat, own_or_format
from trivet.errors import CheckpointError, ConfigError
from trivet.files import left_behind
from trivet.sizing import format_bytes

PACKER_VERSION = 5  # raised whenever packing the same file would give other bytes
CACHE_VARIABLE = "TRIVET_CACHE"
_INSTALLED = ("site-packages", "dist-packages")
_WAIT_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_Packed = TypeVar("_Packed", bound=PackedHeader)


def cache_key(source: ModelSource, requested: str) -> dict[str, Any]:
    """What a cache must say of itself to serve this model in this form; plain JSON values."""
    files = []
    for path in source.files:
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
        files.append([path.name, status.st_ino, status.st_size, status.st_mtime_ns])
    return {
        "path": str(source.path.resolve()),
        "files": files,
        "weights": requested,
        "contract": CONTRACT_VERSION,
        "packer": PACKER_VERSION,
    }


def cache_paths(source: ModelSource, requested: str) -> list[Path]:
    """Places where the cache may be, best first. Raises ConfigError: TRIVET_CACHE is not a folder."""
    stem = re.sub(r"[^\w.-]+", "_", source.name)[:80]
    resolved = source.path.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:8]
    shared_name = f"{stem}-{digest}.{requested}.trivet"
    user = user_cache() / shared_name
    if os.environ.get(CACHE_VARIABLE):
        return [user]
    if any(part in _INSTALLED for part in resolved.parts):
        return [user]
    parent = resolved if source.kind == "hf" else resolved.parent
    return [parent / ".trivet" / f"{stem}.{requested}.trivet", user]


def remove_caches(source: ModelSource, requested: str) -> None:
    """Remove the caches of a model that no longer has this name, as far as that can be done."""
    for path in cache_paths(source, requested):
        for file in (path, _lock_path(path)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def user_cache() -> Path:
    """The folder TRIVET_CACHE names, else trivet's in the user's cache folder; it need not exist.

    Raises ConfigError: TRIVET_CACHE is not a folder, or is not set for a user without a home.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        if Path(chosen).exists() and not Path(chosen).is_dir():
            raise ConfigError(CACHE_VARIABLE, chosen, "a folder")
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "trivet"
    except RuntimeError:
        raise ConfigError(CACHE_VARIABLE, "", "a folder: this user has no home") from None


@dataclasses.dataclass(frozen=True)
class CacheQuery:
    """The packed cache of one model in one form: what it must say of itself and where it may lie."""

    source: ModelSource
    key: dict[str, Any]
    paths: list[Path]

    @classmethod
    def of(cls, model: str | os.PathLike[str], weights: WeightFormat | str) -> CacheQuery:
        """For a model by its name; ``weights`` is a format or its name, ``auto`` or ``stored``.

        Raises CheckpointError: there is no such model; ConfigError: TRIVET_CACHE.
        """
        source = resolve_model(model)
        form = own_or_format(weights) if isinstance(weights, str) else weights
        requested = str(weights) if form is None else form.name  # a form has more than one name
        return cls(source, cache_key(source, requested), cache_paths(source, requested))

    def find(self, opener: Callable[[Path], _Packed]) -> tuple[_Packed | None, str | None]:
        """The first sound, current cache; else None and why those that exist cannot serve."""
        reason = None
        for path in self.paths:
            if not _is_file(path):
                continue
            try:
                packed = opener(path)
            except CheckpointError as error:
                reason = error.reason
                continue
            key = packed.header.get("key")
            if key == self.key:
                return packed, None
            reason = self._difference(key) if reason is None else reason
        return None, reason

    def _difference(self, key: object) -> str:
        """Why a sound cache with another key cannot serve."""
        known = key if isinstance(key, dict) else {}
        if any(known.get(part) != self.key[part] for part in ("packer", "contract")):
            return "another version of trivet packed it"
        return "the model has changed"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder that may not be searched: as good as none
        return False


class NoRoomError(CheckpointError):
    """One place cannot take the packed cache: it may not be written, or is full.

    problem  why, without the place
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path.parent, f"cannot take the packed cache: {problem}")
        self.folder = path.parent
        self.problem = problem


def no_place(problems: list[NoRoomError], least_bytes: int | None) -> CheckpointError:
    """The error when no place can take a cache. least_bytes: what it needs; None: not known."""
    places = ", ".join(f"{one.folder} ({one.problem})" for one in problems)
    needed = "" if least_bytes is None else f" of at least {format_bytes(least_bytes)}"
    return CheckpointError(
        places, f"no place for the packed cache{needed}; set {CACHE_VARIABLE} to a folder with room"
    )


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write there; None: the file system does not say."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    blocks = status.f_bavail if os.geteuid() else status.f_bfree
    return blocks * status.f_frsize if status.f_blocks else None


def require_room(path: Path, least_bytes: int) -> None:
    """Raises NoRoomError: fewer bytes are free where ``path`` is to lie."""
    free = free_bytes(path.parent)
    if free is not None and free < least_bytes:
        raise NoRoomError(path, f"{format_bytes(free)} free")


@contextlib.contextmanager
def writing(path: Path, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the place of a cache by an exclusive lock of this process.

    wait  called now and then while another process holds it; what it raises ends the waiting

    A second process waits here and then finds the cache. Raises NoRoomError: the place cannot be
    written, or an OSError within says that it is full; CheckpointError: any other OSError within.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_path(path).open("wb")
    except OSError as error:
        raise NoRoomError(path, error.strerror or str(error)) from None
    with lock:
        _lock(lock.fileno(), wait)
        for left in left_behind(path):
            left.unlink(missing_ok=True)  # of a process that died while packing
        try:
            yield
        except OSError as error:
            problem = error.strerror or str(error)
            if error.errno in _NO_ROOM:
                raise NoRoomError(path, problem) from None
            raise CheckpointError(path, f"cannot be written: {problem}") from None


def _lock(descriptor: int, wait: Callable[[], None]) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            time.sleep(_WAIT_S)
