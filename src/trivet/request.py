"""The nouns that travel between gateway, worker and engine. No logic beyond validation, no text.

A *request* is prompt token ids plus sampling parameters; *events* come back. All are msgspec structs
so that they are their own wire format. A length family, fixed here and used everywhere:

    prompt_len     len(prompt_ids)
    output_len     len(emitted_ids): tokens the request has produced so far
    total_len      prompt_len + output_len: the absolute position of the next token
    cached_len     leading tokens whose KV came from the prefix cache
    computed_len   leading tokens whose KV is in the request's pages (0 <= computed_len <= total_len)

Prompt and emitted ids stay apart for ever: a request that is preempted, or replayed on another worker,
carries ``emitted_ids``, and so keeps its penalties, min and max tokens, noise and log-probabilities.
"""

from __future__ import annotations

import enum

import msgspec

from trivet.errors import RequestError


class FinishReason(enum.StrEnum):
    """Why a request is finished."""

    STOP = "stop"  # a stop token, an end-of-sequence token, or a stop string found by the gateway
    LENGTH = "length"  # max_tokens or the context is exhausted


_INTEGER, _NUMBER = "an integer", "a number"
_OPTIONAL_INTEGER, _TOKEN_IDS = "an integer or None", "a list of token ids"
_SAMPLING_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "max_tokens": ((int,), _INTEGER),
    "min_tokens": ((int,), _INTEGER),
    "temperature": ((int, float), _NUMBER),
    "top_k": ((int,), _INTEGER),
    "top_p": ((int, float), _NUMBER),
    "min_p": ((int, float), _NUMBER),
    "repetition_penalty": ((int, float), _NUMBER),
    "presence_penalty": ((int, float), _NUMBER),
    "frequency_penalty": ((int, float), _NUMBER),
    "logit_bias": ((dict,), "a dict from token ids to numbers"),
    "allowed_token_ids": ((list, tuple, type(None)), f"{_TOKEN_IDS} or None"),
    "banned_token_ids": ((list, tuple), _TOKEN_IDS),
    "stop_token_ids": ((list, tuple), _TOKEN_IDS),
    "ignore_eos": ((bool,), "True or False"),
    "seed": ((int, type(None)), _OPTIONAL_INTEGER),
    "logprobs": ((int, type(None)), _OPTIONAL_INTEGER),
    "prompt_logprobs": ((int, type(None)), _OPTIONAL_INTEGER),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn.

    A field of another type is a RequestError here; ranges, which depend on the vocabulary, are checked
    by `trivet.native.sampling.check_sampling_params` when a request is added.

    The token at an absolute position is a function of (logits, these parameters, seed, choice index,
    position) and of nothing else (invariant I2). ``seed`` None means: the gateway or `LLM` draws one
    at admission. ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 mean off.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # None: none; k: the chosen token and the k most likely
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for field, (types, allowed) in _SAMPLING_TYPES.items():
            value = getattr(self, field)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise RequestError.refused(field, value, allowed)


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of one API request, as the engine sees it.

    request_id   unique among live requests; the n choices of one API call are n requests
    choice_index which of the n choices this is (part of the noise key)
    emitted_ids  tokens already produced elsewhere (preemption, failover): replayed, not re-emitted
    deadline     absolute time in the clock passed to `Engine.step`, or None
    cache_salt   tenant salt of the prefix cache
    use_prefix_cache  False: neither look up nor store
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    choice_index: int = 0
    emitted_ids: list[int] = []
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""
    use_prefix_cache: bool = True


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of ``token_id``, and of the most likely ones, best first.

    Values are natural logs of softmax(logits), before temperature, penalties and truncation.
    ``top_ids`` holds k entries; when ``token_id`` is not among them it stands apart in ``logprob``.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]
    top_logprobs: list[float]


class StageTimes(msgspec.Struct, kw_only=True):
    """One request's timeline on the monotonic clock of its worker, in seconds; None: not reached."""

    arrived: float
    scheduled: float | None = None  # first step that ran rows of it
    prefill_done: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class TokensEvent(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """A run of tokens committed by one step.

    position      absolute position of token_ids[0] (prompt_len + index among the emitted)
    logprobs      parallel to token_ids when asked for
    prompt_logprobs  set once, on the first event: one entry per prompt token, the first None
    cached_len    prompt tokens served from the prefix cache (first event only, else None)
    num_chunks    steps the prompt was computed in (first event only, else None)
    """

    request_id: str
    position: int
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    cached_len: int | None = None
    num_chunks: int | None = None


class FinishedEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Terminal: the request is complete. ``stop_token_id`` is the stop or EOS token, if one ended it.

    The stop token itself is not part of the emitted text but is counted and sent in the last
    TokensEvent (the gateway drops its text).
    """

    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    prompt_len: int
    output_len: int
    cached_len: int
    times: StageTimes


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """Terminal: the request failed. ``code`` is machine-readable (deadline, worker_died, ...).

    ``param`` names the field at fault, where there is one.
    """

    request_id: str
    code: str
    message: str
    param: str | None = None


class CancelledEvent(msgspec.Struct, frozen=True, kw_only=True, tag="cancelled"):
    """Terminal: the request was aborted by its owner; its pages are free."""

    request_id: str


Event = TokensEvent | FinishedEvent | ErrorEvent | CancelledEvent
TerminalEvent = FinishedEvent | ErrorEvent | CancelledEvent
