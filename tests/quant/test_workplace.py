"""Names beside an output: held by one run at a time, and never taken from someone else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tiny_models import Variant, build_folder
from trivet.errors import CheckpointError, ConfigError
from trivet.quant.workplace import claimed, free_attempt, free_candidate
from trivet.quantization import quantize

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=1, tied=True)


def _put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "precious").write_text("mine")
    return folder


def test_an_output_belongs_to_one_run(tmp_path: Path) -> None:
    target, source = tmp_path / "deep" / "out", tmp_path / "model"
    with claimed(target, source), pytest.raises(CheckpointError, match="another run"):
        claimed(target, source).__enter__()
    with claimed(target, source):
        pass
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    "ending", [".candidate", ".candidate.partial", ".attempt-3", ".attempt-0.candidate.partial"]
)
def test_what_no_run_left_there_stays(tmp_path: Path, ending: str) -> None:
    target = tmp_path / "out"
    folder = _put(tmp_path / f"out{ending}")
    with pytest.raises(CheckpointError, match="no run left it"), claimed(target, tmp_path / "m"):
        pass
    assert (folder / "precious").exists()


def test_other_names_are_no_work(tmp_path: Path) -> None:
    for name in ("out.candidates", "out.attempt-x", "out.attempt-1.mine", "output.candidate"):
        _put(tmp_path / name)
    with claimed(tmp_path / "out", tmp_path / "m"):
        pass


def test_work_of_a_run_that_was_stopped_is_the_next_ones(tmp_path: Path) -> None:
    target, source = tmp_path / "out", tmp_path / "m"
    with claimed(target, source):
        _put(free_candidate(target))
        _put(free_attempt(target, 1))
    assert (tmp_path / ".out.lock").exists()
    with claimed(target, source):
        assert not free_candidate(target).exists()
        assert not free_attempt(target, 1).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_known", [False, True])
def test_the_model_is_not_taken_for_work(tmp_path: Path, is_known: bool) -> None:
    source = build_folder(tmp_path / "src.candidate", SHAPE, dtype="F32")
    if is_known:
        (tmp_path / ".src.lock").touch()
    before = sorted(source.iterdir())
    with pytest.raises(ConfigError, match="it is the model"):
        quantize(source, tmp_path / "src", method="rtn", gate="off")
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize(("field", "value"), [("seed", -1), ("threads", 0), ("threads", 100_000)])
def test_mistakes_are_named(tmp_path: Path, field: str, value: int) -> None:
    source = build_folder(tmp_path / "model", SHAPE, dtype="F32")
    given: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=field):
        quantize(source, tmp_path / "out", method="rtn", gate="off", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("output", ["", ".", "/", ".."])
def test_an_output_needs_a_name(tmp_path: Path, output: str) -> None:
    source = build_folder(tmp_path / "model", SHAPE, dtype="F32")
    with pytest.raises(ConfigError, match="output"):
        quantize(source, output, method="rtn", gate="off")


def test_a_link_to_nothing_is_not_replaced(tmp_path: Path) -> None:
    source = build_folder(tmp_path / "model", SHAPE, dtype="F32")
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists"):
        quantize(source, tmp_path / "out", method="rtn", gate="off")
