"""Life of a request: admission, events, endings, limits, counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from support.engine_driver import Driver, OracleDrafter, make_config, make_request, run_alone
from support.toy_runner import ToyArena, ToyRunner, ToySampler
from trivet.engine import Engine
from trivet.errors import ConfigError, RequestError
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    FinishReason,
    Request,
    SamplingParams,
    TokensEvent,
)

MakeDriver = Callable[..., Driver]
PROMPT = list(range(1, 41))


def _ids(count: int, salt: int = 0) -> list[int]:
    return [(17 * i + 5 * salt + i * i // 5) % 63 + 1 for i in range(count)]


class _RecordingRunner(ToyRunner):
    """Keeps the sampler states it hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.samplers: list[ToySampler] = []

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> ToySampler:
        self.samplers.append(super().new_sampler(params, choice_index, prompt_ids))
        return self.samplers[-1]


@pytest.mark.parametrize(
    ("request_fields", "param", "status", "words"),
    [
        pytest.param({"prompt_ids": []}, "prompt", 400, "empty", id="empty prompt"),
        pytest.param({"prompt_ids": [64]}, "prompt", 400, "token id 64 .* 64", id="id too large"),
        pytest.param({"prompt_ids": [3, -1]}, "prompt", 400, "token id -1", id="negative id"),
        pytest.param(
            {"prompt_ids": _ids(600)},
            "prompt",
            400,
            "600 tokens.* 512 tokens",
            id="prompt too long",
        ),
        pytest.param({"prompt_ids": _ids(512)}, "prompt", 400, "512", id="no room for one token"),
        pytest.param({"emitted_ids": [99]}, "emitted_ids", 400, "99", id="bad emitted id"),
        pytest.param({"seed": None}, "seed", 400, "seed", id="no seed"),
    ],
)
def test_bad_request_is_refused_by_name(
    make_driver: MakeDriver,
    request_fields: dict[str, object],
    param: str,
    status: int,
    words: str,
) -> None:
    driver = make_driver()
    fields = {"prompt_ids": PROMPT, **request_fields}
    prompt_ids = fields.pop("prompt_ids")
    assert isinstance(prompt_ids, list)
    with pytest.raises(RequestError, match=words) as caught:
        driver.engine.add(make_request("a", prompt_ids, **fields), 0.0)
    assert (caught.value.param, caught.value.status) == (param, status)
    assert not driver.engine.has_work


def test_request_that_can_never_fit_is_refused(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=4))
    driver.add(make_request("fits", _ids(100), max_tokens=28, ignore_eos=True))
    with pytest.raises(RequestError, match=r"129 tokens of KV \(5 pages\).* 4 pages"):
        driver.engine.add(make_request("large", _ids(100), max_tokens=29), 0.0)
    assert driver.run()["fits"].finished.output_len == 28


def test_full_queue_answers_429(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_num_seqs=1, max_waiting=2))
    for name in "abc":
        driver.add(make_request(name, PROMPT))
    with pytest.raises(RequestError, match="queue is full") as caught:
        driver.engine.add(make_request("d", PROMPT), 0.0)
    assert caught.value.status == 429
    while driver.engine.stats.num_waiting >= 2:
        driver.step()
    driver.add(make_request("d", PROMPT))
    assert set(driver.run()) == set("abcd")


def test_live_request_id_is_unique(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT))
    with pytest.raises(RequestError, match="'a' is already running"):
        driver.engine.add(make_request("a", PROMPT), 0.0)
    first = driver.run()["a"].token_ids
    driver.add(make_request("a", PROMPT))
    assert driver.run()["a"].token_ids == first


def test_draining_refuses_new_requests_and_finishes_the_others(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_num_seqs=1))
    driver.add(make_request("a", PROMPT))
    driver.add(make_request("b", PROMPT))
    driver.engine.drain()
    with pytest.raises(RequestError) as caught:
        driver.engine.add(make_request("c", PROMPT), 0.0)
    assert caught.value.status == 503
    outcomes = driver.run()
    assert outcomes["a"].finished.output_len == outcomes["b"].finished.output_len == 16


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_pages": 65}, "num_pages: 65 .*at most 64"),
        ({"max_model_len": 5000}, "max_model_len: 5000 .*at most 4096"),
        ({"max_step_tokens": 3}, r"max_step_tokens: 3 .*max_num_seqs \(4\)"),
    ],
)
def test_config_that_cannot_work_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(ToyRunner(), ToyArena(64), make_config(**fields))


