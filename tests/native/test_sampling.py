"""The native sampler against its numpy definition, bit for bit, on every level this CPU has.

Levels the CPU lacks run in software: test_emulation.py.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trivet.errors import RequestError
from trivet.native import _core, reference_sampling, sampling
from trivet.native.api import SampleInput
from trivet.native.reference_sampling import ReferenceSampler
from trivet.request import SamplingParams

Float32 = NDArray[np.float32]
LEVELS = [name for name, refusal in _core.isa_levels() if not refusal]
each_level = pytest.mark.parametrize("isa", LEVELS)
EOS = 1


def make_row(rng: np.random.Generator, vocab_size: int, kind: str) -> Float32:
    """Logits with what models and hostile inputs produce: spread, flat, ties, holes, no number."""
    row = rng.normal(0.0, 4.0, vocab_size).astype(np.float32)
    if kind == "ties":
        row = np.round(row).astype(np.float32)
    elif kind == "flat":
        row *= np.float32(0.01)
    elif kind == "peaked":
        row[rng.integers(vocab_size)] += 40.0
    elif kind == "holes":
        row[rng.random(vocab_size) < 0.5] = -np.inf
        row[rng.random(vocab_size) < 0.1] = np.nan
    elif kind == "hostile":
        values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, 1e-30]
        row = rng.choice(np.array(values, np.float32), vocab_size)
    elif kind == "empty":
        row[:] = rng.choice(np.array([np.nan, -np.inf], np.float32), vocab_size)
    return row


KINDS = ["spread", "ties", "flat", "peaked", "holes", "hostile", "empty"]


@dataclasses.dataclass
class Pair:
    """A native state and its definition, fed alike."""

    native: Any
    reference: ReferenceSampler

    @classmethod
    def make(
        cls, params: SamplingParams, prompt: Sequence[int], vocab_size: int, choice: int = 0
    ) -> Pair:
        make: list[Callable[..., Any]] = [sampling.new_sampler, ReferenceSampler]
        native, reference = (
            f(params, choice, prompt, vocab_size=vocab_size, eos_ids={min(EOS, vocab_size - 1)})
            for f in make
        )
        return cls(native, reference)

    def commit(self, tokens: Sequence[int]) -> None:
        self.native.commit(tokens)
        self.reference.commit(tokens)

    def assert_same(
        self, isa: str, logits: Float32, position: int, draft: Sequence[int] = ()
    ) -> None:
        """A level draws what the definition says."""
        expected = reference_sampling.sample(
            logits, [SampleInput(self.reference, 0, position, draft)]
        )
        got = sampling.sample(logits, [SampleInput(self.native, 0, position, draft)], isa=isa)
        assert got == expected


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, vocab_size - 1)
    banned = draw(st.lists(ids, max_size=3))
    allowed = draw(st.none() | st.lists(ids, min_size=1, max_size=8))
    if allowed is not None and not set(allowed) - set(banned):
        banned = []
    if len(set(banned)) >= vocab_size:
        banned = []
    return SamplingParams(
        max_tokens=100,
        min_tokens=draw(st.integers(0, 4)),
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.01, 0.7, 1.0, 1.5, 50.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 10, 50, vocab_size, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9, 0.999999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0, 1e-30])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.7])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3)),
        allowed_token_ids=allowed,
        banned_token_ids=banned,
        stop_token_ids=draw(st.lists(ids, max_size=2)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.none() | st.sampled_from([0, 1, min(5, vocab_size), vocab_size])),
    )


@each_level
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_native_equals_the_definition(isa: str, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 7, 16, 63, 64, 65, 100, 257, 1000]))
    params = data.draw(sampling_params(vocab_size))
    ids = st.integers(0, vocab_size - 1)
    prompt = data.draw(st.lists(ids, min_size=1, max_size=6))
    committed = data.draw(st.lists(ids, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    num_draft = data.draw(st.integers(0, 4))
    logits = np.stack(
        [make_row(rng, vocab_size, data.draw(st.sampled_from(KINDS))) for _ in range(num_draft + 1)]
    )
    pair = Pair.make(params, prompt, vocab_size, choice=data.draw(st.integers(0, 5)))
    pair.commit(committed)
    position = len(prompt) + len(committed)
    draft: list[int] = []
    for i in range(num_draft):  # follow the right path mostly, so that later rows are reached
        token = pair.reference.draw(logits[i], position + i, draft)
        draft.append(token if rng.random() < 0.85 else int(rng.integers(vocab_size)))
    pair.assert_same(isa, logits, position, draft)


@each_level
@pytest.mark.parametrize("kind", KINDS)
def test_native_equals_the_definition_at_the_demo_vocabulary(kind: str, isa: str) -> None:
    vocab_size = 49152
    rng = np.random.default_rng(7)
    logits = make_row(rng, vocab_size, kind)[None]
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.3, "logprobs": 5},
        {"top_p": 0.9},
        {"top_p": 0.99999},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 5000},
        {"min_p": 0.02},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "top_p": 0.8, "min_p": 0.001},
    ]
    for fields in cases:
        params = SamplingParams(**{"seed": 11, **fields})
        pair = Pair.make(params, rng.integers(0, vocab_size, 50).tolist(), vocab_size)
        pair.assert_same(isa, logits, 50)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_verification_draws_what_plain_sampling_draws(data: st.DataObject) -> None:
    """I2: drafts of any length and quality change nothing, and leave nothing in the state."""
    vocab_size = 50
    params = data.draw(sampling_params(vocab_size))
    prompt = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = np.stack([make_row(rng, vocab_size, "ties") for _ in range(12)])

    plain = Pair.make(params, prompt, vocab_size).native
    expected = []
    for i in range(len(logits)):
        position = len(prompt) + i
        (result,) = sampling.sample(logits, [SampleInput(plain, i, position)])
        plain.commit(result.token_ids)
        expected.append(result)

    state = Pair.make(params, prompt, vocab_size).native
    done = 0
    while done < len(logits):
        num_draft = min(data.draw(st.integers(0, 5)), len(logits) - done - 1)
        draft = [
            expected[done + i].token_ids[0] if rng.random() < 0.8 else int(rng.integers(vocab_size))
            for i in range(num_draft)
        ]
        step = SampleInput(state, done, len(prompt) + done, draft)
        (result,) = sampling.sample(logits, [step])
        assert sampling.sample(logits, [step]) == [result]
        assert result.token_ids[:-1] == draft[: len(result.token_ids) - 1]
        for i, token in enumerate(result.token_ids):
            assert [token] == expected[done + i].token_ids
            if result.logprobs is not None:
                assert [result.logprobs[i]] == expected[done + i].logprobs
        state.commit(result.token_ids)
        done += len(result.token_ids)


def test_philox_known_answers() -> None:
    """Vectors of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds)."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, answer in cases:
        words = reference_sampling.philox4x32(np.array(counter, np.uint32), key)
        assert " ".join(f"{word:08x}" for word in words) == answer


