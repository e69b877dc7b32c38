"""What the engine knows about one live request. The scheduler and the engine change it, nobody else.

The length family (see `trivet.request`), as half-open ranges of absolute positions:

    [0, cached_len)               KV found in the prefix cache at first admission (reported, frozen)
    [0, computed_len)             KV valid in ``pages``
    [computed_len, total_len)     known tokens whose KV is still to be computed
    [total_len, capacity)         room in ``pages``; may hold stale KV of rejected draft tokens

A decoding request has exactly one known token to compute. Prefill, decode, replay and recomputation
after a preemption differ only in how many there are.
"""

from __future__ import annotations

import dataclasses

from trivet.config import PAGE_TOKENS
from trivet.engine.commit import StopRule
from trivet.native.api import SamplerState
from trivet.request import Logprob, Request, StageTimes


@dataclasses.dataclass(slots=True, eq=False)
class RequestState:
    """Mutable state of one request.

    arrival              running number of admission; orders requests of one priority
    token_ids            prompt and output, one list
    pages, page_keys     pages by position // PAGE_TOKENS; prefix keys of the full ones among them
    num_registered       leading pages already offered to the prefix cache
    num_chunks           steps that computed rows of the prompt, or of all tokens after a preemption
    slot                 row of the step arrays while running, None while waiting
    prompt_logprobs      entries so far while they are being collected; None: not asked for, or sent
    is_announced         the first event, which carries cached_len, has been sent
    is_broken            logits of the prompt that were asked for come from infinity or NaN
    """

    request: Request
    arrival: int
    sampler: SamplerState
    rule: StopRule
    token_ids: list[int]
    times: StageTimes
    root_key: bytes
    prompt_logprobs: list[Logprob | None] | None = None
    computed_len: int = 0
    cached_len: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    num_registered: int = 0
    num_chunks: int = 0
    slot: int | None = None
    is_announced: bool = False
    is_broken: bool = False
    is_finished: bool = False

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def total_len(self) -> int:
        """Known tokens: the absolute position of the next token."""
        return len(self.token_ids)

    @property
    def output_len(self) -> int:
        """Output tokens so far, replayed ones included."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def max_total_len(self) -> int:
        """Most tokens the request can come to hold."""
        return self.prompt_len + self.rule.max_output_len

    @property
    def capacity(self) -> int:
        """Tokens the pages have room for."""
        return len(self.pages) * PAGE_TOKENS

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests from most to least important: priority, then arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def unscored_len(self) -> int:
        """Prompt tokens whose log-probabilities are still to be collected."""
        return 0 if self.prompt_logprobs is None else self.prompt_len - len(self.prompt_logprobs)
