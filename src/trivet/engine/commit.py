"""The one function that decides where a run of drawn tokens ends.

One step may draw several tokens for a request (accepted draft tokens and one more). They are applied
in order; the earliest position at which the request ends wins, and at one position a stop token wins
over the length. Whatever lies after it does not exist: callers cut ids, log-probabilities, penalties,
KV lengths and counters to ``num_tokens``. Replayed tokens go through the same function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trivet.request import FinishReason


@dataclasses.dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends by itself.

    stop_ids        stop tokens of the request, and the model's EOS tokens unless ignored
    min_tokens      output tokens before which no stop token counts
    max_output_len  most output tokens: max_tokens, or what the context leaves
    """

    stop_ids: frozenset[int]
    min_tokens: int
    max_output_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedRun:
    """How much of a run is committed, and why the request ends there (None: it goes on)."""

    num_tokens: int
    reason: FinishReason | None
    stop_token_id: int | None


def commit_run(token_ids: Sequence[int], output_len: int, rule: StopRule) -> CommittedRun:
    """Cut ``token_ids``, drawn after ``output_len`` output tokens, at the first end."""
    room = max(0, rule.max_output_len - output_len)
    for index, token_id in enumerate(token_ids[:room]):
        if token_id in rule.stop_ids and output_len + index >= rule.min_tokens:
            return CommittedRun(index + 1, FinishReason.STOP, token_id)
    if len(token_ids) >= room:
        return CommittedRun(room, FinishReason.LENGTH, None)
    return CommittedRun(len(token_ids), None, None)
