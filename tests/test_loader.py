"""A loaded model: its parts agree, step times are measured once, memory is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_models import build_folder
from trivet.config import EngineConfig, KVFormat, MemoryConfig, ModelConfig
from trivet.engine import step_time
from trivet.errors import ConfigError
from trivet.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("tiny") / "model", "smollm2")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), weights="w8a8", kv=KVFormat.INT8, threads=1))


def test_facts_agree(model: LoadedModel) -> None:
    assert model.weights_form == "w8a8+hadamard64"
    assert model.kv_bytes_per_token == 3 * (2 * 32 + 2 * 4)
    assert model.new_arena(3).num_pages == 3
    assert model.threads == 1


def test_step_times_are_measured_once_and_again_when_damaged(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    measure = step_time.measure

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return measure(*args, **{**kwargs, "budget_s": 0.01})  # type: ignore[arg-type]

    monkeypatch.setattr(step_time, "measure", counted)
    arena = model.new_arena(2)
    first = model.step_time(arena)
    assert model.step_time(arena) == first
    assert len(calls) == 1
    [path] = model.packed.path.parent.glob(f"{model.packed.path.name}.*.steps.json")
    path.write_text("{")
    model.step_time(arena)
    assert len(calls) == 2


def test_no_drafter_without_speculation(model: LoadedModel) -> None:
    config = EngineConfig(max_model_len=64, num_pages=4)
    assert model.new_drafter(config, model.new_arena(4)) is None


def test_memory_is_planned_for_the_context_asked_for(model: LoadedModel) -> None:
    plan = model.plan(MemoryConfig(), max_num_seqs=2, max_step_tokens=64, max_model_len=64)
    assert plan.num_pages == 2 * 2
    with pytest.raises(ConfigError, match="max_model_len"):
        model.plan(MemoryConfig(), max_num_seqs=2, max_step_tokens=64, max_model_len=100_000)
