"""Who runs when: order, budget, preemption, fairness."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.engine_driver import Driver, OracleDrafter, make_config, make_request, run_alone
from support.toy_runner import ToyRunner

MakeDriver = Callable[..., Driver]


def _ids(count: int, salt: int = 0) -> list[int]:
    return [(17 * i + 5 * salt + i * i // 5) % 63 + 1 for i in range(count)]


def _rows(driver: Driver) -> list[int]:
    assert isinstance(driver.runner, ToyRunner)
    return driver.runner.rows_of_steps


def _first_token_order(driver: Driver) -> list[str]:
    times = {name: outcome.finished.times for name, outcome in driver.outcomes.items()}
    return sorted(times, key=lambda name: (times[name].first_token or 0.0, times[name].arrived))


def test_decodes_go_first_and_prefill_fills_the_rest(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_step_tokens=20, max_prefill_chunk=16))
    driver.add(make_request("a", [5], max_tokens=30, ignore_eos=True))
    driver.step()
    driver.add(make_request("b", _ids(40), max_tokens=2, ignore_eos=True))
    driver.add(make_request("c", _ids(40, 1), max_tokens=2, ignore_eos=True))
    for _ in range(4):
        driver.step()
    # Beside the decode of a, b and c share what is left; then b decodes too.
    assert _rows(driver)[:5] == [1, 20, 20, 20, 18]
    assert len(driver.outcomes["a"].token_ids) == 5, "no prefill delays a decode"
    driver.run()


def test_budget_counts_draft_rows(make_driver: MakeDriver) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    truth = {
        name: [*_ids(9, salt), *run_alone(make_request(name, _ids(9, salt), **params)).token_ids]
        for salt, name in enumerate("abc")
    }
    config = make_config(max_step_tokens=7, max_num_seqs=3, draft_tokens=8)
    driver = make_driver(config, OracleDrafter(truth))
    for salt, name in enumerate("abc"):
        driver.add(make_request(name, _ids(9, salt), **params))
    outcomes = driver.run()
    assert max(_rows(driver)) == 7
    assert driver.engine.stats.speculation.num_accepted_tokens > 0
    for name, outcome in outcomes.items():
        assert [*_ids(9, "abc".index(name)), *outcome.token_ids] == truth[name]


def test_prefill_has_precedence_over_drafts(make_driver: MakeDriver) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    truth = run_alone(make_request("a", [5], **params)).token_ids
    config = make_config(max_step_tokens=17, max_prefill_chunk=16, draft_tokens=8)
    driver = make_driver(config, OracleDrafter({"a": [5, *truth], "b": []}))
    driver.add(make_request("a", [5], **params))
    driver.step()
    driver.add(make_request("b", _ids(64), max_tokens=1))
    for _ in range(4):
        driver.step()
    assert _rows(driver)[1:5] == [17, 17, 17, 17]
    assert driver.engine.stats.speculation.num_drafts == 1, "only in the first step"
    driver.run()
    assert driver.engine.stats.speculation.num_drafts > 1


def test_chunking_off_takes_whole_prompts(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_prefill_chunk=None, max_step_tokens=16))
    driver.add(make_request("a", [5], max_tokens=30, ignore_eos=True))
    driver.step()
    driver.add(make_request("long", _ids(500), max_tokens=2))
    driver.step()
    assert _rows(driver) == [1, 501], "an unchunked prompt is one step, whatever the budget"
    driver.run()


def test_first_come_first_served(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_num_seqs=1))
    names = [f"r{index}" for index in range(6)]
    for salt, name in enumerate(names):
        driver.add(make_request(name, _ids(20 + 7 * (salt % 3), salt), max_tokens=3))
    driver.run()
    assert _first_token_order(driver) == names


def test_higher_priority_goes_first_among_the_waiting(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_num_seqs=1))
    for salt, (name, priority) in enumerate([("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)]):
        driver.add(make_request(name, _ids(20, salt), max_tokens=3, priority=priority))
    driver.run()
    assert _first_token_order(driver) == ["c", "e", "a", "b", "d"]


def test_small_request_does_not_overtake_a_large_one_for_ever(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=8, max_num_seqs=4))
    driver.add(make_request("running", _ids(120), max_tokens=40, ignore_eos=True))
    driver.step()
    driver.add(make_request("large", _ids(200, 1), max_tokens=2))
    for salt in range(2, 8):
        driver.add(make_request(f"small{salt}", _ids(10, salt), max_tokens=2))
    driver.run()
    order = _first_token_order(driver)
    assert order.index("large") < order.index("small2")


def test_shortage_of_pages_preempts_the_latest_and_loses_nothing(make_driver: MakeDriver) -> None:
    requests = [
        make_request(f"r{i}", _ids(30, i), max_tokens=90, ignore_eos=True, temperature=0.8)
        for i in range(3)
    ]
    driver = make_driver(make_config(num_pages=7))
    for request in requests:
        driver.add(request)
    outcomes = driver.run()
    assert driver.engine.stats.num_preemptions > 0
    assert outcomes["r0"].finished.times.preemptions == 0, "the most important one is never victim"
    assert outcomes["r2"].finished.times.preemptions > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == run_alone(request).token_ids


def test_shortage_of_pages_preempts_the_lowest_priority(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=7))
    for i, priority in enumerate([0, 2, 1]):
        driver.add(
            make_request(f"r{i}", _ids(30, i), max_tokens=90, ignore_eos=True, priority=priority)
        )
    outcomes = driver.run()
    preemptions = [outcomes[f"r{i}"].finished.times.preemptions for i in range(3)]
    assert preemptions[1] == 0
    assert preemptions[0] > 0


@pytest.mark.parametrize("num_pages", range(4, 12))
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_any_number_of_pages_brings_every_request_to_its_end(
    make_driver: MakeDriver, num_pages: int, prefix_cache: bool
) -> None:
    config = make_config(
        num_pages=num_pages, max_num_seqs=8, max_step_tokens=16, prefix_cache=prefix_cache
    )
    driver = make_driver(config)
    for i in range(8):
        prompt = _ids(20 + 5 * i, i % 3)
        driver.add(make_request(f"r{i}", prompt, max_tokens=60, ignore_eos=True, seed=i))
    for outcome in driver.run(max_steps=4000).values():
        assert outcome.finished.output_len == 60


def test_cached_len_is_what_the_first_admission_found(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=7))
    for i in range(3):
        driver.add(make_request(f"r{i}", _ids(40, i), max_tokens=70, ignore_eos=True))
    outcomes = driver.run()
    assert driver.engine.stats.num_preemptions > 0
    assert [outcome.finished.cached_len for outcome in outcomes.values()] == [0, 0, 0]


def test_abort_of_a_preempted_request(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=7))
    for i in range(3):
        driver.add(make_request(f"r{i}", _ids(30, i), max_tokens=90, ignore_eos=True))
    while not driver.engine.stats.num_preemptions:
        driver.step()
    assert driver.engine.stats.num_waiting > 0
    assert driver.engine.abort("r2")
    driver.run()
