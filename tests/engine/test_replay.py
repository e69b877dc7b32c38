"""A request that carries emitted ids goes on as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from support.engine_driver import Driver, OracleDrafter, make_config, make_request, run_alone
from trivet.request import FinishReason, Request

MakeDriver = Callable[..., Driver]
PROMPT = [(7 * i + i * i // 3) % 63 + 1 for i in range(37)]

CASES = {
    "greedy": {"temperature": 0.0, "max_tokens": 40},
    "sampled with penalties": {
        "temperature": 0.9,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "max_tokens": 40,
        "min_tokens": 20,
        "logprobs": 2,
        "seed": 5,
    },
    "ends with a stop token": {"temperature": 1.0, "max_tokens": 200, "seed": 3},
}


def _replay(request: Request, emitted_ids: list[int]) -> Request:
    return msgspec.structs.replace(request, emitted_ids=emitted_ids)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("drafted", [False, True])
def test_replay_from_every_split_equals_the_uninterrupted_run(
    make_driver: MakeDriver, case: str, drafted: bool
) -> None:
    request = make_request("a", PROMPT, **CASES[case])
    whole = run_alone(request)
    if case == "ends with a stop token":
        assert whole.finished.reason is FinishReason.STOP
    for split in range(len(whole.token_ids) + 1):
        emitted = whole.token_ids[:split]
        drafter = OracleDrafter({"a": PROMPT + whole.token_ids}, 5) if drafted else None
        driver = make_driver(make_config(), drafter)
        driver.add(_replay(request, emitted))
        outcome = driver.run()["a"]
        assert emitted + outcome.token_ids == whole.token_ids
        assert outcome.logprobs == whole.logprobs[split:]
        finished, expected = outcome.finished, whole.finished
        assert finished.reason == expected.reason
        assert finished.stop_token_id == expected.stop_token_id
        assert finished.output_len == expected.output_len
        assert driver.engine.stats.num_output_tokens == len(whole.token_ids) - split


def test_complete_replay_only_gets_its_terminal_event(make_driver: MakeDriver) -> None:
    request = make_request("a", PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True)
    whole = run_alone(request)
    driver = make_driver()
    driver.add(_replay(request, whole.token_ids))
    assert driver.engine.has_work
    outcome = driver.run()["a"]
    assert (outcome.token_ids, outcome.num_events) == ([], 0)
    assert outcome.finished.output_len == 8
    assert driver.engine.stats.num_steps == 0


def test_replay_ignores_what_lies_beyond_the_limit(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add(make_request("a", PROMPT, max_tokens=2, ignore_eos=True, emitted_ids=[5, 6, 7]))
    finished = driver.run()["a"].finished
    assert (finished.reason, finished.output_len) == (FinishReason.LENGTH, 2)


def test_replay_does_not_send_prompt_logprobs_again(make_driver: MakeDriver) -> None:
    request = make_request("a", PROMPT, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    whole = run_alone(request)
    assert whole.prompt_logprobs is not None
    driver = make_driver()
    driver.add(_replay(request, whole.token_ids[:3]))
    outcome = driver.run()["a"]
    assert outcome.prompt_logprobs is None
    assert whole.token_ids[:3] + outcome.token_ids == whole.token_ids


def test_replay_uses_the_prefix_cache_for_prompt_and_output(make_driver: MakeDriver) -> None:
    request = make_request("a", PROMPT, max_tokens=60, ignore_eos=True)
    driver = make_driver()
    driver.add(request)
    whole = driver.run()["a"].token_ids
    driver.add(_replay(request, whole[:40]))
    outcome = driver.run()["a"]
    assert whole[:40] + outcome.token_ids == whole
    assert outcome.cached_len == 37, "only prompt tokens are reported as cached"
    assert driver.engine.stats.prefix_hits == 64
