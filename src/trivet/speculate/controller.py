"""Decides how many tokens to draft, from measured step times and observed acceptance.

A draft row costs what the cost model says one more row costs in this very step; it gains the time its
token would have taken in a plain step, times the chance that it is accepted. Rows are added while gain
exceeds cost, per request and anew in every step: nothing is on or off for good.

    gain of draft token j  =  alpha^j * T(decodes) / number of decodes
    cost of one more row   =  T(step + 1 row) - T(step)

alpha, the chance that a draft token is accepted when all before it were, is estimated per request from
its recent drafts, starting from the estimate over all requests. Where drafting does not pay it is
tried again with one token after a pause; the pause doubles with every failure.

Acceptance alone is no criterion: at high batch a draft that is nearly always accepted can still lose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trivet.engine import DraftAsk, Drafter, StepLoad
from trivet.engine.step_time import StepTime

_DECAY = 0.9  # weight of old observations after each new draft
_PRIOR_WEIGHT = 2.0  # observations the estimate over all requests counts for
_FIRST_ALPHA = 0.7
_FIRST_PAUSE, _LAST_PAUSE = 8, 256


@dataclasses.dataclass(slots=True)
class Acceptance:
    """Decaying counts of draft tokens accepted, and of drafts that met a rejection."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verified draft. Tokens after the first rejection were not put to the test."""
        self.accepted = self.accepted * _DECAY + accepted
        self.rejected = self.rejected * _DECAY + (accepted < drafted)

    def alpha(self, prior: float) -> float:
        """Chance that a draft token is accepted, given that those before it were."""
        total = self.accepted + self.rejected + _PRIOR_WEIGHT
        return (self.accepted + _PRIOR_WEIGHT * prior) / total


@dataclasses.dataclass(slots=True)
class _Request:
    acceptance: Acceptance
    pause: int = _FIRST_PAUSE
    paused: int = 0
    is_trial: bool = False


@dataclasses.dataclass
class ControllerStats:
    """What the controller did: asks seen, asks it refused because a draft would not pay, and trials."""

    num_asks: int = 0
    num_refused: int = 0
    num_trials: int = 0


class ControlledDrafter:
    """Wraps a drafter and limits what is asked of it. Itself a `trivet.engine.Drafter`."""

    def __init__(self, drafter: Drafter, step_time: StepTime) -> None:
        self._drafter = drafter
        self._step_time = step_time
        self._requests: dict[str, _Request] = {}
        self._overall = Acceptance()
        self.stats = ControllerStats()

    @property
    def name(self) -> str:
        """Name of the drafter inside."""
        return self._drafter.name

    @property
    def alpha(self) -> float:
        """Conditional acceptance over all requests, recent ones weighing most."""
        return self._overall.alpha(_FIRST_ALPHA)

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Start with the acceptance seen over all requests."""
        self._requests[request_id] = _Request(Acceptance())
        self._drafter.open(request_id, token_ids)

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        """Let the drafter propose as many tokens as pay."""
        token_s = self._token_seconds(asks)
        granted: list[DraftAsk] = []
        indices: list[int] = []
        for index, ask in enumerate(asks):
            row_s = self._row_seconds(load, ask)
            limit = self._limit(ask, token_s, row_s)
            if limit:
                granted.append(dataclasses.replace(ask, max_tokens=limit))
                indices.append(index)
                load = _with_draft(load, ask, limit)
        drafts: list[list[int]] = [[] for _ in asks]
        for index, draft in zip(indices, self._drafter.propose(granted, load), strict=True):
            drafts[index] = draft
        return drafts

    def _token_seconds(self, asks: Sequence[DraftAsk]) -> float:
        """What a token costs in a step of these decodes alone."""
        context = sum(ask.context_len for ask in asks)
        load = StepLoad(len(asks), len(asks), context, context, len(asks))
        return self._step_time.predict(load) / len(asks)

    def _row_seconds(self, load: StepLoad, ask: DraftAsk) -> float:
        return self._step_time.predict(_with_draft(load, ask, 1)) - self._step_time.predict(load)

    def _limit(self, ask: DraftAsk, token_s: float, row_s: float) -> int:
        request = self._requests[ask.request_id]
        self.stats.num_asks += 1
        alpha = request.acceptance.alpha(self.alpha)
        limit, gain = 0, alpha * token_s
        while limit < ask.max_tokens and gain > row_s:
            limit += 1
            gain *= alpha
        request.is_trial = False
        if limit == 0:
            request.paused += 1
            if request.paused < request.pause:
                self.stats.num_refused += 1
                return 0
            request.is_trial = True
            self.stats.num_trials += 1
            limit = 1
        return limit

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        """Learn from a verified draft."""
        self._drafter.observe(request_id, token_ids, drafted, accepted)
        if not drafted:
            return
        request = self._requests[request_id]
        request.acceptance.add(drafted, accepted)
        self._overall.add(drafted, accepted)
        if request.is_trial:
            request.paused = 0
            request.pause = 1 if accepted else min(2 * request.pause, _LAST_PAUSE)

    def close(self, request_id: str) -> None:
        """Forget the request; what it taught about acceptance stays in the overall estimate."""
        del self._requests[request_id]
        self._drafter.close(request_id)


def _with_draft(load: StepLoad, ask: DraftAsk, count: int) -> StepLoad:
    """The load when ``count`` more rows of a request that is already in the step are computed."""
    return StepLoad(
        load.rows + count,
        load.segments,
        load.context + count,
        load.pairs + count * ask.context_len + count * (count + 1) // 2,
        load.logit_rows + count,
    )


def predicted_speedup(
    step_time: StepTime, alpha: float, draft_tokens: int, batch: int, context_len: int
) -> float:
    """Tokens per second with drafts of ``draft_tokens`` over those without, drafting itself free.

    Source: Leviathan et al., arXiv:2211.17192, Theorem 3.8. Differs: the cost of verification is the
    predicted time of the larger step instead of one step.
    """
    plain = verify = StepLoad()
    for _ in range(batch):
        plain = plain.plus(context_len, 1, 1)
        verify = verify.plus(context_len, 1 + draft_tokens, 1 + draft_tokens)
    tokens = sum(alpha**j for j in range(draft_tokens + 1))
    return tokens * step_time.predict(plain) / step_time.predict(verify)
