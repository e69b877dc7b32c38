"""The engine: turns requests into events, one step at a time.

`Engine.step` is the architecture: schedule, propose, forward, verify and sample, commit, free. The
engine knows token ids, pages and sampling parameters, never text, HTTP or JSON. It takes the time as
an argument and never reads a clock; it holds no thread and no socket. One caller drives it.

Every request that `add` accepts ends in exactly one terminal event (invariant I3), and when it does
all its pages are back in the ledger (I4).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from trivet.config import PAGE_TOKENS, EngineConfig
from trivet.engine.commit import CommittedRun, StopRule, commit_run
from trivet.engine.drafter import DraftAsk, Drafter
from trivet.engine.pages import PagePool
from trivet.engine.prefix import PrefixCache, root_key
from trivet.engine.request_state import RequestState
from trivet.engine.scheduler import Plan, PrefillChunk, Scheduler
from trivet.engine.stats import EngineStats
from trivet.engine.step_input import SlotTable, StepBuilder
from trivet.errors import ConfigError, RequestError
from trivet.native.api import Arena, ModelRunner, SampleInput, SampleResult
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    Event,
    FinishedEvent,
    FinishReason,
    Logprob,
    Request,
    StageTimes,
    TokensEvent,
)

_NOTHING = SampleResult([], None)


class _Drawn(NamedTuple):
    """What a step computed for a request whose last known token was among its rows.

    num_known   known tokens computed (1 for a decode, the chunk's length for a prefill)
    draft       tokens verified after them
    token_ids   drawn tokens, 1 + accepted; none for a request that wants no output
    is_broken   the logits that follow them, or ones of the prompt, mean nothing
    """

    state: RequestState
    num_known: int
    draft: Sequence[int]
    token_ids: list[int]
    logprobs: list[Logprob]
    is_broken: bool


class Engine:
    """Continuous batching over one model and one arena.

    runner   the model; the engine is its only user
    arena    KV pages; the engine owns pages 0 .. config.num_pages-1
    config   limits; num_pages at most arena.num_pages
    drafter  proposes tokens for verification; None: no speculation

    Usage: ``add`` requests, call ``step`` while ``has_work``, hand out the events it returns. After
    `step` raises, the engine is unusable and its requests are lost (the worker's owner reports them).
    """

    def __init__(
        self,
        runner: ModelRunner,
        arena: Arena,
        config: EngineConfig,
        drafter: Drafter | None = None,
    ) -> None:
        _check_config(runner, arena, config)
        self.config = config
        self._runner = runner
        self._arena = arena
        self._drafter = drafter
        self._pool = PagePool(config.num_pages)
        self._prefix = PrefixCache(self._pool) if config.prefix_cache else None
        self._slots = SlotTable(config.max_num_seqs, config.max_model_len)
        self._scheduler = Scheduler(config, self._pool, self._prefix, self._slots)
        self._builder = StepBuilder(self._slots, self._scheduler.max_rows)
        self._requests: dict[str, RequestState] = {}
        self._events: list[Event] = []
        self._stats = EngineStats(num_pages=config.num_pages)
        self._num_added = 0
        self._next_deadline = math.inf
        self._is_draining = False

    def add(self, request: Request, now: float) -> None:
        """Accept a request; its events come from later calls of `step`.

        Larger ``priority`` is more important. ``emitted_ids`` are taken as produced and are not sent
        again; a replay that is already complete only gets its terminal event.

        Raises RequestError, and then no event follows: empty prompt, token id outside the vocabulary,
        prompt too long for the context, more KV than there is, missing seed, bad sampling parameters
        (status 400); queue full (429); draining (503).
        """
        self._check_request(request)
        params, prompt_len = request.params, len(request.prompt_ids)
        max_output_len = min(params.max_tokens, self.config.max_model_len - prompt_len)
        self._scheduler.check_fits(prompt_len + max_output_len)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._runner.eos_ids
        state = RequestState(
            request=request,
            arrival=self._num_added,
            sampler=self._runner.new_sampler(params, request.choice_index, request.prompt_ids),
            rule=StopRule(stop_ids, params.min_tokens, max_output_len),
            token_ids=list(request.prompt_ids),
            times=StageTimes(arrived=now),
            root_key=root_key(self._runner.numerics_id, request.cache_salt),
        )
        self._num_added += 1
        self._stats.num_prompt_tokens += prompt_len
        if request.emitted_ids:
            run = commit_run(request.emitted_ids, 0, state.rule)
            state.token_ids.extend(request.emitted_ids[: run.num_tokens])
            if run.reason is not None:
                self._end(state, _finished_event(state, run, now))
                return
            state.sampler.commit(request.emitted_ids)
        elif params.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
        self._requests[request.request_id] = state
        self._scheduler.add(state)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        if self._drafter is not None:
            self._drafter.open(request.request_id, state.token_ids)

    def abort(self, request_id: str) -> bool:
        """End a request at its owner's wish, at any state; its pages are free when this returns.

        The CancelledEvent comes with the next `step`. False: there is no such live request.
        """
        state = self._requests.get(request_id)
        if state is None:
            return False
        self._free([state])
        self._end(state, CancelledEvent(request_id=request_id))
        return True

    def finish(self, request_id: str, output_len: int, now: float) -> bool:
        """End a request early, as if it had stopped after ``output_len`` output tokens.

        For stop strings: the gateway owns text, finds one and tells the engine. The FinishedEvent
        (reason stop) comes with the next `step`. False: there is no such live request.
        """
        state = self._requests.get(request_id)
        if state is None:
            return False
        assert 0 <= output_len <= state.output_len, "a request cannot finish beyond its output"
        del state.token_ids[state.prompt_len + output_len :]
        self._free([state])
        self._end(state, _finished_event(state, CommittedRun(0, FinishReason.STOP, None), now))
        return True

    def drain(self) -> None:
        """Accept no more requests; those there are run to their end."""
        self._is_draining = True

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: live requests, or events not handed out yet."""
        return bool(self._requests or self._events)

    @property
    def request_ids(self) -> list[str]:
        """Live requests."""
        return list(self._requests)

    def step(self, now: float, clock: Callable[[], float] | None = None) -> list[Event]:
        """Run one step and return its events, terminal events of aborted requests included.

        now    the time at which the step begins
        clock  gives the time at which its tokens are there; None: ``now``, as if it took no time
        """
        self._expire(now)
        plan = self._scheduler.schedule()
        if plan.num_rows:
            self._propose(plan)
            first_logits = self._forward(plan, now)
            drawn = self._sample(plan, first_logits)
            end = now if clock is None else clock()
            self._free(self._commit(plan, drawn, end))
            self._count(plan, end - now if clock is not None else None)
        events, self._events = self._events, []
        return events

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has come."""
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for state in list(self._requests.values()):
            deadline = state.request.deadline
            if deadline is None:
                continue
            if deadline > now:
                self._next_deadline = min(self._next_deadline, deadline)
                continue
            self._free([state])
            message = f"the deadline passed after {state.output_len} output tokens"
            request_id = state.request.request_id
            self._end(state, ErrorEvent(request_id=request_id, code="deadline", message=message))

    def _propose(self, plan: Plan) -> None:
        """Ask the drafter for tokens to verify, never beyond what the request may still emit."""
        if self._drafter is None or not plan.rows_left:
            return
        asks, indices = [], []
        for index, state in enumerate(plan.decodes):
            # A step emits one token more than it accepts, so the last one is never drafted.
            room = min(self.config.draft_tokens, state.rule.max_output_len - state.output_len - 1)
            if room > 0:
                asks.append(DraftAsk(state.request.request_id, state.total_len, room))
                indices.append(index)
        if asks:
            drafts = self._drafter.propose(asks, plan.load())
            for index, ask, draft in zip(indices, asks, drafts, strict=True):
                if draft and plan.rows_left:
                    is_valid = min(draft) >= 0 and max(draft) < self._runner.vocab_size
                    assert is_valid, f"drafter {self._drafter.name}: a token outside the vocabulary"
                    self._scheduler.grant_draft(plan, index, draft[: ask.max_tokens])

    def _forward(self, plan: Plan, now: float) -> list[int]:
        """Run the rows of the plan. Returns the first logit of each chunk."""
        builder = self._builder
        builder.start(plan.decodes, plan.drafts)
        first_logits = [
            builder.add_prefill(
                chunk.state, chunk.count, chunk.num_scored + chunk.is_last, chunk.skip_logits
            )
            for chunk in plan.chunks
        ]
        self._runner.forward(builder.build(), self._arena)
        for state in plan.decodes:
            if state.times.scheduled is None:
                state.times.scheduled = now
        for chunk in plan.chunks:
            chunk.state.num_chunks += 1
            if chunk.state.times.scheduled is None:
                chunk.state.times.scheduled = now
        return first_logits

    def _sample(self, plan: Plan, first_logits: list[int]) -> list[_Drawn]:
        """Draw tokens from the step's logits, verifying drafts; collect prompt log-probabilities."""
        ready: list[tuple[RequestState, int, Sequence[int], int]] = []
        logit = 0
        for state, draft in zip(plan.decodes, plan.drafts, strict=True):
            ready.append((state, 1, draft, logit))
            logit += 1 + len(draft)
        for chunk, first_logit in zip(plan.chunks, first_logits, strict=True):
            self._score(chunk, first_logit)
            if chunk.is_last:
                ready.append((chunk.state, chunk.count, (), first_logit + chunk.num_scored))
        inputs = [
            SampleInput(state.sampler, logit, len(state.token_ids), draft)
            for state, _, draft, logit in ready
            if state.rule.max_output_len
        ]
        results = iter(self._runner.sample(inputs) if inputs else ())
        broken = self._runner.nonfinite_logits()
        drawn = []
        for state, num_known, draft, logit in ready:
            result = next(results) if state.rule.max_output_len else _NOTHING
            token_ids, logprobs = result.token_ids, result.logprobs or []
            is_broken = state.is_broken
            if broken:
                # Nothing from the first broken row on was drawn from the model.
                count = bisect.bisect_left(broken, logit)
                if count < len(broken) and broken[count] < logit + max(1, len(token_ids)):
                    token_ids = token_ids[: broken[count] - logit]
                    is_broken = True
            drawn.append(_Drawn(state, num_known, draft, token_ids, logprobs, is_broken))
        return drawn

    def _score(self, chunk: PrefillChunk, first_logit: int) -> None:
        state = chunk.state
        entries = state.prompt_logprobs
        if entries is None or chunk.num_scored == 0:
            return
        scored = range(first_logit, first_logit + chunk.num_scored)
        state.is_broken |= any(row in scored for row in self._runner.nonfinite_logits())
        top = state.request.params.prompt_logprobs
        assert top is not None, "prompt log-probabilities are collected but were not asked for"
        targets = state.token_ids[len(entries) : len(entries) + chunk.num_scored]
        entries.extend(self._runner.token_logprobs(first_logit, targets, top))

    def _commit(self, plan: Plan, drawn: list[_Drawn], now: float) -> list[RequestState]:
        """Apply what was computed and drawn, in order; returns the requests that ended."""
        for chunk in plan.chunks:
            if not chunk.is_last:
                self._scheduler.mark_computed(chunk.state, chunk.state.computed_len + chunk.count)
                self._slots.advance(chunk.state)
        return [item.state for item in drawn if self._commit_request(item, now)]

    def _commit_request(self, drawn: _Drawn, now: float) -> bool:
        """Apply one request's run; True: it ended."""
        state = drawn.state
        position = len(state.token_ids)
        if drawn.is_broken and (state.is_broken or not drawn.token_ids):
            self._end(state, _broken_event(state))
            return True
        run = commit_run(drawn.token_ids, position - state.prompt_len, state.rule)
        token_ids = drawn.token_ids[: run.num_tokens]
        state.token_ids.extend(token_ids)
        state.sampler.commit(token_ids)
        # KV holds the known tokens and the accepted draft tokens; of these only committed ones count.
        num_accepted = max(0, len(drawn.token_ids) - 1)
        valid_len = state.computed_len + drawn.num_known + num_accepted
        self._scheduler.mark_computed(state, min(valid_len, len(state.token_ids)))
        if state.times.prefill_done is None:
            state.times.prefill_done = now
        if token_ids and state.times.first_token is None:
            state.times.first_token = now
        self._stats.num_output_tokens += len(token_ids)
        if self._drafter is not None:
            self._observe_draft(
                state, token_ids, len(drawn.draft), min(num_accepted, len(token_ids))
            )
        self._emit_tokens(state, position, token_ids, drawn.logprobs)
        if run.reason is None and not drawn.is_broken:
            self._slots.advance(state)
            return False
        self._end(
            state, _broken_event(state) if run.reason is None else _finished_event(state, run, now)
        )
        return True

    def _observe_draft(
        self, state: RequestState, token_ids: list[int], drafted: int, accepted: int
    ) -> None:
        assert self._drafter is not None, "there is no drafter to tell"
        if drafted:
            state.times.draft_tokens += drafted
            state.times.accepted_tokens += accepted
            self._stats.speculation.add(drafted, accepted)
        self._drafter.observe(state.request.request_id, token_ids, drafted, accepted)

    def _emit_tokens(
        self,
        state: RequestState,
        position: int,
        token_ids: list[int],
        logprobs: Sequence[Logprob],
    ) -> None:
        if not token_ids and state.prompt_logprobs is None:
            return
        wants_logprobs = state.request.params.logprobs is not None
        self._events.append(
            TokensEvent(
                request_id=state.request.request_id,
                position=position,
                token_ids=token_ids,
                logprobs=list(logprobs[: len(token_ids)]) if wants_logprobs else None,
                prompt_logprobs=state.prompt_logprobs,
                cached_len=None if state.is_announced else state.cached_len,
                num_chunks=None if state.is_announced else max(1, state.num_chunks),
            )
        )
        state.prompt_logprobs = None
        state.is_announced = True

    def _free(self, states: Sequence[RequestState]) -> None:
        """Give back the pages and slots of requests that have ended."""
        for state in states:
            self._scheduler.remove(state)
            del self._requests[state.request.request_id]
            if self._drafter is not None:
                self._drafter.close(state.request.request_id)

    def _end(self, state: RequestState, event: FinishedEvent | ErrorEvent | CancelledEvent) -> None:
        """Queue the one terminal event of a request."""
        assert not state.is_finished, "a request ends once"
        state.is_finished = True
        if state.times.draft_tokens and not state.times.accepted_tokens:
            self._stats.speculation.num_fruitless_requests += 1
        if isinstance(event, FinishedEvent):
            ending = event.reason.value
        else:
            ending = "error" if isinstance(event, ErrorEvent) else "cancelled"
        self._stats.finished[ending] = self._stats.finished.get(ending, 0) + 1
        self._events.append(event)

    def _count(self, plan: Plan, seconds: float | None) -> None:
        stats = self._stats
        num_rows = plan.num_rows
        stats.num_steps += 1
        stats.num_computed_tokens += num_rows
        stats.step_rows.add(num_rows)
        if seconds is not None:
            stats.step_seconds.add(seconds)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of state and counters."""
        stats = self._stats
        stats.num_running = len(self._scheduler.running)
        stats.num_waiting = len(self._scheduler.waiting)
        stats.num_preemptions = self._scheduler.num_preemptions
        stats.pages_free = self._pool.num_free
        stats.pages_used = self._pool.num_referenced
        stats.pages_cached = self._pool.num_cached
        stats.pages_leased = self._pool.num_leased
        if self._prefix is not None:
            stats.prefix_queries = self._prefix.num_queries
            stats.prefix_hits = self._prefix.num_hits
        return msgspec.convert(msgspec.to_builtins(stats), EngineStats)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; live requests are not disturbed."""
        if self._prefix is not None:
            self._prefix.reset()

    def check(self) -> None:
        """Assert the ledger (I4): every page in one state, every reference held by a live request."""
        self._pool.check([state.pages for state in self._requests.values()])
        if self._prefix is not None:
            self._prefix.check()

    def _check_request(self, request: Request) -> None:
        if self._is_draining:
            raise RequestError("the engine is shutting down", status=503, code="draining")
        if len(self._scheduler.waiting) >= self.config.max_waiting + self._slots.num_free:
            raise RequestError(
                f"the queue is full ({len(self._scheduler.waiting)} requests are waiting)",
                status=429,
                code="queue_full",
            )
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is already running", "request_id")
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; at least one token is needed", "prompt")
        for name, ids in (("prompt", request.prompt_ids), ("emitted_ids", request.emitted_ids)):
            self._check_token_ids(name, ids)
        prompt_len, context = len(request.prompt_ids), self.config.max_model_len
        if prompt_len > context - min(1, request.params.max_tokens):
            raise RequestError(
                f"the prompt has {prompt_len} tokens, but the context is {context} tokens long "
                "and must also hold the output",
                "prompt",
                code="context_length_exceeded",
            )
        if request.params.seed is None:
            raise RequestError("a seed must be drawn before the request is added", "seed")

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        vocab_size = self._runner.vocab_size
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {vocab_size}", name
                )


def _check_config(runner: ModelRunner, arena: Arena, config: EngineConfig) -> None:
    if config.num_pages > arena.num_pages:
        raise ConfigError("num_pages", config.num_pages, f"at most {arena.num_pages} (the arena)")
    if config.max_model_len > runner.max_positions:
        allowed = f"at most {runner.max_positions} (the model's context)"
        raise ConfigError("max_model_len", config.max_model_len, allowed)
    if config.max_step_tokens < config.max_num_seqs:
        allowed = f"at least max_num_seqs ({config.max_num_seqs})"
        raise ConfigError("max_step_tokens", config.max_step_tokens, allowed)
    page_tokens = arena.geometry.page_tokens
    assert page_tokens == PAGE_TOKENS, f"pages of {page_tokens} tokens, expected {PAGE_TOKENS}"


def _broken_event(state: RequestState) -> ErrorEvent:
    return ErrorEvent(
        request_id=state.request.request_id,
        code="not_finite",
        message=f"the model's values overflowed after {state.output_len} output tokens: "
        "infinity or NaN in the hidden state",
    )


def _finished_event(state: RequestState, run: CommittedRun, now: float) -> FinishedEvent:
    assert run.reason is not None, "the run has not ended"
    state.times.finished = now
    return FinishedEvent(
        request_id=state.request.request_id,
        reason=run.reason,
        stop_token_id=run.stop_token_id,
        prompt_len=state.prompt_len,
        output_len=state.output_len,
        cached_len=state.cached_len or 0,
        times=state.times,
    )
