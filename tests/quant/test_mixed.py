"""Mixed precision: measured, within the budget, and better than chance at the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.errors import ConfigError
from trivet.models import Model, open_model
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.grid import Grid
from trivet.quant.methods.mixed import Unit, choose, measure_units, mixed_plan
from trivet.quant.plan import make_plan
from trivet.quantization import quantize

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=2, tied=True)
LOW, HIGH = Grid(2, 32), Grid(8, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("mixed") / "model", SHAPE, dtype="F32")


def units_of(model: Model) -> list[Unit]:
    texts = [np.random.default_rng(0).integers(3, SHAPE.vocab, 60).tolist()]
    with single_threaded(), Workers(2) as workers:
        return measure_units(model, texts, LOW, HIGH, workers)


def test_every_unit_is_measured_and_more_bits_hurt_less(source: Path) -> None:
    units = units_of(open_model(resolve_model(source)))
    assert len(units) == 4 * SHAPE.layers
    assert all(0 < unit.high_kl < 0.01 * unit.low_kl for unit in units)
    assert len({unit.name for unit in units}) == len(units)


def test_the_budget_buys_the_most_sensitive_units(source: Path) -> None:
    model = open_model(resolve_model(source))
    plan, units = make_plan(model.spec, LOW), units_of(model)
    finest = make_plan(model.spec, HIGH)
    budget = (plan.bytes + finest.bytes) // 2
    mixed = mixed_plan(plan, units, HIGH, budget)
    assert plan.bytes < mixed.bytes <= budget
    raised = [u for u in units if mixed.targets[u.layer, u.roles[0]] == HIGH]
    left = [u for u in units if mixed.targets[u.layer, u.roles[0]] == LOW]
    assert raised
    assert left
    assert max(u.gain for u in raised) >= max(u.gain for u in left)
    for unit in units:
        assert len({mixed.targets[unit.layer, role] for role in unit.roles}) == 1
    assert mixed_plan(plan, units, HIGH, plan.bytes) == plan
    assert mixed_plan(plan, units, HIGH, finest.bytes) == finest


def test_what_is_kept_by_hand_stays(source: Path) -> None:
    model = open_model(resolve_model(source))
    plan = make_plan(model.spec, LOW, ["down_proj=w4-g32"])
    mixed = mixed_plan(plan, units_of(model), HIGH, 10 * plan.bytes)
    assert mixed.targets[0, "down"] == Grid(4, 32)
    assert mixed.targets[0, "o"] == HIGH


def test_choice_is_by_gain_per_byte() -> None:
    units = [
        Unit(0, ("o",), 1.0, 0.0, 100, 300),
        Unit(1, ("o",), 0.9, 0.0, 100, 200),
        Unit(2, ("o",), 0.1, 0.0, 100, 200),
    ]
    assert choose(units, 300) == set()
    assert choose(units, 400) == {"layers.1.o"}
    assert choose(units, 600) == {"layers.1.o", "layers.0.o"}
    assert len(choose(units, 700)) == 3


def test_a_mixed_folder_is_written_within_its_budget(source: Path, tmp_path: Path) -> None:
    low = make_plan(open_model(resolve_model(source)).spec, Grid(4, 32)).bytes
    done = quantize(
        source, tmp_path / "out", method="rtn", group_size=32, mixed="w8-g32",
        max_bytes=low + 20_000, gate="off", threads=2,
    )  # fmt: skip
    assert done.outcome is not None
    assert low < done.outcome.bytes <= low + 20_000
    assert set(done.prediction.targets) == {"w4-g32", "w8-g32"}


def test_mixed_needs_a_budget_and_more_bits(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-bytes"):
        quantize(source, tmp_path / "out", group_size=32, mixed="w8-g32")
    with pytest.raises(ConfigError, match="more bits"):
        quantize(source, tmp_path / "out", group_size=32, mixed="w3-g32", max_bytes=1 << 30)
