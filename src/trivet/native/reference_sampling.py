"""The definition of sampling, in numpy; the native sampler equals it bit for bit.

A token is a pure function of (logits row, parameters, seed, choice index, absolute position, the prompt
and the tokens before it). One row of V logits goes through these steps, in this order:

1. Clean: NaN counts as -inf, +inf as the largest finite float32.
2. Penalties, in float32 (FTZ, DAZ). Tokens of prompt or output: l / repetition if l > 0, else
   l * repetition. Then tokens of the output: l - frequency * count, then l - presence.
3. ``logit_bias`` is added.
4. Masks: tokens outside ``allowed_token_ids``, tokens of ``banned_token_ids``, and, while fewer than
   ``min_tokens`` were produced, EOS and stop tokens (``ignore_eos`` does not lift this). When that last
   mask leaves no token, it is dropped for the position. When every unmasked logit is -inf, the
   lowest unmasked id is the token.
5. Temperature below 1e-5: the largest logit wins, lowest id on a tie. Else x = (l - max) / temperature
   in float32 and p = exp(x) by the contract's polynomial, exactly 0 for x < -87.
6. Survivors are a prefix of the tokens in the order (logit descending, id ascending):
   top-k keeps k; top-p keeps the fewest, at least one, whose p sum to ``top_p`` times the p of all
   top-k survivors; min-p keeps those with x >= ln(min_p) in float32.
   The p of all survivors are added in float64, lane j of 16 taking ids j, j + 16, ... ascending, then
   lanes j and j + 8, j + 4, j + 2, j + 1. The running sum of top-p is float64 in survivor order.
7. Noise: token t reads word (t % 64) // 16 of Philox4x32-10 with key (seed low, seed high) and counter
   ((t // 64) * 16 + t % 16, position, choice index, 0). v = (word + 1/2) / 2^32, E = -ln(1 - v) in
   float64. The survivor with the smallest E / p is the token, lowest id on a tie. (Among exponential
   variables E / p the smallest is token t with probability p_t over the sum: the Gumbel-max trick.)

Log-probabilities belong to the cleaned row of step 1: (l - max) - ln(sum of exp(l - max)), in float64
but for exp, rounded to float32. A rank counts larger logits, and equal ones with a lower id.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox). Penalties as in
vLLM (repetition: arXiv:1909.05858; presence and frequency: OpenAI's API reference).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.native.api import SampleInput, SampleResult
from trivet.native.reference import exp32
from trivet.native.reference_linear import add32, div32, mul32
from trivet.request import Logprob, SamplingParams

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt32 = NDArray[np.uint32]

MIN_TEMPERATURE = 1e-5
_SCALED_MIN = np.float32(-87.0)
_FLOAT_MAX = np.finfo(np.float32).max


def exp_scaled(x: Float32) -> Float32:
    """exp(x) for x <= 0 by the contract's polynomial; exactly 0 below -87 and for NaN."""
    kept = np.where(x >= _SCALED_MIN, x, _SCALED_MIN).astype(np.float32)
    return np.where(x >= _SCALED_MIN, exp32(kept), np.float32(0.0)).astype(np.float32)