def test_output_ends_at_max_tokens(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=7, ignore_eos=True))
    finished = driver.run()["a"].finished
    assert (finished.reason, finished.output_len) == (FinishReason.LENGTH, 7)
    assert (finished.prompt_len, finished.stop_token_id) == (40, None)


def test_output_ends_when_the_context_is_full(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_model_len=50))
    driver.add(make_request("a", PROMPT, max_tokens=10**12, ignore_eos=True))
    finished = driver.run()["a"].finished
    assert (finished.reason, finished.output_len) == (FinishReason.LENGTH, 10)


def test_stop_token_ends_the_output_and_is_sent(make_driver: MakeDriver) -> None:
    truth = run_alone(make_request("a", PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = truth.token_ids[11]
    driver = make_driver()
    request = make_request("a", PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True)
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "stop_token_ids": [stop]}
    driver.add(make_request("a", request.prompt_ids, **params))
    outcome = driver.run()["a"]
    first = truth.token_ids.index(stop)
    assert outcome.token_ids == truth.token_ids[: first + 1]
    assert outcome.finished.reason is FinishReason.STOP
    assert outcome.finished.stop_token_id == stop


@pytest.mark.parametrize("drafted", [False, True])
def test_nothing_after_a_stop_inside_a_draft_leaks(make_driver: MakeDriver, drafted: bool) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    truth = run_alone(make_request("a", PROMPT, **params)).token_ids
    stop = next(t for i, t in enumerate(truth) if i > 15 and t not in truth[:i])
    index = truth.index(stop)
    drafter = OracleDrafter({"a": PROMPT + truth}) if drafted else None
    runner = _RecordingRunner()
    driver = make_driver(make_config(draft_tokens=8), drafter, runner)
    driver.add(make_request("a", PROMPT, logprobs=1, **{**params, "stop_token_ids": [stop]}))
    outcome = driver.run()["a"]
    assert outcome.token_ids == truth[: index + 1]
    assert len(outcome.logprobs) == index + 1
    assert outcome.finished.output_len == index + 1
    stats = driver.engine.stats
    assert stats.num_output_tokens == index + 1
    assert stats.speculation.num_accepted_tokens == outcome.finished.times.accepted_tokens
    assert runner.samplers[0].counts.sum() == index + 1, "penalties count what is committed"
    if drafted:
        assert stats.num_steps < index
        # Each verified draft commits its accepted tokens and, unless it ends there, one more.
        assert stats.speculation.num_accepted_tokens <= index + 1
    # The KV beyond the stop is not offered to others: only whole pages of committed tokens are.
    assert stats.pages_cached == (len(PROMPT) + index + 1) // 32


def test_min_tokens_holds_back_eos(make_driver: MakeDriver) -> None:
    early = next(
        seed
        for seed in range(200)
        if run_alone(make_request("a", PROMPT, seed=seed, max_tokens=20)).finished.output_len < 6
    )
    driver = make_driver()
    driver.add(make_request("a", PROMPT, seed=early, max_tokens=20, min_tokens=12))
    outcome = driver.run()["a"]
    assert outcome.finished.output_len >= 12
    assert 0 not in outcome.token_ids[:12]


def test_finish_ends_a_request_at_a_token_count(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=100, ignore_eos=True))
    while len(driver.outcomes["a"].token_ids) < 9:
        driver.step()
    assert driver.engine.finish("a", 6, driver.now)
    assert driver.engine.stats.pages_used == 0
    assert not driver.engine.finish("a", 6, driver.now), "it has ended"
    assert not driver.engine.abort("a")
    finished = driver.run()["a"].finished
    assert (finished.reason, finished.output_len) == (FinishReason.STOP, 6)
    assert finished.times.finished == driver.now - 1


