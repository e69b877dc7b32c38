"""The front of a real model: a packed cache is found; packing ends when nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_models import Variant, build_folder
from trivet.config import ModelConfig, ServerConfig
from trivet.errors import TrivetError
from trivet.gateway.front import load_front


def test_packing_can_be_cancelled(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", Variant())
    config = ServerConfig(model=ModelConfig(model=str(folder)))
    told: list[str] = []
    with pytest.raises(TrivetError, match="packing was cancelled"):
        load_front(config, lambda: told.append("packed"), lambda: True)
    assert told == []
    assert not [path for path in tmp_path.rglob("*.trivet*") if path.suffix in (".trivet", ".tmp")]
    load_front(config, lambda: told.append("packed"), lambda: False)
    assert told == ["packed"]
    load_front(config, lambda: told.append("found"), lambda: True)  # nothing to cancel
    assert told == ["packed", "found"]
