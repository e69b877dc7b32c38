"""The engine on the native core, with tiny real models of every weight and KV format (I1, I2)."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from support import tiny_models
from support.engine_driver import Driver, OracleDrafter, Outcome, make_config, make_request
from trivet.config import EngineConfig, KVFormat
from trivet.engine import Drafter
from trivet.native.api import ModelRunner
from trivet.native.arena import Arena
from trivet.native.model import load_model
from trivet.quant import load_packed
from trivet.request import Request
from trivet.speculate import NgramDrafter

WEIGHTS = ["bf16", "w8a8", "w8a8-g32", "w4a8-g32", "w4a8-g64-zp", "w4a8-g32-min"]
SAMPLING: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 0.5, "top_p": 0.95, "logprobs": 0},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "min_tokens": 8, "repetition_penalty": 1.1},
]
_MAX_LEN = 256
_SHARED = [(29 * i + i * i // 3) % 380 + 3 for i in range(100)]


@dataclasses.dataclass(frozen=True)
class Native:
    """A runner and what each request gives alone on it."""

    runner: ModelRunner

    def drive(self, config: EngineConfig, drafter: Drafter | None = None) -> Driver:
        arena = Arena(self.runner.kv_geometry(), config.num_pages)
        return Driver(config, drafter, self.runner, arena)

    def alone(self, request: Request) -> Outcome:
        config = make_config(
            max_model_len=_MAX_LEN,
            num_pages=8,
            max_num_seqs=1,
            max_prefill_chunk=None,
            prefix_cache=False,
        )
        driver = self.drive(config)
        driver.add(request)
        return driver.run()[request.request_id]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIVET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield tiny_models.build_folder(tmp_path_factory.mktemp("model") / "tiny", "smollm2")


@pytest.fixture(scope="module")
def natives(folder: Path) -> dict[tuple[str, KVFormat], Native]:
    packed = {weights: load_packed(folder, weights) for weights in WEIGHTS}
    return {
        (weights, kv): Native(cast(ModelRunner, load_model(packed[weights], threads=2, kv=kv)))
        for weights in WEIGHTS
        for kv in KVFormat
    }


def _requests(seed: int, count: int) -> list[Request]:
    """Prompts that share prefixes and repeat themselves, so that caches hit and drafts match."""
    choose = random.Random(seed)
    requests = []
    for index in range(count):
        shared = _SHARED[: choose.choice([0, 20, 32, 64, 70, 100])]
        own = [choose.randrange(3, 384) for _ in range(choose.choice([1, 3, 20, 33]))]
        max_tokens = choose.choice([8, 12, 30])
        requests.append(
            make_request(
                f"r{index}",
                shared + own + own,
                seed=choose.randrange(100),
                max_tokens=max_tokens,
                ignore_eos=choose.random() < 0.5,
                **choose.choice(SAMPLING),
            )
        )
    return requests


def _assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.token_ids == expected.token_ids
    assert outcome.logprobs == expected.logprobs, "log-probabilities are equal to the last bit"
    assert outcome.finished.reason == expected.finished.reason


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_schedule_gives_what_each_request_gives_alone(
    natives: dict[tuple[str, KVFormat], Native], weights: str, kv: KVFormat
) -> None:
    native = natives[weights, kv]
    choose = random.Random(f"{weights} {kv}")
    num_hits = num_accepted = 0
    for round_index in range(3):
        requests = _requests(choose.randrange(1000), 6)
        expected = {request.request_id: native.alone(request) for request in requests}
        truth = {
            request.request_id: [*request.prompt_ids, *expected[request.request_id].token_ids]
            for request in requests
        }
        config = make_config(
            max_model_len=_MAX_LEN,
            num_pages=choose.choice([9, 12, 24]),
            max_num_seqs=choose.choice([2, 3, 6]),
            max_step_tokens=choose.choice([9, 40, 200]),
            max_prefill_chunk=choose.choice([1, 7, 64, None]),
            draft_tokens=choose.choice([1, 4]),
        )
        drafter = [None, NgramDrafter(1), OracleDrafter(truth, 4)][round_index]
        driver = native.drive(config, drafter)
        for request in requests:
            driver.add(request)
            for _ in range(choose.choice([0, 1, 4])):
                driver.step()
        outcomes = driver.run()
        for request_id, outcome in outcomes.items():
            _assert_same(outcome, expected[request_id])
        stats = driver.engine.stats
        num_hits += stats.prefix_hits
        num_accepted += stats.speculation.num_accepted_tokens
    assert num_hits > 0
    assert num_accepted > 0


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fifty_prompts_read_the_same_with_ngram_on_and_off(
    natives: dict[tuple[str, KVFormat], Native], temperature: float, kv: KVFormat
) -> None:
    native = natives["w4a8-g32", kv]
    requests = []
    for index in range(50):
        choose = random.Random(index)
        phrase = [choose.randrange(3, 384) for _ in range(7)]
        requests.append(
            make_request(
                f"r{index}",
                phrase * 3,
                temperature=temperature,
                repetition_penalty=1.05,
                frequency_penalty=0.05,
                logprobs=1,
                max_tokens=24,
                seed=index,
            )
        )
    results = []
    for draft in (None, NgramDrafter()):
        config = make_config(
            max_model_len=_MAX_LEN, num_pages=64, max_num_seqs=16, max_step_tokens=128
        )
        driver = native.drive(config, draft)
        for request in requests:
            driver.add(request)
        results.append(driver.run())
        spec = driver.engine.stats.speculation
    off, on = results
    assert spec.num_draft_tokens > 0, "nothing was drafted, so nothing was tested"
    for request_id, outcome in on.items():
        _assert_same(outcome, off[request_id])


@pytest.mark.parametrize("kv", list(KVFormat))
def test_preemption_changes_no_bit(
    natives: dict[tuple[str, KVFormat], Native], kv: KVFormat
) -> None:
    native = natives["w8a8", kv]
    requests = [
        make_request(f"r{i}", [7 * i + 5] * 30, max_tokens=90, ignore_eos=True, logprobs=1, seed=i)
        for i in range(3)
    ]
    driver = native.drive(make_config(max_model_len=_MAX_LEN, num_pages=7))
    for request in requests:
        driver.add(request)
    outcomes = driver.run()
    assert driver.engine.stats.num_preemptions > 0
    for request in requests:
        _assert_same(outcomes[request.request_id], native.alone(request))


def test_replay_at_any_split_changes_no_bit(
    natives: dict[tuple[str, KVFormat], Native],
) -> None:
    native = natives["w4a8-g32-min", KVFormat.INT8]
    make = functools.partial(
        make_request,
        "a",
        _SHARED[:40],
        max_tokens=30,
        temperature=0.9,
        frequency_penalty=0.5,
        logprobs=1,
        min_tokens=30,
    )
    whole = native.alone(make())
    assert len(whole.token_ids) == 30
    for split in (0, 1, 7, 24, 25, 29):
        driver = native.drive(make_config(max_model_len=_MAX_LEN))
        driver.add(make(emitted_ids=whole.token_ids[:split]))
        outcome = driver.run()["a"]
        assert whole.token_ids[:split] + outcome.token_ids == whole.token_ids
        assert outcome.logprobs == whole.logprobs[split:]


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_prompt_logprobs_do_not_depend_on_chunks(
    natives: dict[tuple[str, KVFormat], Native], chunk: int | None
) -> None:
    native = natives["w8a8", KVFormat.BF16]
    request = make_request("a", _SHARED, max_tokens=0, prompt_logprobs=2)
    driver = native.drive(make_config(max_model_len=_MAX_LEN, max_prefill_chunk=chunk))
    driver.add(request)
    outcome = driver.run()["a"]
    assert outcome.prompt_logprobs == native.alone(request).prompt_logprobs
    assert outcome.prompt_logprobs is not None
    assert len(outcome.prompt_logprobs) == len(_SHARED)