def log_positive(x: Float64) -> Float64:
    """ln of positive normal float64: 2 atanh((m - 1) / (m + 1)) by its series, m in [0.71, 1.41)."""
    bits = np.ascontiguousarray(x, np.float64).view(np.int64)
    k = (bits >> 52 & 0x7FF) - 1023
    m = (bits & 0x000FFFFFFFFFFFFF | 0x3FF0000000000000).view(np.float64)
    high = m >= 1.4142135623730951
    m = np.where(high, m * 0.5, m)
    k = k + high
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = np.full_like(z, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        total = total * z + 1.0 / odd
    result: Float64 = k.astype(np.float64) * 0.69314718055994531 + (2.0 * s) * total
    return result


def philox4x32(counter: UInt32, key: tuple[int, int]) -> UInt32:
    """Philox4x32-10 of counters uint32 [..., 4] under one key."""
    words = counter.astype(np.uint64)
    c0, c1, c2, c3 = (words[..., i] for i in range(4))
    mask = np.uint64(0xFFFFFFFF)
    for step in range(10):
        key0 = np.uint64((key[0] + step * 0x9E3779B9) & 0xFFFFFFFF)
        key1 = np.uint64((key[1] + step * 0xBB67AE85) & 0xFFFFFFFF)
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ key0
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ key1
        c1 = product1 & mask
        c3 = product0 & mask
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def noise_bits(seed: int, choice: int, position: int, vocab_size: int) -> UInt32:
    """The noise word of every token at a position, uint32 [V]."""
    tokens = np.arange(vocab_size)
    counter = np.zeros((vocab_size, 4), np.uint32)
    counter[:, 0] = tokens // 64 * 16 + tokens % 16
    counter[:, 1] = position
    counter[:, 2] = choice
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    picked: UInt32 = words[tokens, tokens % 64 // 16]
    return picked


def noise(seed: int, choice: int, position: int, vocab_size: int) -> Float64:
    """E of every token at a position: standard exponential variables, float64 [V]."""
    v = (noise_bits(seed, choice, position, vocab_size).astype(np.float64) + 0.5) * 2.0**-32
    return -log_positive(1.0 - v)


def clean(row: Float32) -> Float32:
    """Step 1: no NaN, nothing above the largest finite number; subnormal numbers read as zero."""
    row = np.where(np.isnan(row), -np.inf, np.minimum(row, _FLOAT_MAX))
    return np.where(np.abs(row) < np.finfo(np.float32).tiny, 0.0, row).astype(np.float32)


def lane_sum(p: Float32) -> float:
    """Sum of p [V] in float64 in the order of step 6."""
    padded = np.zeros(-(-len(p) // 16) * 16)
    padded[: len(p)] = p
    lanes = np.zeros(16)
    for part in padded.reshape(-1, 16):
        lanes = lanes + part
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width:]
    return float(lanes[0])


def ranked(row: Float32) -> NDArray[np.intp]:
    """Ids of a cleaned row in the order logit descending, id ascending."""
    return np.argsort(-row, kind="stable")


def draw(row: Float32, params: SamplingParams, choice: int, position: int) -> int:
    """Steps 5 to 7 on a row whose penalties, bias and masks are done and that has a finite logit."""
    row = clean(row)
    order = ranked(row)
    if params.temperature < MIN_TEMPERATURE:
        return int(order[0])
    scaled = div32(add32(row, -row.max()), np.float32(params.temperature))
    p = exp_scaled(scaled)
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        kept = np.zeros_like(p)
        kept[order] = p[order]
        enough = params.top_p * lane_sum(kept)
        reached = np.cumsum(p[order].astype(np.float64)) >= enough
        order = order[: int(np.argmax(reached)) + 1] if reached.any() else order
    if params.min_p > 0.0:
        least = np.float32(log_positive(np.array([params.min_p]))[0])
        order = order[scaled[order] >= least]
    assert params.seed is not None, "the seed is drawn at admission"
    survivors = np.sort(order[p[order] > 0.0])
    energy = noise(params.seed, choice, position, len(row))
    return int(survivors[np.argmin(energy[survivors] / p[survivors].astype(np.float64))])


def row_logprob(row: Float32, token_id: int, top: int) -> Logprob:
    """Log-probability and rank of a token under a raw row, and the ``top`` most likely tokens."""
    row = clean(row)
    order = ranked(row)
    largest = row.max()
    if largest == -np.inf:
        values = np.full(len(row), -np.inf, np.float32)
    else:
        total = lane_sum(exp_scaled(add32(row, -largest)))
        shifted = row.astype(np.float64) - np.float64(largest)
        with np.errstate(over="ignore"):
            values = (shifted - log_positive(np.array([total]))[0]).astype(np.float32)
    top_ids = [int(i) for i in order[:top]]
    return Logprob(
        token_id=token_id,
        logprob=float(values[token_id]),
        rank=int(np.flatnonzero(order == token_id)[0]) + 1,
        top_ids=top_ids,
        top_logprobs=[float(values[i]) for i in top_ids],
    )


class ReferenceSampler:
    """The definition's counterpart of the native SamplerState: parameters, noise key, tokens so far."""

    def __init__(
        self,
        params: SamplingParams,
        choice_index: int,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.params = params
        self.choice_index = choice_index
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.output_ids += token_ids

    def edited(self, row: Float32, path: Sequence[int]) -> tuple[Float32, NDArray[np.bool_]]:
        """Steps 1 to 4: the row after penalties and bias, and which tokens are not masked."""
        params = self.params
        row = clean(row)
        output = Counter([*self.output_ids, *path])
        seen = set(output)
        if params.repetition_penalty != 1.0:
            seen |= set(self.prompt_ids)
            ids = np.array(sorted(seen), np.intp)
            repetition = np.float32(params.repetition_penalty)
            row[ids] = np.where(
                row[ids] > 0.0, div32(row[ids], repetition), mul32(row[ids], repetition)
            )
        for token, count in output.items():
            each = mul32(np.float32(params.frequency_penalty), np.float32(count))
            row[token] = add32(row[token], -each)
            row[token] = add32(row[token], np.float32(-params.presence_penalty))
        for token, bias in params.logit_bias.items():
            row[token] = add32(clean(row[token]), np.float32(bias))

        is_free = np.ones(self.vocab_size, np.bool_)
        if params.allowed_token_ids is not None:
            is_free[:] = False
            is_free[params.allowed_token_ids] = True
        is_free[list(params.banned_token_ids)] = False
        if len(self.output_ids) + len(path) < params.min_tokens:
            without_stop = is_free.copy()
            without_stop[[*self.eos_ids, *params.stop_token_ids]] = False
            if without_stop.any():
                is_free = without_stop
        return row, is_free

    def draw(self, row: Float32, position: int, path: Sequence[int] = ()) -> int:
        """The token at ``position``, after the committed tokens and those of ``path``."""
        edited, is_free = self.edited(row, path)
        masked = np.where(is_free, edited, -np.inf).astype(np.float32)
        if clean(masked).max() == -np.inf:
            return int(np.argmax(is_free))
        return draw(masked, self.params, self.choice_index, position)


def sample(logits: Float32, inputs: Sequence[SampleInput]) -> list[SampleResult]:
    """What `trivet.native.sampling.sample` returns, for inputs whose state is a ReferenceSampler."""
    results = []
    for item in inputs:
        state = item.state
        assert isinstance(state, ReferenceSampler)
        tokens: list[int] = []
        for i in range(len(item.draft_ids) + 1):
            row = logits[item.first_logit + i]
            tokens.append(state.draw(row, item.position + i, item.draft_ids[:i]))
            if i < len(item.draft_ids) and tokens[i] != item.draft_ids[i]:
                break
        top = state.params.logprobs
        logprobs = None
        if top is not None:
            rows = logits[item.first_logit : item.first_logit + len(tokens)]
            logprobs = [row_logprob(r, t, top) for r, t in zip(rows, tokens, strict=True)]
        results.append(SampleResult(tokens, logprobs))
    return results


def token_logprobs(
    logits: Float32, first_logit: int, token_ids: Sequence[int], top: int
) -> list[Logprob]:
    """What `trivet.native.sampling.token_logprobs` returns."""
    return [row_logprob(logits[first_logit + i], t, top) for i, t in enumerate(token_ids)]
