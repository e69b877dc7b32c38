"""Sampling: parameter checks, states, and typed results of the native sampler.

What the token at a position is, step by step, is defined in `reference_sampling`. This module knows no
text and no model; `trivet.native.model` calls it with the logits it holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.errors import RequestError
from trivet.native import _core
from trivet.native.api import SampleInput, SampleResult
from trivet.native.isa import isa_report
from trivet.request import Logprob, SamplingParams

__all__ = [
    "check_sampling_params",
    "new_sampler",
    "sample",
    "to_logprobs",
    "to_results",
    "token_logprobs",
]

_MAX_TOKENS = 2**31 - 1


def _check_int(field: str, value: object, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError.refused(field, value, allowed)


def _check_float(field: str, value: object, low: float, high: float, allowed: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError.refused(field, value, allowed)
    if not low <= value <= high:  # also false for NaN
        raise RequestError.refused(field, value, allowed)


def _check_ids(field: str, ids: Iterable[object], vocab_size: int) -> None:
    for token in ids:
        _check_int(field, token, 0, vocab_size - 1, f"token ids from 0 to {vocab_size - 1}")


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that cannot be meant.

    Raises RequestError that names the field, its value and what is allowed. Narrower limits of an API
    (OpenAI's 20 logprobs, say) are the gateway's.
    """
    _check_int("max_tokens", params.max_tokens, 0, _MAX_TOKENS, f"integers from 0 to {_MAX_TOKENS}")
    limit = params.max_tokens
    _check_int(
        "min_tokens", params.min_tokens, 0, limit, f"integers from 0 to max_tokens ({limit})"
    )
    _check_float("temperature", params.temperature, 0.0, 1e6, "numbers from 0 to 1e6")
    _check_int("top_k", params.top_k, 0, _MAX_TOKENS, "0 (off) or a positive integer")
    _check_float("top_p", params.top_p, math.ulp(0.0), 1.0, "numbers above 0, up to 1")
    _check_float("min_p", params.min_p, 0.0, 1.0, "numbers from 0 to 1")
    _check_float(
        "repetition_penalty", params.repetition_penalty, 1e-6, 1e6, "numbers from 1e-6 to 1e6"
    )
    for field in ("presence_penalty", "frequency_penalty"):
        _check_float(field, getattr(params, field), -2.0, 2.0, "numbers from -2 to 2")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _check_float("logit_bias", bias, -100.0, 100.0, "values from -100 to 100")
    _check_ids("banned_token_ids", params.banned_token_ids, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    allowed_ids = params.allowed_token_ids
    if allowed_ids is not None:
        _check_ids("allowed_token_ids", allowed_ids, vocab_size)
        if not set(allowed_ids) - set(params.banned_token_ids):
            raise RequestError.refused(
                "allowed_token_ids", allowed_ids, "at least one token that is not banned"
            )
    elif len(set(params.banned_token_ids)) >= vocab_size:
        raise RequestError("banned_token_ids: every token is banned", "banned_token_ids")
    if params.seed is not None:
        _check_int("seed", params.seed, -(2**63), 2**64 - 1, "integers from -2^63 to 2^64 - 1")
    for field in ("logprobs", "prompt_logprobs"):
        top = getattr(params, field)
        if top is not None:
            _check_int(field, top, 0, vocab_size, f"integers from 0 to {vocab_size}")


def new_sampler(
    params: SamplingParams,
    choice_index: int,
    prompt_ids: Sequence[int],
    *,
    vocab_size: int,
    eos_ids: Collection[int] = (),
) -> _core.SamplerState:
    """State of one request's sampler. ``params.seed`` must be set; it counts modulo 2^64.

    Tokens produced earlier (preemption, failover) are added by ``commit``. Raises RequestError, see
    `check_sampling_params`; ValueError when a prompt token lies outside the vocabulary.
    """
    check_sampling_params(params, vocab_size)
    assert params.seed is not None, "the seed is drawn at admission"
    return _core.SamplerState(
        vocab_size=vocab_size,
        seed=params.seed % 2**64,
        choice=choice_index,
        prompt_ids=list(prompt_ids),
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        stop_token_ids=[*eos_ids, *params.stop_token_ids],
        logprobs=params.logprobs,
    )


_RawLogprob = tuple[int, float, int, list[int], list[float]]
_RawResult = tuple[list[int], list[_RawLogprob] | None]


def to_logprobs(raw: Sequence[_RawLogprob]) -> list[Logprob]:
    """Typed log-probabilities from the tuples that the core returns."""
    return [Logprob(*fields) for fields in raw]


def to_results(raw: Sequence[_RawResult]) -> list[SampleResult]:
    """Typed results from the tuples that the core returns."""
    return [
        SampleResult(tokens, None if logprobs is None else to_logprobs(logprobs))
        for tokens, logprobs in raw
    ]


def sample(
    logits: NDArray[np.float32], inputs: Sequence[SampleInput], *, isa: str | None = None
) -> list[SampleResult]:
    """Draw tokens for every input from logits float32 [L, V]; the states do not change.

    Row first_logit + i of an input is sampled as if draft_ids[:i] had been committed; the run ends
    after the first token that differs from its draft token. So 1 + accepted tokens come back, and they
    are those that plain decoding would have drawn. ``isa`` forces an instruction-set level; bits are
    the same on each. Raises ValueError when rows, ids or the position do not fit.
    """
    return to_results(_core.sample(logits, inputs, isa_report(isa).active))


def token_logprobs(
    logits: NDArray[np.float32],
    first_logit: int,
    token_ids: Sequence[int],
    top: int,
    *,
    isa: str | None = None,
) -> list[Logprob]:
    """Log-probability of token_ids[i] under row first_logit + i, with the ``top`` most likely."""
    level = isa_report(isa).active
    return to_logprobs(_core.token_logprobs(logits, first_logit, list(token_ids), top, level))
