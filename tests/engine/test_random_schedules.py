"""Property tests: whatever the schedule, a request gives what it gives alone (I1, I2), ends once (I3)
and leaves no page behind (I4).
"""

from __future__ import annotations

import dataclasses
import functools

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_driver import (
    Driver,
    OracleDrafter,
    Outcome,
    make_config,
    make_request,
    run_alone,
)
from support.toy_runner import ToyRunner
from trivet.engine import Drafter
from trivet.request import CancelledEvent, FinishedEvent, Request
from trivet.speculate import NgramDrafter

_SHARED = [(5 * i + i * i // 7) % 63 + 1 for i in range(90)]
_SAMPLING: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 6},
    {"temperature": 1.0, "min_p": 0.05, "stop_token_ids": [3, 10], "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1, "logprobs": 0},
]


@dataclasses.dataclass(frozen=True)
class Job:
    """One request of a random schedule."""

    shared_len: int
    own_len: int
    max_tokens: int
    sampling: int
    seed: int
    choice_index: int
    priority: int
    arrival: int
    abort_after: int | None
    use_prefix_cache: bool

    def request(self, index: int) -> Request:
        own = [(11 * i + 13 * index) % 63 + 1 for i in range(self.own_len)]
        prompt = [*_SHARED[: self.shared_len], *own] or [index + 1]
        return make_request(
            f"r{index}",
            prompt,
            max_tokens=self.max_tokens,
            seed=self.seed,
            choice_index=self.choice_index,
            priority=self.priority,
            use_prefix_cache=self.use_prefix_cache,
            **_SAMPLING[self.sampling],
        )


jobs = st.builds(
    Job,
    shared_len=st.sampled_from([0, 1, 31, 32, 33, 64, 70, 90]),
    own_len=st.sampled_from([0, 1, 2, 17, 32, 40]),
    max_tokens=st.sampled_from([0, 1, 2, 9, 33, 50]),
    sampling=st.integers(0, len(_SAMPLING) - 1),
    seed=st.integers(0, 3),
    choice_index=st.integers(0, 1),
    priority=st.integers(0, 1),
    arrival=st.integers(0, 12),
    abort_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    use_prefix_cache=st.sampled_from([True, True, False]),
)


@functools.cache
def _alone(encoded: bytes) -> Outcome:
    return run_alone(msgspec.json.decode(encoded, type=Request))


def _drafter(kind: str, requests: dict[str, Request]) -> Drafter | None:
    if kind == "off":
        return None
    if kind == "ngram":
        return NgramDrafter(min_match=1)
    truth = {
        request_id: [*request.prompt_ids, *_alone(msgspec.json.encode(request)).token_ids]
        for request_id, request in requests.items()
    }
    return OracleDrafter(
        truth, error_every={"oracle": 0, "often wrong": 3, "always wrong": 1}[kind]
    )


def _assert_same(request: Request, outcome: Outcome) -> None:
    expected = _alone(msgspec.json.encode(request))
    if isinstance(outcome.terminal, CancelledEvent):
        assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
        return
    assert isinstance(outcome.terminal, FinishedEvent)
    assert outcome.token_ids == expected.token_ids
    assert outcome.logprobs == expected.logprobs
    assert outcome.prompt_logprobs == expected.prompt_logprobs
    assert outcome.terminal.reason == expected.finished.reason
    assert outcome.terminal.stop_token_id == expected.finished.stop_token_id
    assert outcome.terminal.output_len == expected.finished.output_len == len(outcome.token_ids)


@settings(max_examples=100)
@given(
    schedule=st.lists(jobs, min_size=1, max_size=8),
    num_pages=st.sampled_from([6, 8, 11, 40]),
    max_num_seqs=st.integers(1, 5),
    max_step_tokens=st.sampled_from([5, 8, 33, 100]),
    max_prefill_chunk=st.sampled_from([1, 3, 16, 32, 64, None]),
    prefix_cache=st.booleans(),
    drafting=st.sampled_from(["off", "ngram", "oracle", "often wrong", "always wrong"]),
    draft_tokens=st.sampled_from([1, 3, 8]),
)
def test_any_schedule_gives_what_each_request_gives_alone(
    schedule: list[Job],
    num_pages: int,
    max_num_seqs: int,
    max_step_tokens: int,
    max_prefill_chunk: int | None,
    prefix_cache: bool,
    drafting: str,
    draft_tokens: int,
) -> None:
    config = make_config(
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        max_prefill_chunk=max_prefill_chunk,
        prefix_cache=prefix_cache,
        draft_tokens=draft_tokens,
    )
    requests = {f"r{index}": job.request(index) for index, job in enumerate(schedule)}
    runner = ToyRunner()
    driver = Driver(config, _drafter(drafting, requests), runner)
    while driver.engine.has_work or driver.now <= 12:
        assert driver.now < 5000, "no progress"
        for index, job in enumerate(schedule):
            if job.arrival == driver.now:
                driver.add(requests[f"r{index}"])
            if job.abort_after is not None and job.arrival + job.abort_after == driver.now:
                driver.engine.abort(f"r{index}")
        driver.step()
        stats = driver.engine.stats
        assert stats.num_running <= max_num_seqs
    driver.close()
    for request_id, request in requests.items():
        _assert_same(request, driver.outcomes[request_id])
    if max_prefill_chunk is not None:
        assert max(runner.rows_of_steps, default=0) <= max_step_tokens
    assert max(runner.logit_rows_of_steps, default=0) <= 64 + max_num_seqs * (draft_tokens + 1)
    assert driver.engine.stats.num_computed_tokens == sum(runner.rows_of_steps)
    if isinstance(drafter := driver.engine._drafter, OracleDrafter):
        assert not drafter.open_ids
