"""What the engine must not know: clocks, sockets, threads, text, native code. A simulator runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trivet.engine
import trivet.speculate

_ALLOWED = {
    "trivet.config",
    "trivet.errors",
    "trivet.files",
    "trivet.lazy",
    "trivet.request",
    "trivet.native.api",
}
_FORBIDDEN = {"time", "datetime", "socket", "asyncio", "threading", "multiprocessing", "random"}
_PACKAGES = {
    "trivet.engine": Path(trivet.engine.__file__).parent,
    "trivet.speculate": Path(trivet.speculate.__file__).parent,
}
_FILES = [path for folder in _PACKAGES.values() for path in sorted(folder.glob("*.py"))]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "trivet":
            yield from (f"trivet.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", _FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_neither_clock_nor_socket_nor_native_code(path: Path) -> None:
    imported = set(_imports(path))
    assert not imported & _FORBIDDEN
    own = {"trivet.engine"} if path.parent.name == "engine" else set(_PACKAGES)
    for name in imported:
        if name.startswith("trivet"):
            assert name in _ALLOWED or any(name.startswith(package) for package in own), name