def test_log_and_exp_are_accurate() -> None:
    x = np.concatenate([np.linspace(2.0**-33, 1.0, 10001), np.geomspace(1e-300, 1e300, 10001)])
    log = reference_sampling.log_positive(x)
    np.testing.assert_allclose(log, np.log(x), rtol=1e-15, atol=1e-18)
    y = np.linspace(-87.0, 0.0, 20001).astype(np.float32)
    np.testing.assert_allclose(
        reference_sampling.exp_scaled(y), np.exp(y.astype(np.float64)), rtol=2e-7
    )
    below = np.array([-87.1, -np.inf, np.nan], np.float32)
    assert not reference_sampling.exp_scaled(below).any()


def _draws(params: SamplingParams, row: Float32, count: int) -> NDArray[np.int64]:
    """Tokens at ``count`` positions of one request that always sees the same logits."""
    state = sampling.new_sampler(params, 0, [0], vocab_size=len(row))
    tokens = []
    for position in range(1, count + 1):
        (result,) = sampling.sample(row[None], [SampleInput(state, 0, position)])
        state.commit(result.token_ids)
        tokens += result.token_ids
    return np.array(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, -5])
def test_draws_follow_softmax(temperature: float, seed: int) -> None:
    row = np.random.default_rng(3).normal(0.0, 1.5, 100).astype(np.float32)
    count = 20000
    tokens = _draws(SamplingParams(temperature=temperature, seed=seed), row, count)
    p = np.exp(row.astype(np.float64) / temperature)
    expected = count * p / p.sum()
    seen = np.bincount(tokens, minlength=100).astype(np.float64)
    common = expected >= 5.0
    cells = int(common.sum()) + 1
    chi_square = (((seen - expected) ** 2) / expected)[common].sum()
    rest = expected[~common].sum()
    if rest >= 5.0:
        chi_square += (seen[~common].sum() - rest) ** 2 / rest
    # The 99.9 % quantile of chi-square, by Wilson and Hilferty's approximation.
    freedom = cells - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < quantile