def test_finish_beyond_the_output_is_a_broken_promise(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT))
    with pytest.raises(AssertionError, match="beyond its output"):
        driver.engine.finish("a", 1, 0.0)


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_any_state_frees_all_pages_at_once(make_driver: MakeDriver, steps: int) -> None:
    driver = make_driver(make_config(max_num_seqs=2, num_pages=9))
    driver.add(make_request("a", _ids(70), max_tokens=100, ignore_eos=True))
    driver.add(make_request("b", _ids(60, 1), max_tokens=60, ignore_eos=True))
    driver.add(make_request("c", _ids(60, 2), max_tokens=60, ignore_eos=True))
    for _ in range(steps):
        driver.step()
    for request_id in ("c", "a", "b"):
        assert driver.engine.abort(request_id)
        driver.engine.check()
    assert driver.engine.stats.pages_used == 0
    assert not driver.engine.request_ids
    assert driver.engine.has_work, "the cancelled events are still to be taken"
    for outcome in driver.run().values():
        assert isinstance(outcome.terminal, CancelledEvent)
    assert driver.engine.stats.finished == {"cancelled": 3}


def test_unknown_request_cannot_be_aborted(make_driver: MakeDriver) -> None:
    driver = make_driver()
    assert not driver.engine.abort("nobody")
    assert not driver.engine.has_work


@pytest.mark.parametrize("deadline", [0.0, 1.0, 2.5, 7.0])
def test_deadline_ends_a_request_with_an_error(make_driver: MakeDriver, deadline: float) -> None:
    driver = make_driver(make_config(max_num_seqs=1))
    driver.add(make_request("a", PROMPT, max_tokens=400, ignore_eos=True, deadline=deadline))
    driver.add(make_request("b", PROMPT, max_tokens=400, deadline=deadline))
    driver.add(make_request("c", PROMPT, max_tokens=5, deadline=1000.0))
    outcomes = driver.run()
    for request_id in "ab":
        terminal = outcomes[request_id].terminal
        assert isinstance(terminal, ErrorEvent)
        assert terminal.code == "deadline"
    assert outcomes["c"].finished.output_len == 5
    assert outcomes["b"].token_ids == []


@pytest.mark.parametrize("drafted", [False, True])
def test_values_that_overflow_end_a_request_with_an_error(drafted: bool) -> None:
    """Tokens before the overflow are sent; none is drawn from it, drafts or not."""
    request = make_request("r", PROMPT, max_tokens=30, ignore_eos=True, logprobs=0)
    whole = run_alone(request).token_ids
    short = make_request("short", PROMPT[:5], max_tokens=12, ignore_eos=True)
    truth = {"r": PROMPT + whole, "short": PROMPT[:5] + run_alone(short).token_ids}
    drafter = OracleDrafter(truth) if drafted else None
    driver = Driver(make_config(draft_tokens=4), drafter, ToyRunner(overflows_at=len(PROMPT) + 9))
    driver.add(request)
    driver.add(short)
    outcomes = driver.run()
    assert outcomes["r"].token_ids == whole[:10]
    assert len(outcomes["r"].logprobs) == 10
    event = outcomes["r"].terminal
    assert isinstance(event, ErrorEvent)
    assert event.code == "not_finite"
    assert "10 output tokens" in event.message
    assert outcomes["short"].finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("fields", [{"max_tokens": 4}, {"max_tokens": 0, "prompt_logprobs": 0}])
@pytest.mark.parametrize("position", [7, len(PROMPT) - 1])
def test_a_prompt_that_overflows_has_no_answer(fields: dict[str, object], position: int) -> None:
    driver = Driver(runner=ToyRunner(overflows_at=position))
    driver.add(make_request("r", PROMPT, **fields))
    outcome = driver.run()["r"]
    assert isinstance(outcome.terminal, ErrorEvent)
    assert outcome.token_ids == []
    assert outcome.prompt_logprobs is None


def test_deadline_frees_pages_before_the_step_that_follows(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=400, ignore_eos=True, deadline=5.0))
    while driver.now < 5.0:
        driver.step()
    assert driver.engine.stats.pages_used > 0
    driver.step()
    assert driver.engine.stats.pages_used == 0
    assert not driver.engine.has_work


def test_scoring_without_output(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=0, prompt_logprobs=3))
    outcome = driver.run()["a"]
    assert outcome.token_ids == []
    assert outcome.finished.reason is FinishReason.LENGTH
    entries = outcome.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry is not None] == PROMPT[1:]
    assert all(len(entry.top_ids) == 3 for entry in entries[1:] if entry is not None)


