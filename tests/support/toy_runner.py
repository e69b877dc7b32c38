"""A deterministic toy language model behind the ModelRunner protocol, for tests without weights.

Its "KV" is a rolling hash written into the pages of a `ToyArena`: the value at position p is a hash of
the value at p-1, read back from its page, and of the token at p. The logits of a row are a hash of all
values [0, p] read back through the page table. So a wrong page, a stale or missing value, a wrong
position, a bad prefix hit or a shared page that was written to changes the tokens that come out.

The most likely next token is usually a fixed function of the last one, so that text repeats and drafts
are accepted, and now and then something else, so that they are also rejected. Token 0 is EOS.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.config import PAGE_TOKENS
from trivet.errors import RequestError
from trivet.native.api import (
    Arena,
    Float32,
    KVGeometry,
    SampleInput,
    SampleResult,
    SamplerState,
    StepInput,
    Taps,
)
from trivet.request import Logprob, SamplingParams

UInt64 = NDArray[np.uint64]

_GEOMETRY = KVGeometry(
    num_layers=1,
    num_kv_heads=1,
    head_dim=2,
    kv_format="bf16",
    page_tokens=PAGE_TOKENS,
    page_bytes=8 * PAGE_TOKENS,
)

_MASK = 2**64 - 1


def _mix(values: UInt64) -> UInt64:
    """SplitMix64's finalizer, elementwise; arithmetic is modulo 2**64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix_one(value: int) -> int:
    """`_mix` of one number."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class ToyArena:
    """Pages of hash values; fresh ones hold garbage, as recycled ones do."""

    def __init__(self, num_pages: int) -> None:
        self.values: UInt64 = _mix(np.arange(num_pages * PAGE_TOKENS, dtype=np.uint64))
        self.values = self.values.reshape(num_pages, PAGE_TOKENS)

    @property
    def num_pages(self) -> int:
        return len(self.values)

    @property
    def geometry(self) -> KVGeometry:
        return _GEOMETRY


class ToySampler:
    """Parameters, noise key and penalty counts of one request."""

    def __init__(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int], vocab_size: int
    ) -> None:
        if params.seed is None:
            raise RequestError("a seed must be set", "seed")
        self.params = params
        self.prompt_len = len(prompt_ids)
        self.seen = np.zeros(vocab_size, bool)
        self.seen[list(prompt_ids)] = True
        self.counts = np.zeros(vocab_size, np.int64)
        self.noise_key = np.uint64((params.seed * 1_000_003 + choice_index) % 2**64)

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.counts[token_id] += 1


class ToyRunner:
    """The toy model.

    step_seconds   slept in every forward call, for tests that need a slow model
    overflows_at   the first position whose hidden state is not finite; None: all are
    """

    def __init__(
        self,
        vocab_size: int = 64,
        max_positions: int = 4096,
        *,
        seed: int = 0,
        step_seconds: float = 0.0,
        overflows_at: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._seed = np.uint64(seed)
        self._logits: Float32 = np.zeros((0, vocab_size), np.float32)
        self.step_seconds = step_seconds
        self._overflows_at = overflows_at
        self._nonfinite: list[int] = []
        self.num_steps = 0
        self.rows_of_steps: list[int] = []
        self.logit_rows_of_steps: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def hidden_size(self) -> int:
        return 1

    @property
    def max_positions(self) -> int:
        return self._max_positions

    @property
    def numerics_id(self) -> str:
        return f"toy-{self._vocab_size}-{self._seed}"

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({0})

    def kv_geometry(self) -> KVGeometry:
        return _GEOMETRY

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        assert isinstance(arena, ToyArena)
        assert taps is None
        self._check_step(step)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.num_steps += 1
        self.rows_of_steps.append(len(step.tokens))
        self.logit_rows_of_steps.append(len(step.logit_rows))
        states = np.zeros(len(step.tokens), np.uint64)
        row_positions = np.zeros(len(step.tokens), np.int64)
        for first_row, count, start, table in step.segments.tolist():
            rows = slice(first_row, first_row + count)
            end = start + count
            positions = np.arange(end)
            pages = step.page_tables[table, positions // PAGE_TOKENS]
            assert (pages >= 0).all(), "a position has no page"
            offsets = positions % PAGE_TOKENS
            before = arena.values[pages[start - 1], offsets[start - 1]] if start else self._seed
            value = int(before)
            written = []
            for token_id in step.tokens[rows].tolist():
                value = _mix_one(value ^ _mix_one(token_id * 8191))
                written.append(value)
            arena.values[pages[start:], offsets[start:]] = np.array(written, np.uint64)
            read_back = arena.values[pages, offsets]
            attended = np.cumsum(_mix(read_back + positions.astype(np.uint64)), dtype=np.uint64)
            states[rows] = attended[start:]
            row_positions[rows] = positions[start:]
        self._logits = self._head(states[step.logit_rows], step.tokens[step.logit_rows])
        if self._overflows_at is not None:
            is_beyond = row_positions[step.logit_rows] >= self._overflows_at
            self._nonfinite = np.flatnonzero(is_beyond).tolist()
        return None

    def _check_step(self, step: StepInput) -> None:
        row = 0
        for first_row, count, start, table in step.segments.tolist():
            assert first_row == row, "segments must lie in row order"
            assert count >= 1, "a segment is empty"
            assert 0 <= start <= start + count <= self._max_positions, "a position is out of range"
            assert 0 <= table < len(step.page_tables), "no such page table"
            row += count
        assert row == len(step.tokens), "segments must cover all rows"
        assert len(set(step.segments[:, 3].tolist())) == len(step.segments), "a request is twice in"
        assert (np.diff(step.logit_rows) > 0).all(), "logit rows must ascend"
        assert ((step.tokens >= 0) & (step.tokens < self._vocab_size)).all(), "a token is no id"

    def _head(self, states: UInt64, tokens: NDArray[np.int32]) -> Float32:
        ids = np.arange(self._vocab_size, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)
        noise = _mix(states[:, None] + ids[None, :]) >> np.uint64(40)
        logits = noise.astype(np.float32) / np.float32(2**22)  # [0, 4)
        likely = (7 * tokens.astype(np.int64) + 3) % self._vocab_size
        is_regular = _mix(states) % np.uint64(8) != 0
        rows = np.flatnonzero(is_regular)
        logits[rows, likely[rows]] += np.float32(4.0)
        return logits

    def logits(self) -> Float32:
        return self._logits.copy()

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> ToySampler:
        return ToySampler(params, choice_index, prompt_ids, self._vocab_size)

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        return [self._sample_one(item) for item in inputs]

    def _sample_one(self, item: SampleInput) -> SampleResult:
        state = _toy_sampler(item.state)
        counts = state.counts.copy()
        token_ids: list[int] = []
        for index in range(len(item.draft_ids) + 1):
            row = self._logits[item.first_logit + index]
            token_id = draw(row, state, counts, item.position + index, self.eos_ids)
            token_ids.append(token_id)
            counts[token_id] += 1
            if index < len(item.draft_ids) and item.draft_ids[index] != token_id:
                break
        top = state.params.logprobs
        if top is None:
            return SampleResult(token_ids, None)
        return SampleResult(token_ids, self.token_logprobs(item.first_logit, token_ids, top))

    def nonfinite_logits(self) -> list[int]:
        return self._nonfinite

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[Logprob]:
        entries = []
        for index, token_id in enumerate(token_ids):
            row = self._logits[first_logit + index].astype(np.float64)
            values = row - np.log(np.exp(row).sum())
            order = np.lexsort((np.arange(len(values)), -values))
            rank = int(np.flatnonzero(order == token_id)[0]) + 1
            best = order[:top].tolist()
            tops = [float(values[i]) for i in best]
            entries.append(Logprob(token_id, float(values[token_id]), rank, best, tops))
        return entries


def _toy_sampler(state: SamplerState) -> ToySampler:
    assert isinstance(state, ToySampler)
    return state


def draw(
    logits: Float32,
    state: ToySampler,
    counts: NDArray[np.int64],
    position: int,
    eos_ids: frozenset[int],
) -> int:
    """The token at ``position``: a function of the logits, the parameters, the key and the counts."""
    params = state.params
    scores = logits.astype(np.float64)
    seen = state.seen | (counts > 0)
    repetition = params.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / repetition, scores[seen] * repetition)
    scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    if params.allowed_token_ids is not None:
        is_banned = np.ones(len(scores), bool)
        is_banned[params.allowed_token_ids] = False
        scores[is_banned] = -np.inf
    scores[params.banned_token_ids] = -np.inf
    if position < state.prompt_len + params.min_tokens:
        scores[params.stop_token_ids] = -np.inf
        scores[list(eos_ids)] = -np.inf
    if params.temperature == 0.0:
        return int(np.argmax(scores))
    probs = np.exp((scores - scores.max()) / params.temperature)
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(probs)), -probs))
    keep = np.ones(len(probs), bool)
    if params.top_k:
        keep[params.top_k :] = False
    sums = np.cumsum(probs[order])
    keep &= sums - probs[order] < params.top_p
    keep &= probs[order] >= params.min_p * probs[order[0]]
    survivors = np.sort(order[keep])
    key = _mix(np.atleast_1d(state.noise_key + np.uint64(position) * np.uint64(0x1000193)))[0]
    noise = _mix(key + survivors.astype(np.uint64)) >> np.uint64(11)
    exponential = -np.log1p(-(noise.astype(np.float64) / 2**53))
    with np.errstate(divide="ignore"):
        return int(survivors[np.argmin(exponential / probs[survivors])])
