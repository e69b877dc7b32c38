"""What modules export is listed, sorted and there; one version everywhere; no idle dependency."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

import trivet

PACKAGE = Path(trivet.__file__).parent
PROJECT = Path(__file__).resolve().parent.parent


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def listed_names(tree: ast.Module) -> list[str] | None:
    """The value of __all__, or None when the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert isinstance(names, list)
            return names
    return None


def bound_names(tree: ast.Module, package: str) -> set[str]:
    """Public names that a package's __init__ defines or takes from its own modules."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return {name for name in names if not name.startswith("_")}


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, each by name (as ruff sorts)."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), filename=str(path)) for path in MODULES}
LISTED = {path: names for path, tree in TREES.items() if (names := listed_names(tree)) is not None}


@pytest.mark.parametrize("path", LISTED, ids=module_name)
def test_exports_are_sorted_and_importable(path: Path) -> None:
    names = LISTED[path]
    assert names == sorted(set(names), key=sort_key)
    module = importlib.import_module(module_name(path))
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing
    assert set(names) <= set(dir(module))


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=module_name
)
def test_a_package_lists_all_its_public_names(path: Path) -> None:
    bound = bound_names(TREES[path], module_name(path))
    listed = set(LISTED.get(path, []))
    assert bound <= listed, "public names that __all__ does not list"


def test_every_package_says_what_it_is() -> None:
    silent = [module_name(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent, "modules without a docstring"


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    headings = re.findall(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert trivet.__version__ == project["version"] == headings[0]


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", sources, re.MULTILINE))
    names = {re.split(r"\W", name.replace("-", "_"))[0] for name in project["dependencies"]}
    assert names <= imported