def test_prompt_of_the_whole_context_can_be_scored(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", _ids(512), max_tokens=0, prompt_logprobs=0))
    entries = driver.run()["a"].prompt_logprobs
    assert entries is not None
    assert len(entries) == 512


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_prompt_logprobs_do_not_depend_on_chunks(
    make_driver: MakeDriver, chunk: int | None
) -> None:
    expected = run_alone(make_request("a", _ids(200), max_tokens=3, prompt_logprobs=2))
    config = make_config(max_prefill_chunk=chunk, max_step_tokens=300)
    driver = make_driver(config)
    for request_id in "ab":
        driver.add(make_request(request_id, _ids(200), max_tokens=3, prompt_logprobs=2))
    for outcome in driver.run().values():
        assert outcome.prompt_logprobs == expected.prompt_logprobs
    runner = driver.runner
    assert isinstance(runner, ToyRunner)
    assert max(runner.logit_rows_of_steps) <= 64 + 2


def test_prompt_logprobs_are_computed_even_when_the_prompt_is_cached(
    make_driver: MakeDriver,
) -> None:
    driver = make_driver()
    driver.add(make_request("warm", _ids(100), max_tokens=1))
    driver.run()
    driver.add(make_request("a", _ids(100), max_tokens=1, prompt_logprobs=0))
    outcome = driver.run()["a"]
    assert outcome.cached_len == 0
    assert (
        outcome.prompt_logprobs
        == run_alone(make_request("a", _ids(100), max_tokens=1, prompt_logprobs=0)).prompt_logprobs
    )


@pytest.mark.parametrize(
    ("prompt_len", "cached_len"), [(31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (100, 96)]
)
def test_hit_leaves_the_last_prompt_token_to_compute(
    make_driver: MakeDriver, prompt_len: int, cached_len: int
) -> None:
    driver = make_driver()
    driver.add(make_request("first", _ids(prompt_len)))
    first = driver.run()["first"]
    assert first.cached_len == first.finished.cached_len == 0
    driver.add(make_request("second", _ids(prompt_len)))
    second = driver.run()["second"]
    assert second.cached_len == second.finished.cached_len == cached_len
    assert second.token_ids == first.token_ids
    stats = driver.engine.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * prompt_len, cached_len)


def test_output_is_cached_for_the_next_turn(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("turn1", _ids(40), max_tokens=60, ignore_eos=True))
    output = driver.run()["turn1"].token_ids
    driver.add(make_request("turn2", [*_ids(40), *output, 5, 6, 7], max_tokens=2))
    assert driver.run()["turn2"].cached_len == 96


def test_salts_and_opting_out_keep_prefixes_apart(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("private", _ids(70), use_prefix_cache=False))
    driver.run()
    assert driver.engine.stats.pages_cached == 0
    driver.add(make_request("a", _ids(70), cache_salt="a"))
    driver.run()
    for request_id, salt, use, expected in (
        ("b", "b", True, 0),
        ("same", "a", True, 64),
        ("opted out", "a", False, 0),
    ):
        driver.add(make_request(request_id, _ids(70), cache_salt=salt, use_prefix_cache=use))
        assert driver.run()[request_id].cached_len == expected


def test_reset_forgets_prefixes_and_disturbs_nobody(make_driver: MakeDriver) -> None:
    driver = make_driver()
    expected = run_alone(make_request("b", _ids(70), max_tokens=60, ignore_eos=True))
    driver.add(make_request("a", _ids(70)))
    driver.run()
    driver.add(make_request("b", _ids(70), max_tokens=60, ignore_eos=True))
    for _ in range(10):
        driver.step()
    driver.engine.reset_prefix_cache()
    assert driver.engine.stats.pages_cached == 0
    assert driver.run()["b"].token_ids == expected.token_ids
    driver.engine.reset_prefix_cache()
    driver.add(make_request("c", _ids(70)))
    assert driver.run()["c"].cached_len == 0


def test_choices_of_one_prompt_share_its_prefill(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_step_tokens=400, max_prefill_chunk=None))
    for index in range(4):
        driver.add(make_request(f"choice{index}", _ids(97), choice_index=index, temperature=1.0))
    outcomes = driver.run()
    assert [outcome.cached_len for outcome in outcomes.values()] == [0, 96, 96, 96]
    texts = {tuple(outcome.token_ids) for outcome in outcomes.values()}
    assert len(texts) == 4, "each choice has its own noise"


def test_cached_pages_are_given_up_for_new_requests(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(num_pages=6))
    for index in range(10):
        driver.add(make_request(f"r{index}", _ids(130, index)))
        driver.run()
    stats = driver.engine.stats
    assert stats.pages_cached + stats.pages_free == 6


