"""The draft controller drafts where it pays, stops where it does not, and starts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from support.engine_driver import Driver, OracleDrafter, make_config, make_request, run_alone
from trivet.engine import DraftAsk, StepLoad, StepTime
from trivet.speculate import ControlledDrafter, NgramDrafter, make_drafter, predicted_speedup

MakeDriver = Callable[..., Driver]


def _step_time(constant: float, per_row: float, past_knee: float = 0.0) -> StepTime:
    return StepTime(
        key="test",
        coefficients=(constant, per_row, past_knee, 0.0, 0.0, 0.0),
        num_samples=6,
        median_relative_error=0.0,
        p90_relative_error=0.0,
    )


CHEAP_ROWS = _step_time(10e-3, 1e-3)  # bound by memory: a row costs a tenth of a token
DEAR_ROWS = _step_time(0.1e-3, 10e-3)  # bound by arithmetic: a row costs what a token costs


class EchoDrafter:
    """Drafts as much as it is asked for."""

    name = "echo"

    def open(self, request_id: str, token_ids: Sequence[int]) -> None: ...

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        return [[1] * ask.max_tokens for ask in asks]

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        assert drafted >= accepted

    def close(self, request_id: str) -> None: ...


def _ask_once(controller: ControlledDrafter, batch: int = 1, context: int = 100) -> list[int]:
    asks = [DraftAsk(f"r{index}", context, 8) for index in range(batch)]
    load = StepLoad(batch, batch, batch * context, batch * context, batch)
    return [len(draft) for draft in controller.propose(asks, load)]


def _controller(step_time: StepTime, batch: int = 1) -> ControlledDrafter:
    controller = ControlledDrafter(EchoDrafter(), step_time)
    for index in range(batch):
        controller.open(f"r{index}", [1, 2, 3])
    return controller


def _run(controller: ControlledDrafter, acceptance: float, steps: int) -> list[int]:
    """Draft lengths over ``steps`` steps in which each draft is accepted up to a share."""
    lengths = []
    for _ in range(steps):
        (drafted,) = _ask_once(controller)
        accepted = round(drafted * acceptance)
        controller.observe("r0", [1] * (accepted + 1), drafted, accepted)
        lengths.append(drafted)
    return lengths


def test_drafts_long_while_all_is_accepted_and_rows_are_cheap() -> None:
    assert _run(_controller(CHEAP_ROWS), 1.0, 20)[-1] == 8


def test_stops_when_nothing_is_accepted() -> None:
    lengths = _run(_controller(CHEAP_ROWS), 0.0, 200)
    assert lengths[0] > 0
    assert sum(lengths[100:]) <= 3, "only trials are left, ever more rarely"
    assert sum(1 for length in lengths[100:] if length) >= 1, "but it is still tried"


def test_starts_again_when_drafts_become_good() -> None:
    controller = _controller(CHEAP_ROWS)
    _run(controller, 0.0, 60)
    lengths = _run(controller, 1.0, 120)
    assert lengths[-1] == 8
    assert controller.stats.num_trials > 0


def test_does_not_draft_where_a_row_costs_a_token_however_good_the_drafts() -> None:
    lengths = _run(_controller(DEAR_ROWS), 1.0, 30)
    assert sum(length > 1 for length in lengths) == 0
    controller = _controller(DEAR_ROWS)
    _run(controller, 0.5, 200)
    stats = controller.stats
    assert stats.num_asks == 200
    assert stats.num_refused > 180


def test_drafts_less_at_high_batch_with_the_same_acceptance() -> None:
    knee = _step_time(10e-3, 0.1e-3, past_knee=2e-3)
    alone = _ask_once(_controller(knee, 1))[0]
    crowded = _ask_once(_controller(knee, 32), 32)
    assert alone > 4
    assert sum(crowded) == 0


def test_acceptance_ignores_what_was_not_put_to_the_test() -> None:
    controller = _controller(CHEAP_ROWS)
    for _ in range(50):
        controller.observe("r0", [1], 8, 0)
    assert controller.alpha < 0.15
    for _ in range(100):
        controller.observe("r0", [1, 1], 2, 1)  # the first accepted, the second not
    assert controller.alpha == pytest.approx(0.5, abs=0.03)


def test_controlled_drafts_do_not_change_the_text(make_driver: MakeDriver) -> None:
    prompt = [5, 9, 30, 5, 9, 31, 5, 9]
    request = make_request("a", prompt, temperature=0.8, max_tokens=120, ignore_eos=True, seed=4)
    truth = run_alone(request).token_ids
    for step_time in (CHEAP_ROWS, DEAR_ROWS):
        for inner in (NgramDrafter(1), OracleDrafter({"a": prompt + truth}, 3)):
            driver = make_driver(make_config(draft_tokens=6), ControlledDrafter(inner, step_time))
            driver.add(request)
            assert driver.run()["a"].token_ids == truth


def test_make_drafter_follows_the_config() -> None:
    assert make_drafter(make_config(draft="off")) is None
    assert isinstance(make_drafter(make_config(draft="ngram")), NgramDrafter)
    controlled = make_drafter(make_config(draft="ngram"), CHEAP_ROWS)
    assert isinstance(controlled, ControlledDrafter)
    assert controlled.name == "ngram"


def test_predicted_speedup() -> None:
    free = _step_time(10e-3, 0.0)
    assert predicted_speedup(free, 1.0, 3, 1, 100) == pytest.approx(4.0)
    assert predicted_speedup(free, 0.0, 3, 1, 100) == pytest.approx(1.0)
    assert predicted_speedup(free, 0.5, 2, 4, 100) == pytest.approx(1.75)
    assert predicted_speedup(_step_time(0.0, 1e-3), 1.0, 3, 1, 100) == pytest.approx(1.0)
