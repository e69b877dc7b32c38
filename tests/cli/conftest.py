"""A tiny model on disk, packed once for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_models import Variant, build_folder, build_gguf

SHAPE = Variant(
    hidden=96, heads=3, kv_heads=1, head_dim=32, ffn=160, theta=1e5, tied=True, positions=512
)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of tests go into a ledger of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model in Hugging Face layout."""
    return build_folder(tmp_path_factory.mktemp("tiny") / "model", SHAPE)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices lie on a 4-bit grid of their own."""
    types = {"token_embd": "Q8_0", "blk": "Q4_0"}
    return build_gguf(tmp_path_factory.mktemp("tiny") / "model.gguf", SHAPE, qtype=types)
