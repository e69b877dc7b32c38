"""The cost model: fit, prediction, persistence, measurement."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import numpy as np
import pytest

from support.toy_runner import ToyArena, ToyRunner
from trivet.engine import StepLoad, StepTime
from trivet.engine.step_time import MeasuredStep, fit, measure
from trivet.errors import ConfigError

TRUE = (2e-3, 5e-5, 1e-4, 2e-8, 1e-9, 3e-5)


def _seconds(load: StepLoad) -> float:
    knee = max(0, load.rows - 16)
    values = (1, load.rows, knee, load.context, load.pairs, load.logit_rows)
    return sum(c * x for c, x in zip(TRUE, values, strict=True))


def _loads() -> list[StepLoad]:
    loads = []
    for batch, context in itertools.product((1, 2, 4, 8, 16, 32), (16, 256, 1024)):
        load = StepLoad()
        for _ in range(batch):
            load = load.plus(context, 1, 1)
        loads.append(load)
    for start, count in itertools.product((0, 512), (8, 32, 128, 256)):
        loads.append(StepLoad().plus(start, count, 1))
    loads += [StepLoad().plus(100, rows, rows) for rows in (2, 4, 8)]
    return loads


def test_load_counts_rows_context_and_pairs() -> None:
    load = StepLoad().plus(10, 1, 1).plus(0, 4, 1)
    assert load == StepLoad(rows=5, segments=2, context=15, pairs=21, logit_rows=2)


def test_fit_recovers_the_coefficients() -> None:
    model = fit([MeasuredStep(load, _seconds(load)) for load in _loads()], "key")
    assert model.coefficients == pytest.approx(TRUE, rel=1e-6)
    assert model.p90_relative_error < 1e-9
    assert model.num_samples == len(_loads())
    assert model.predict(StepLoad()) == 0.0


def test_disturbed_steps_hardly_move_the_fit() -> None:
    rng = np.random.default_rng(0)
    steps = [
        MeasuredStep(load, _seconds(load) * (1 + 0.02 * rng.standard_normal()))
        for load in _loads() * 4
    ]
    steps[::10] = [MeasuredStep(step.load, 6 * step.seconds) for step in steps[::10]]
    model = fit(steps, "key")
    for load in _loads():
        assert model.predict(load) == pytest.approx(_seconds(load), rel=0.08)
    assert model.median_relative_error < 0.04
    assert model.p90_relative_error > 0.2, "the residuals tell of the disturbance"


def test_more_work_never_looks_cheaper() -> None:
    rng = np.random.default_rng(1)
    loads = _loads() * 2
    model = fit([MeasuredStep(load, float(rng.uniform(1e-3, 2e-3))) for load in loads], "key")
    assert all(value >= 0 for value in model.coefficients)


def test_saved_model_is_used_only_for_its_key(tmp_path: Path) -> None:
    path = tmp_path / "step_time.json"
    assert StepTime.load(path, "a") is None
    model = fit([MeasuredStep(load, _seconds(load)) for load in _loads()], "a")
    model.save(path)
    assert StepTime.load(path, "a") == model
    assert StepTime.load(path, "b") is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_time.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"key": 3}'])
def test_foreign_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step_time.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"step_time\.json"):
        StepTime.load(path, "a")


@pytest.mark.parametrize("num_pages", [1, 3, 40])
def test_measure_keeps_to_the_pages_and_the_rows(num_pages: int) -> None:
    runner, arena = ToyRunner(), ToyArena(num_pages)
    ticks = itertools.count()
    steps = measure(runner, arena, lambda: next(ticks) * 1e-6, max_rows=32, max_context=64)
    assert max(runner.rows_of_steps) <= 32
    counts = collections.Counter(step.load for step in steps)
    assert set(counts.values()) == {8}, "every load is measured equally often"
    assert runner.num_steps == len(steps) + len(counts), "after one round of warming up"


def test_measure_keeps_to_its_budget() -> None:
    runner, now = ToyRunner(), 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    steps = measure(runner, ToyArena(40), clock, budget_s=60.0)
    assert now < 2 * 60.0
    assert len({step.load for step in steps}) >= 8
    assert max(runner.rows_of_steps) < 256, "large loads are left out first"


def test_measured_steps_can_be_fitted() -> None:
    ticks = itertools.count()
    steps = measure(ToyRunner(), ToyArena(40), lambda: next(ticks) * 1e-3, max_context=300)
    model = fit(steps, "toy")
    assert model.predict(StepLoad().plus(16, 1, 1)) == pytest.approx(1e-3, rel=0.01)
