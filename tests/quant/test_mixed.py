"""Mixed precision: measured, within the budget, and better than chance at the same bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.errors import ConfigError
from trivet.models import Model, open_model
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.calibrate import CalibrationSet
from trivet.quant.grid import Grid
from trivet.quant.methods.mixed import Option, Unit, choose, measure_units, mixed_plan
from trivet.quant.plan import Plan, make_plan
from trivet.quant.recipe import Recipe
from trivet.quantization import quantize

SHAPE = Variant(hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, layers=2, tied=True)
LOW, MIDDLE, HIGH = Grid(2, 32), Grid(4, 32), Grid(8, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("mixed") / "model", SHAPE, dtype="F32")


def units_of(model: Model, method: str = "rtn") -> list[Unit]:
    rng = np.random.default_rng(0)
    train, apart = rng.integers(3, SHAPE.vocab, (8, 60)).tolist(), rng.integers(3, 256, (2, 60))
    texts = CalibrationSet(train, apart.tolist(), {})
    with single_threaded(), Workers(2) as workers:
        return measure_units(model, texts, [LOW, MIDDLE, HIGH], Recipe(method), workers)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_every_unit_is_measured_and_more_bits_hurt_less(source: Path, method: str) -> None:
    units = units_of(open_model(resolve_model(source)), method)
    assert len(units) == 4 * SHAPE.layers
    for unit in units:
        low, middle, high = unit.options
        assert 0 < high.kl < 0.01 * middle.kl < 0.1 * low.kl
        assert low.bytes < middle.bytes < high.bytes
    assert len({unit.name for unit in units}) == len(units)


def divergence(units: list[Unit], plan: Plan) -> float:
    """What the units in a plan's formats are taken to add up to."""
    return sum(
        option.kl
        for unit in units
        for option in unit.options
        if option.target == plan.targets[unit.layer, unit.roles[0]]
    )


def test_the_budget_buys_what_saves_most(source: Path) -> None:
    model = open_model(resolve_model(source))
    plan, units = make_plan(model.spec, LOW), units_of(model)
    middle, finest = make_plan(model.spec, MIDDLE), make_plan(model.spec, HIGH)
    mixed = mixed_plan(plan, units, middle.bytes)
    assert plan.bytes < mixed.bytes <= middle.bytes
    assert divergence(units, mixed) <= divergence(units, middle)
    for unit in units:
        assert len({mixed.targets[unit.layer, role] for role in unit.roles}) == 1
    assert mixed_plan(plan, units, plan.bytes) == plan
    assert mixed_plan(plan, units, finest.bytes) == finest
    with pytest.raises(ConfigError, match=f"at least the {plan.bytes} bytes"):
        mixed_plan(plan, units, plan.bytes - 1)


def test_what_is_kept_by_hand_stays(source: Path) -> None:
    model = open_model(resolve_model(source))
    plan = make_plan(model.spec, LOW, ["down_proj=w4-g64"])
    mixed = mixed_plan(plan, units_of(model), 10 * plan.bytes)
    assert mixed.targets[0, "down"] == Grid(4, 64)
    assert mixed.targets[0, "o"] == HIGH


def _unit(layer: int, *options: tuple[float, int]) -> Unit:
    grids = (LOW, MIDDLE, HIGH)
    return Unit(layer, ("o",), tuple(Option(g, *o) for g, o in zip(grids, options, strict=False)))


def test_choice_is_by_gain_per_byte() -> None:
    units = [_unit(0, (1.0, 100), (0.0, 300)), _unit(1, (0.9, 100), (0.0, 200)),
             _unit(2, (0.1, 100), (0.0, 200))]  # fmt: skip

    def raised(budget: int) -> set[str]:
        return {name for name, option in choose(units, budget).items() if option.target != LOW}

    assert raised(300) == set()
    assert raised(400) == {"layers.1.o"}
    assert raised(600) == {"layers.1.o", "layers.0.o"}
    assert len(raised(700)) == 3