def test_timeline_is_in_order(make_driver: MakeDriver) -> None:
    driver = make_driver(make_config(max_num_seqs=1))
    driver.now = 10.0
    driver.add(make_request("a", _ids(40), max_tokens=4))
    driver.add(make_request("b", _ids(40, 1), max_tokens=4))
    outcomes = driver.run()
    times = outcomes["a"].finished.times
    assert (times.arrived, times.scheduled) == (10.0, 10.0)
    assert times.prefill_done == times.first_token == 12.5, "three chunks of at most 16"
    assert times.finished == 15.5
    second = outcomes["b"].finished.times
    assert second.arrived == 10.0
    assert second.scheduled == 16.0


def test_counters_add_up(make_driver: MakeDriver) -> None:
    driver = make_driver()
    for index in range(6):
        driver.add(
            make_request(f"r{index}", _ids(20 + index, index), max_tokens=5, ignore_eos=True)
        )
    driver.run()
    stats = driver.engine.stats
    assert stats.num_prompt_tokens == sum(range(20, 26))
    assert stats.num_output_tokens == 30
    assert stats.num_computed_tokens == stats.num_prompt_tokens + 6 * 4
    assert stats.finished == {"length": 6}
    assert sum(stats.step_rows.counts) == sum(stats.step_seconds.counts) == stats.num_steps
    assert stats.step_rows.sum == stats.num_computed_tokens
    assert stats.step_seconds.sum == pytest.approx(0.5 * stats.num_steps)


def test_stats_are_a_snapshot(make_driver: MakeDriver) -> None:
    driver = make_driver()
    before = driver.engine.stats
    driver.add(make_request("a", PROMPT))
    driver.run()
    assert (before.num_steps, before.finished, sum(before.step_rows.counts)) == (0, {}, 0)


def test_speculation_counters_follow_the_definitions(make_driver: MakeDriver) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 21, "ignore_eos": True}
    truth = run_alone(make_request("a", PROMPT, **params)).token_ids
    driver = make_driver(make_config(draft_tokens=4), OracleDrafter({"a": PROMPT + truth}))
    driver.add(make_request("a", PROMPT, **params))
    outcome = driver.run()["a"]
    assert outcome.token_ids == truth
    stats = driver.engine.stats.speculation
    # 1 token from the prefill, then 4 accepted and 1 more per step.
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 16, 16)
    assert stats.num_drafted_per_position == stats.num_accepted_per_position == [4, 4, 4, 4]
    assert stats.num_fruitless_requests == 0
    times = outcome.finished.times
    assert (times.draft_tokens, times.accepted_tokens) == (16, 16)


def test_drafts_that_are_never_accepted_are_counted(make_driver: MakeDriver) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 21, "ignore_eos": True}
    truth = run_alone(make_request("a", PROMPT, **params)).token_ids
    drafter = OracleDrafter({"a": PROMPT + truth}, error_every=1)
    driver = make_driver(make_config(draft_tokens=4), drafter)
    driver.add(make_request("a", PROMPT, **params))
    assert driver.run()["a"].token_ids == truth
    stats = driver.engine.stats.speculation
    assert stats.num_accepted_tokens == 0
    assert stats.num_drafts == 19
    assert stats.num_fruitless_requests == 1


def test_the_last_token_is_never_drafted(make_driver: MakeDriver) -> None:
    params: dict[str, object] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    truth = run_alone(make_request("a", PROMPT, **params)).token_ids
    driver = make_driver(make_config(draft_tokens=8), OracleDrafter({"a": PROMPT + truth}))
    driver.add(make_request("a", PROMPT, **params))
    driver.run()
    assert driver.engine.stats.speculation.num_draft_tokens == 1


def test_tokens_come_before_the_terminal_event() -> None:
    engine = Engine(ToyRunner(), ToyArena(64), make_config())
    request = Request(
        request_id="a", prompt_ids=[5], params=SamplingParams(max_tokens=1, seed=1, ignore_eos=True)
    )
    engine.add(request, 0.0)
    tokens, finished = engine.step(0.0)
    assert isinstance(tokens, TokensEvent)
    assert (tokens.position, tokens.cached_len) == (1, 0)
    assert finished.request_id == "a"
    assert not engine.has_work