def test_truncation_keeps_the_right_tokens() -> None:
    row = np.log(np.array([0.4, 0.1, 0.3, 0.05, 0.15], np.float32))
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 0.7 - 1e-6}, {0, 2}),
        ({"top_p": 0.71}, {0, 2, 4}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 2, 4}),
        ({"top_k": 4, "top_p": 0.73}, {0, 2}),  # 0.7 of 0.95
        ({"banned_token_ids": [0, 4]}, {1, 2, 3}),
        ({"allowed_token_ids": [3, 1]}, {1, 3}),
        ({"logit_bias": {3: -100.0, 1: -100.0}}, {0, 2, 4}),
    ]
    for fields, survivors in cases:
        params = SamplingParams(**{"seed": 5, **fields})
        assert set(_draws(params, row, 400).tolist()) == survivors, fields


def test_ties_go_to_the_lowest_id() -> None:
    row = np.zeros(130, np.float32)
    row[[64, 100]] = 2.0
    state = sampling.new_sampler(
        SamplingParams(temperature=0.0, seed=0, logprobs=3), 0, [0], vocab_size=130
    )
    for isa in LEVELS:
        (result,) = sampling.sample(row[None], [SampleInput(state, 0, 1)], isa=isa)
        assert result.token_ids == [64]
        assert result.logprobs is not None
        assert result.logprobs[0].top_ids == [64, 100, 0]
    assert set(_draws(SamplingParams(top_k=1, seed=1), row, 50).tolist()) == {64}
    assert set(_draws(SamplingParams(top_k=2, seed=1), row, 200).tolist()) == {64, 100}
    assert set(_draws(SamplingParams(top_k=3, seed=1), row, 200).tolist()) == {0, 64, 100}


def test_noise_depends_on_seed_choice_and_position_only() -> None:
    row = np.random.default_rng(0).normal(0.0, 1.0, 500).astype(np.float32)

    def draw(seed: int, choice: int, position: int) -> int:
        state = sampling.new_sampler(
            SamplingParams(seed=seed), choice, [0] * position, vocab_size=500
        )
        return sampling.sample(row[None], [SampleInput(state, 0, position)])[0].token_ids[0]

    base = [draw(1, 0, p) for p in range(1, 60)]
    assert base == [draw(1, 0, p) for p in range(1, 60)]
    for other in (
        [draw(2, 0, p) for p in range(1, 60)],
        [draw(1 + 2**32, 0, p) for p in range(1, 60)],
        [draw(1, 1, p) for p in range(1, 60)],
        base[1:] + base[:1],
    ):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 12


def test_min_tokens_masks_stop_tokens_by_position() -> None:
    row = np.zeros(10, np.float32)
    row[[EOS, 7]] = 9.0, 8.0
    logits = np.stack([row] * 4)
    params = SamplingParams(temperature=0.0, seed=0, min_tokens=2, stop_token_ids=[7])
    state = sampling.new_sampler(params, 0, [3, 3], vocab_size=10, eos_ids={EOS})
    (result,) = sampling.sample(logits, [SampleInput(state, 0, 2, [0, 0, EOS])])
    assert result.token_ids == [0, 0, EOS, EOS]
    only_stop = SamplingParams(temperature=0.0, seed=0, min_tokens=2, allowed_token_ids=[EOS])
    state = sampling.new_sampler(only_stop, 0, [3, 3], vocab_size=10, eos_ids={EOS})
    (result,) = sampling.sample(logits, [SampleInput(state, 0, 2)])
    assert result.token_ids == [EOS]


def test_logits_without_a_number_give_the_lowest_allowed_id() -> None:
    logits = np.full((1, 70), np.nan, np.float32)
    params = SamplingParams(seed=0, banned_token_ids=[0, 1], logprobs=2)
    state = sampling.new_sampler(params, 0, [0], vocab_size=70)
    (result,) = sampling.sample(logits, [SampleInput(state, 0, 1)])
    assert result.token_ids == [2]
    assert result.logprobs is not None
    assert result.logprobs[0].logprob == -math.inf


@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 64, 65, 1000])
def test_token_logprobs_equal_the_definition(kind: str, vocab_size: int, isa: str) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = np.stack([make_row(rng, vocab_size, kind) for _ in range(5)])
    tokens = rng.integers(0, vocab_size, 4).tolist()
    for top in (0, 1, 5, vocab_size):
        expected = reference_sampling.token_logprobs(logits, 1, tokens, top)
        assert sampling.token_logprobs(logits, 1, tokens, top, isa=isa) == expected


def test_logprobs_are_log_softmax_and_agree_with_the_top_list() -> None:
    rng = np.random.default_rng(2)
    row = make_row(rng, 1000, "spread")
    exact = row.astype(np.float64) - row.max()
    exact -= np.log(np.exp(exact).sum())
    for entry in sampling.token_logprobs(np.stack([row] * 1000), 0, range(1000), 10):
        assert entry.logprob == pytest.approx(exact[entry.token_id], abs=1e-6)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        if entry.rank <= 10:
            assert entry.top_ids[entry.rank - 1] == entry.token_id
            assert entry.top_logprobs[entry.rank - 1] == entry.logprob


