"""Drives an Engine as a worker does and holds it to its promises while doing so.

Checked at every step: events only for live requests, one terminal event each, tokens at consecutive
positions, the page ledger. Checked by `close`: nothing is left, neither work nor pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from support.toy_runner import ToyArena, ToyRunner
from trivet.config import EngineConfig
from trivet.engine import DraftAsk, Drafter, Engine, StepLoad
from trivet.native.api import Arena, ModelRunner
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    FinishedEvent,
    Logprob,
    Request,
    SamplingParams,
    TerminalEvent,
    TokensEvent,
)


@dataclasses.dataclass
class Outcome:
    """Everything that came out for one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprob | None] | None = None
    cached_len: int | None = None
    terminal: TerminalEvent | None = None
    num_events: int = 0

    @property
    def finished(self) -> FinishedEvent:
        """The terminal event, which must be a FinishedEvent."""
        assert isinstance(self.terminal, FinishedEvent)
        return self.terminal


def make_request(request_id: str, prompt_ids: Sequence[int], **fields: object) -> Request:
    """A request; ``fields`` are those of SamplingParams (seed 0 unless given) and of Request."""
    of_request = {name for name in Request.__struct_fields__ if name != "params"}
    params = {name: value for name, value in fields.items() if name not in of_request}
    others = {name: value for name, value in fields.items() if name in of_request}
    return Request(
        request_id=request_id,
        prompt_ids=list(prompt_ids),
        params=SamplingParams(**{"seed": 0, **params}),  # type: ignore[arg-type]
        **others,  # type: ignore[arg-type]
    )


def make_config(**fields: object) -> EngineConfig:
    """Small limits, so that few tokens already need chunks, several pages and several steps."""
    defaults: dict[str, object] = {
        "max_model_len": 512,
        "num_pages": 64,
        "max_num_seqs": 4,
        "max_step_tokens": 48,
        "max_prefill_chunk": 16,
    }
    return EngineConfig(**{**defaults, **fields})  # type: ignore[arg-type]


class Driver:
    """An engine, its time (one second per step) and what has come out of it."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        drafter: Drafter | None = None,
        runner: ModelRunner | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.config = config or make_config()
        self.runner = runner or ToyRunner()
        self.arena = arena or ToyArena(self.config.num_pages)
        self.engine = Engine(self.runner, self.arena, self.config, drafter)
        self.now = 0.0
        self.outcomes: dict[str, Outcome] = {}
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Give a request to the engine."""
        self.engine.add(request, self.now)
        self._requests[request.request_id] = request
        self.outcomes[request.request_id] = Outcome()

    def step(self) -> None:
        """One step, with all its events taken and checked."""
        for event in self.engine.step(self.now, lambda: self.now + 0.5):
            outcome = self.outcomes[event.request_id]
            assert outcome.terminal is None, "an event after the terminal one"
            if isinstance(event, TokensEvent):
                self._take_tokens(outcome, event)
            else:
                assert isinstance(event, FinishedEvent | ErrorEvent | CancelledEvent)
                outcome.terminal = event
        self.now += 1.0
        self.engine.check()

    def _take_tokens(self, outcome: Outcome, event: TokensEvent) -> None:
        request = self._requests[event.request_id]
        known = len(request.prompt_ids) + len(request.emitted_ids) + len(outcome.token_ids)
        assert event.position == known, "tokens are missing, or came twice"
        outcome.token_ids.extend(event.token_ids)
        assert (event.logprobs is None) == (request.params.logprobs is None)
        if event.logprobs is not None:
            assert [entry.token_id for entry in event.logprobs] == event.token_ids
            outcome.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is None, "prompt log-probabilities came twice"
            outcome.prompt_logprobs = event.prompt_logprobs
        assert (event.cached_len is not None) == (outcome.num_events == 0)
        if event.cached_len is not None:
            outcome.cached_len = event.cached_len
        outcome.num_events += 1

    def run(self, max_steps: int = 10_000) -> dict[str, Outcome]:
        """Step until there is no work; then everything must be given back."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        self.close()
        return self.outcomes

    def close(self) -> None:
        """Assert that the engine is idle, every request has ended and no page is held."""
        assert not self.engine.has_work, "the engine does not come to an end"
        assert all(outcome.terminal is not None for outcome in self.outcomes.values())
        assert_idle(self.engine)


def assert_idle(engine: Engine) -> None:
    """Assert that an engine without requests holds no page (I4)."""
    engine.check()
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.pages_used, stats.pages_leased) == (0, 0), "pages leaked"
    assert stats.pages_free + stats.pages_cached == stats.num_pages


def run_alone(request: Request, config: EngineConfig | None = None) -> Outcome:
    """What the request gives by itself: no batch, no chunks, no prefix cache, no drafts."""
    limits = config or make_config()
    alone = make_config(
        max_model_len=limits.max_model_len,
        num_pages=-(-limits.max_model_len // 32),
        max_num_seqs=1,
        max_prefill_chunk=None,
        prefix_cache=False,
    )
    driver = Driver(alone)
    driver.add(request)
    return driver.run()[request.request_id]


class OracleDrafter:
    """Proposes the true continuation, with every ``error_every``-th token replaced by a wrong one."""

    name = "oracle"

    def __init__(self, truth: dict[str, list[int]], error_every: int = 0) -> None:
        self._truth = truth
        self._error_every = error_every
        self.open_ids: set[str] = set()

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        """``truth`` holds the whole token list of each request, prompt included."""
        self.open_ids.add(request_id)

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        """One draft per ask."""
        return [self._propose_one(ask) for ask in asks]

    def _propose_one(self, ask: DraftAsk) -> list[int]:
        assert ask.request_id in self.open_ids
        first = ask.context_len
        draft = self._truth[ask.request_id][first : first + ask.max_tokens]
        if not self._error_every:
            return draft
        return [
            token_id if (first + i) % self._error_every else (token_id + 1) % 64
            for i, token_id in enumerate(draft)
        ]

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        """Nothing to learn."""
        assert request_id in self.open_ids
        assert 0 <= accepted <= min(drafted, len(token_ids))

    def close(self, request_id: str) -> None:
        """Every request that was opened is closed."""
        self.open_ids.remove(request_id)