def test_formats_that_never_pay_are_passed_over() -> None:
    unit = _unit(0, (1.0, 100), (0.9, 200), (0.0, 300))  # the middle lies above the line
    assert [option.target for option in unit.hull()] == [LOW, HIGH]
    worse = _unit(0, (1.0, 100), (1.1, 200), (0.5, 300))
    assert [option.target for option in worse.hull()] == [LOW, HIGH]
    steps = _unit(0, (1.0, 100), (0.2, 200), (0.0, 300))
    assert [option.target for option in steps.hull()] == [LOW, MIDDLE, HIGH]
    assert choose([unit], 200)["layers.0.o"].target == LOW
    assert choose([steps], 200)["layers.0.o"].target == MIDDLE


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_one_step_of_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = [
        _unit(
            layer, *zip(np.sort(rng.random(3))[::-1], np.sort(rng.integers(1, 99, 3)), strict=True)
        )
        for layer in range(5)
    ]
    budget = int(sum(min(o.bytes for o in u.options) for u in units) + rng.integers(0, 150))
    chosen = choose(units, budget)
    assert sum(option.bytes for option in chosen.values()) <= budget
    best = min(
        sum(option.kl for option in mix)
        for mix in itertools.product(*(unit.options for unit in units))
        if sum(option.bytes for option in mix) <= budget
    )
    step = max(a.kl - b.kl for unit in units for a, b in itertools.pairwise(unit.hull()))
    assert sum(option.kl for option in chosen.values()) <= best + step


def test_a_mixed_folder_is_written_within_its_budget(source: Path, tmp_path: Path) -> None:
    low = make_plan(open_model(resolve_model(source)).spec, Grid(4, 32)).bytes
    done = quantize(
        source, tmp_path / "out", method="rtn", group_size=32, mixed="w8-g32",
        max_bytes=low + 20_000, gate="off", threads=2,
    )  # fmt: skip
    assert done.outcome is not None
    assert low < done.outcome.bytes <= low + 20_000
    assert set(done.prediction.targets) == {"w4-g32", "w8-g32"}
    found = done.outcome.proof["sensitivity"]
    assert len(found["units"]) == 4 * SHAPE.layers
    assert {unit["chosen"] for unit in found["units"].values()} == {"w4-g32", "w8-g32"}
    assert found["predicted_kl"] == pytest.approx(
        sum(unit["kl"][unit["chosen"]] for unit in found["units"].values())
    )
    uniform = found["predicted_kl_uniform"]
    assert uniform["w8-g32"] < found["predicted_kl"] < uniform["w4-g32"]


def test_another_budget_measures_nothing_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    calls = []

    def counted(*arguments: Any) -> list[Unit]:
        calls.append(arguments)
        return measure_units(*arguments)

    monkeypatch.setattr("trivet.quant.mix.measure_units", counted)
    low = make_plan(open_model(resolve_model(source)).spec, Grid(4, 32)).bytes

    def planned(budget: int, mixed: str = "w8-g32", **options: Any) -> dict[str, int]:
        done = quantize(
            source, tmp_path / "out", method="rtn", group_size=32, mixed=mixed, max_bytes=budget,
            gate="off", dry_run=True, **options,
        )  # fmt: skip
        return done.prediction.targets

    first = planned(low + 20_000)
    assert planned(low + 20_000) == first
    assert planned(low + 30_000)["w8-g32"] > first["w8-g32"]
    assert len(calls) == 1
    planned(low + 20_000, "w8-g64")
    planned(low + 20_000, seed=1)
    assert len(calls) == 3
    for path in (tmp_path / "cache").iterdir():
        path.write_text("[{}]")
    assert planned(low + 20_000) == first
    assert len(calls) == 4


def test_mixed_needs_a_budget_and_other_formats(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-bytes"):
        quantize(source, tmp_path / "out", group_size=32, mixed="w8-g32")
    with pytest.raises(ConfigError, match="integer formats other than"):
        quantize(source, tmp_path / "out", group_size=32, mixed="w8-g32,w4-g32", max_bytes=1 << 30)
    with pytest.raises(ConfigError, match="the smallest mix"):
        quantize(source, tmp_path / "out", group_size=32, mixed="w3-g32", max_bytes=1000)
