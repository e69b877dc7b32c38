"""Which build of Trivet a report comes from: version, and the commit where it can be known."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_GIT_S = 10.0  # a slow file system must not hold up a report


def describe_build() -> dict[str, Any]:
    """``trivet``: the version; ``commit`` and ``uncommitted_changes`` (of sources): None if not known.

    A commit is known when the package runs in a checkout, or was installed from one whose Python
    sources are still the installed ones.
    """
    import trivet

    try:
        version = importlib.metadata.version("trivet")
    except importlib.metadata.PackageNotFoundError:  # the source tree is on the path
        version = trivet.__version__
    package = Path(trivet.__file__).resolve().parent
    root = _checkout(package)
    commit = None if root is None else _git(root, "rev-parse", "HEAD")
    changes = (
        _git(root, "status", "--porcelain", "--", "src", "native") if root and commit else None
    )
    return {
        "trivet": version,
        "commit": commit or None,
        "uncommitted_changes": None if changes is None else bool(changes),
    }


def _checkout(package: Path) -> Path | None:
    """The checkout that a package folder belongs to or was installed from, unchanged since."""
    root = package.parents[1]
    if package.parent.name == "src" and (root / ".git").exists():
        return root
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, OSError):
        origin = importlib.metadata.distribution("trivet").read_text("direct_url.json")
        address = urlsplit(str(json.loads(origin or "{}").get("url", "")))
        root = Path(unquote(address.path))
        sources = root / "src" / "trivet"
        if address.scheme == "file" and (root / ".git").exists() and _are_same(package, sources):
            return root
    return None


def _are_same(installed: Path, sources: Path) -> bool:
    """Whether both folders hold the same Python files."""
    names = {path.relative_to(sources) for path in sources.rglob("*.py")}
    if not names or names != {path.relative_to(installed) for path in installed.rglob("*.py")}:
        return False
    return all((installed / name).read_bytes() == (sources / name).read_bytes() for name in names)


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None: there is no git, or it will not."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