def test_many_requests_in_one_call() -> None:
    vocab_size = 300
    rng = np.random.default_rng(4)
    logits = np.stack([make_row(rng, vocab_size, "spread") for _ in range(40)])
    inputs, alone = [], []
    row = 0
    for i in range(16):
        params = SamplingParams(
            seed=i, temperature=0.2 * i, top_p=0.9, frequency_penalty=0.1 * (i % 3)
        )
        state = sampling.new_sampler(params, i, [1, 2, 3], vocab_size=vocab_size)
        draft = rng.integers(0, vocab_size, i % 3).tolist()
        inputs.append(SampleInput(state, row, 3, draft))
        alone += sampling.sample(logits, inputs[-1:])
        row += len(draft) + 1
    assert sampling.sample(logits, inputs) == alone
    assert sampling.sample(logits, []) == []


def test_misuse_is_refused() -> None:
    logits = np.zeros((2, 10), np.float32)
    state = sampling.new_sampler(SamplingParams(seed=0), 0, [1], vocab_size=10)
    for bad in (
        SampleInput(state, 2, 1),
        SampleInput(state, -1, 1),
        SampleInput(state, 0, 1, [1, 2]),
        SampleInput(state, 0, 1, [10]),
        SampleInput(state, 0, 1, [-1]),
        SampleInput(state, 0, 2),  # token 1 was never committed
    ):
        with pytest.raises(ValueError):
            sampling.sample(logits, [bad])
    with pytest.raises(ValueError):
        sampling.sample(np.zeros((2, 11), np.float32), [SampleInput(state, 0, 1)])
    with pytest.raises(ValueError):
        state.commit([10])
    with pytest.raises(ValueError):
        sampling.token_logprobs(logits, 1, [0, 0], 1)
    with pytest.raises(ValueError):
        sampling.token_logprobs(logits, 0, [10], 1)
    with pytest.raises(ValueError):
        sampling.new_sampler(SamplingParams(seed=0), 0, [10], vocab_size=10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 10**12),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [50]),
        ("banned_token_ids", [-1]),
        ("banned_token_ids", list(range(50))),
        ("stop_token_ids", [50]),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logprobs", -1),
        ("logprobs", 51),
        ("prompt_logprobs", 51),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as error:
        sampling.check_sampling_params(params, 50)
    with pytest.raises(RequestError):
        sampling.new_sampler(params, 0, [1], vocab_size=50)
    assert error.value.param == field
    assert error.value.message.startswith(field)
    assert len(error.value.message) < 300


def test_sensible_parameters_pass() -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"temperature": 2.5, "top_k": 10**6, "top_p": 1, "min_p": 1.0},
        {"logit_bias": {0: -100, 49: 100.0}, "banned_token_ids": [3], "allowed_token_ids": [3, 4]},
        {"seed": 2**64 - 1, "max_tokens": 0},
        {"seed": -(2**63), "logprobs": 0, "prompt_logprobs": 50},
    ]
    for fields in cases:
        sampling.check_sampling_params(SamplingParams(**fields), 50)


def _best_seconds(work: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(15):
        start = time.perf_counter()
        for _ in range(8):
            work()
        best = min(best, (time.perf_counter() - start) / 8)
    return best


@pytest.mark.skipif(LEVELS == ["generic"], reason="the generic level is the definition, not fast")
@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"temperature": 0.0}, 1.5),  # measured 0.15
        ({"temperature": 1.0}, 12.0),  # measured 2
        ({"top_p": 0.9}, 12.0),  # measured 2
        ({"top_k": 50}, 4.0),  # measured 0.4
        ({"temperature": 0.0, "logprobs": 5}, 12.0),  # measured 2
    ],
)
def test_a_draw_costs_a_few_passes_over_the_row(fields: dict[str, Any], limit: float) -> None:
    """Time of one draw at the demo's vocabulary, in units of numpy's exp of the same row."""
    row = make_row(np.random.default_rng(0), 49152, "spread")
    state = sampling.new_sampler(SamplingParams(**{"seed": 0, **fields}), 0, [0], vocab_size=49152)
    logits, inputs = row[None], [SampleInput(state, 0, 1)]
    draw_s = _best_seconds(lambda: sampling.sample(logits, inputs))
    assert draw_s < limit * _best_seconds(lambda: np.exp(row))
