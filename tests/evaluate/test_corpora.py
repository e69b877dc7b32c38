"""Built-in corpora are there and repeatable; bad files are named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivet.errors import CheckpointError
from trivet.evaluate import builtin_corpora, load_corpora


def test_built_in_corpora_are_large_and_repeatable() -> None:
    first, again = builtin_corpora(), builtin_corpora()
    assert [corpus.name for corpus in first] == ["pydoc-topics", "stdlib-source"]
    assert [corpus.sha256 for corpus in first] == [corpus.sha256 for corpus in again]
    for corpus in first:
        assert len(corpus.text) > 200_000
        assert "Python 3." in corpus.source
    assert "def " in first[1].text


def test_no_names_means_the_built_in_corpora() -> None:
    assert [c.name for c in load_corpora(None)] == [c.name for c in load_corpora([])]
    assert [c.name for c in load_corpora(["stdlib-source"])] == ["stdlib-source"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "wiki.txt")
        paths[-1].write_text(f"text {folder}")
    corpora = load_corpora(paths)
    assert [corpus.name for corpus in corpora] == ["wiki", "wiki-2"]
    assert [corpus.text for corpus in corpora] == ["text a", "text b"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    for name, reason in (
        ("absent.txt", "cannot be read"),
        ("empty.txt", "no text"),
        ("latin.txt", "UTF-8"),
        (".", "is a folder"),
    ):
        with pytest.raises(CheckpointError, match=reason) as caught:
            load_corpora([tmp_path / name])
        assert str(tmp_path / name) in str(caught.value)
