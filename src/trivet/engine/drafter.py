"""The Drafter protocol: whoever proposes tokens that the next step verifies.

A drafter knows token ids and nothing else. What it proposes is verified by the ordinary sampler, so
no drafter, good, bad or broken, can change the output (invariant I2); it only changes the speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from trivet.engine.step_time import StepLoad


@dataclasses.dataclass(frozen=True, slots=True)
class DraftAsk:
    """One decoding request of a step: draft up to ``max_tokens`` (at least 1) tokens for it.

    context_len  tokens the request has so far: the absolute position of the first draft token
    """

    request_id: str
    context_len: int
    max_tokens: int


class Drafter(Protocol):
    """Proposes continuations of live requests."""

    @property
    def name(self) -> str:
        """Short name, as given to ``--draft``."""

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request exists: its prompt and, on a replay, the tokens emitted so far."""

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        """For each ask 0 to ``max_tokens`` tokens that may come next.

        load  the step as scheduled, without drafts
        """

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        """``token_ids`` were committed; ``accepted`` of them are the first of ``drafted`` proposed."""

    def close(self, request_id: str) -> None:
        """The request is gone."""
