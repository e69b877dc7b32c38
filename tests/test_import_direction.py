"""Packages import only what stands before them: the table of ARCHITECTURE.md as data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trivet

ROOT = Path(trivet.__file__).parent

# A part imports only parts of earlier rows and itself.
ORDER = [
    ["errors", "json_values", "lazy", "text"],
    ["config", "files"],
    ["request", "sizing", "recipe"],
    ["native"],
    ["checkpoint"],
    ["models"],
    ["quant"],
    ["engine"],
    ["speculate"],
    ["loader"],
    ["evaluate"],
    ["llm", "quantization"],
    ["worker"],
    ["gateway"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
RANK = {part: rank for rank, row in enumerate(ORDER) for part in row}


def part_of(path: Path) -> str:
    """The package or top-level module a source file belongs to; the root package itself is ''."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imported_parts(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of every import of trivet, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            names = [node.module]
            if node.module == "trivet":
                names = [f"trivet.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "trivet" and len(parts) > 1:
                yield node.lineno, parts[1]


def violations(source: str, path: Path) -> list[str]:
    """Imports of ``path`` that point the wrong way."""
    part = part_of(path)
    found = []
    for line, target in imported_parts(source, path):
        if part in ("", target) or target not in RANK:  # names of the root, such as __version__
            continue
        if RANK[target] >= RANK[part]:
            found.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {target}")
    return found


def test_every_part_is_in_the_table() -> None:
    parts = {part_of(path) for path in ROOT.rglob("*.py")} - {""}
    assert parts <= RANK.keys(), "add the new part to ORDER and to ARCHITECTURE.md"


def test_imports_point_one_way() -> None:
    found = [
        line for path in sorted(ROOT.rglob("*.py")) for line in violations(path.read_text(), path)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["import trivet.cli", "from trivet import gateway", "def f():\n    from trivet.llm import LLM"],
)
def test_a_wrong_import_is_noticed(source: str) -> None:
    assert violations(source, ROOT / "engine" / "engine.py")


def test_the_engine_sees_only_the_protocols_of_the_native_core() -> None:
    """Scheduler, pages and policies run without native code; the simulator depends on it."""
    for path in sorted((ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trivet.native"):
                assert node.module == "trivet.native.api", f"{path.name}:{node.lineno}"
