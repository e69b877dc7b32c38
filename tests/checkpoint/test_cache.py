"""Where packed caches lie, and waiting for a process that writes one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.tiny_models import VARIANTS, build_folder
from trivet.checkpoint.cache import CacheQuery, user_cache, writing
from trivet.checkpoint.packed import PackedFile
from trivet.config import WeightFormat
from trivet.errors import ConfigError


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRIVET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="TRIVET_CACHE"):
        user_cache()


def test_what_is_no_file_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIVET_CACHE", raising=False)
    query = CacheQuery.of(build_folder(tmp_path / "model", VARIANTS["llama2"]), "auto")
    query.paths[0].parent.mkdir()
    os.mkfifo(query.paths[0])
    assert query.find(PackedFile.open) == (None, None)


def test_all_names_of_a_form_have_one_cache(tmp_path: Path) -> None:
    """Recipes write the full form; the server must find what `load_packed` made."""
    folder = build_folder(tmp_path / "model", VARIANTS["llama2"])
    short, full, form = (
        CacheQuery.of(folder, weights)
        for weights in ("w8a8", "w8a8+hadamard64", WeightFormat.parse("w8a8"))
    )
    assert short == full == form
    assert CacheQuery.of(folder, "stored").paths != CacheQuery.of(folder, "auto").paths
    with pytest.raises(ConfigError, match="weights"):
        CacheQuery.of(folder, "w9")


def test_waiting_for_another_packer_can_be_ended(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    path = tmp_path / "a.trivet"
    with writing(path), pytest.raises(InterruptedError), writing(path, stop):
        pass
    with writing(path, stop):
        pass
