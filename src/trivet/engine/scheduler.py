"""Decides which tokens of which requests the next step computes: continuous batching with chunks.

In order of claim on the step's rows:

1. decodes: every running request with one token to compute gets its row,
2. prefill chunks of running requests, most important first,
3. waiting requests, admitted while rows, slots and pages last,
4. draft tokens, from what is left (`grant_draft`, after the drafter has proposed).

Importance is higher priority first, then earlier arrival. When a decode needs a page and none is left,
the least important running request is preempted: its pages go (the full ones stay in the prefix cache
until somebody needs them), its ids stay, and it is recomputed later. The most important request is
never preempted while another runs, and alone it always fits, because `check_fits` refused all others:
so every request ends.

It knows token counts and pages, and touches no clock, no native code and no socket.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from trivet.config import PAGE_TOKENS, EngineConfig
from trivet.engine.pages import PagePool, pages_needed
from trivet.engine.prefix import PrefixCache, extend_keys
from trivet.engine.request_state import RequestState
from trivet.engine.step_input import SlotTable
from trivet.engine.step_time import StepLoad
from trivet.errors import RequestError

MAX_SCORED_ROWS = 64  # prompt rows of one step whose logits are computed for prompt_logprobs


@dataclasses.dataclass(slots=True)
class PrefillChunk:
    """Rows [state.computed_len, + count) of a request.

    skip_logits   rows before the first whose logits are computed
    num_scored    rows whose logits give the log-probability of the next prompt token
    is_last       the last row is the last known token: its logits give the token after it
    """

    state: RequestState
    count: int
    skip_logits: int
    num_scored: int
    is_last: bool


@dataclasses.dataclass(slots=True)
class Plan:
    """What one step computes. ``drafts`` is parallel to ``decodes``."""

    decodes: list[RequestState]
    drafts: list[Sequence[int]]
    chunks: list[PrefillChunk]
    rows_left: int
    scored_rows_left: int = MAX_SCORED_ROWS

    @property
    def num_rows(self) -> int:
        """Rows of the step, draft tokens included."""
        chunk_rows = sum(chunk.count for chunk in self.chunks)
        return len(self.decodes) + sum(map(len, self.drafts)) + chunk_rows

    def load(self) -> StepLoad:
        """The step's work without drafts, as the cost model sees it."""
        context = sum(state.computed_len for state in self.decodes) + len(self.decodes)
        load = StepLoad(*(len(self.decodes),) * 2, context, context, len(self.decodes))
        for chunk in self.chunks:
            logit_rows = chunk.num_scored + chunk.is_last
            load = load.plus(chunk.state.computed_len, chunk.count, logit_rows)
        return load


class Scheduler:
    """Owns the queue of waiting requests and the list of running ones, both by importance."""

    def __init__(
        self, config: EngineConfig, pool: PagePool, prefix: PrefixCache | None, slots: SlotTable
    ) -> None:
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self._pool = pool
        self._prefix = prefix
        self._slots = slots
        self._max_chunk = config.max_prefill_chunk
        self.max_rows = config.max_step_tokens
        if self._max_chunk is None:  # an unchunked prompt needs all its rows in one step
            self.max_rows = max(self.max_rows, config.max_model_len + config.max_num_seqs)

    def check_fits(self, max_total_len: int) -> None:
        """Refuse a request that would not fit even if it were alone."""
        needed = pages_needed(max_total_len)
        if needed > self._pool.num_pages:
            raise RequestError(
                f"prompt and max_tokens need {max_total_len} tokens of KV ({needed} pages), "
                f"but there are {self._pool.num_pages} pages",
                "max_tokens",
            )

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        bisect.insort(self.waiting, state, key=_order)

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it is, and give back its pages and its slot."""
        if state.slot is None:
            self.waiting.remove(state)
        else:
            self.running.remove(state)
            self._release(state)

    def schedule(self) -> Plan:
        """Choose the rows of the next step, and reserve the pages they need."""
        plan = Plan([], [], [], self.max_rows)
        self._schedule_decodes(plan)
        self._schedule_chunks(plan)
        if self.waiting:
            self._admit_waiting(plan)
        return plan

    def grant_draft(self, plan: Plan, index: int, draft: Sequence[int]) -> None:
        """Add draft tokens to decode ``index``, as far as rows and free pages reach.

        Never preempts and never takes the last spare page of another running request.
        """
        state = plan.decodes[index]
        count = min(len(draft), plan.rows_left)
        missing = pages_needed(state.total_len + count) - len(state.pages)
        if missing > 0:
            if self._pool.num_available >= missing + len(self.running) - 1:
                pages = self._pool.allocate(missing)
                assert pages is not None, "the pool has fewer pages than it says"
                self._slots.extend(state, pages)
            else:
                count = min(count, state.capacity - state.total_len)
        plan.drafts[index] = draft[:count]
        plan.rows_left -= count

    def _schedule_decodes(self, plan: Plan) -> None:
        # Victims come from the end of the list, which this loop has not reached yet, so no request
        # that is already in the plan can lose its pages.
        index = 0
        while index < len(self.running):
            state = self.running[index]
            if state.total_len - state.computed_len == 1 and self._ensure_room(state):
                plan.decodes.append(state)
            index += 1
        plan.drafts = [()] * len(plan.decodes)
        plan.rows_left -= len(plan.decodes)

    def _ensure_room(self, state: RequestState) -> bool:
        """Reserve the page of a decode's next token; False: the request itself was preempted."""
        while state.total_len > state.capacity:
            pages = self._pool.allocate(1)
            if pages is not None:
                self._slots.extend(state, pages)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _preempt(self, victim: RequestState) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.times.preemptions += 1
        self.num_preemptions += 1
        self.add(victim)

    def _release(self, state: RequestState) -> None:
        self._slots.release(state)
        self._pool.release(state.pages)
        state.pages = []
        state.num_registered = 0
        state.computed_len = 0

    def _schedule_chunks(self, plan: Plan) -> None:
        for state in self.running:
            if plan.rows_left == 0:
                return
            if state.total_len - state.computed_len > 1:
                self._schedule_chunk(plan, state)

    def _chunk_len(self, plan: Plan, state: RequestState, computed_len: int) -> int:
        """Rows the request can get in this step: 0 when it has to wait for the next one."""
        needed = state.total_len - computed_len
        count = min(needed, plan.rows_left)
        if self._max_chunk is not None:
            count = min(count, self._max_chunk)
        elif count < needed:
            return 0
        if state.unscored_len > plan.scored_rows_left:
            # Row p scores prompt token p + 1.
            first_unscored = state.prompt_len - state.unscored_len
            count = min(count, first_unscored - 1 + plan.scored_rows_left - computed_len)
        return count

    def _schedule_chunk(self, plan: Plan, state: RequestState) -> None:
        count = self._chunk_len(plan, state, state.computed_len)
        if count <= 0:
            return
        start, end = state.computed_len, state.computed_len + count
        first, scored = end - 1, 0
        if state.unscored_len:
            first = max(start, state.prompt_len - state.unscored_len - 1)
            scored = max(0, min(end, state.prompt_len - 1) - first)
        chunk = PrefillChunk(state, count, first - start, scored, end == state.total_len)
        plan.chunks.append(chunk)
        plan.rows_left -= count
        plan.scored_rows_left -= scored

    def _admit_waiting(self, plan: Plan) -> None:
        in_flight = self._keys_in_flight()
        num_deferred = 0
        for state in list(self.waiting):
            if plan.rows_left == 0 or self._slots.num_free <= num_deferred:
                return
            found = self._find_prefix(state)
            if self._next_key(state, found) in in_flight:
                num_deferred += 1  # a running prefill computes this very page: share it when done
                continue
            if self._chunk_len(plan, state, len(found) * PAGE_TOKENS) <= 0:
                return
            if not self._reserve(state, found):
                return
            self.waiting.remove(state)
            bisect.insort(self.running, state, key=_order)
            in_flight.update(state.page_keys[state.num_registered :])
            if state.total_len - state.computed_len == 1:
                plan.decodes.append(state)
                plan.drafts.append(())
                plan.rows_left -= 1
            else:
                self._schedule_chunk(plan, state)

    def _find_prefix(self, state: RequestState) -> list[int]:
        """Cached pages the request can start from, always short of its last known token.

        Rows that are scored for prompt_logprobs must be computed, so such a request looks up nothing.
        """
        if self._prefix is None or not state.request.use_prefix_cache or state.unscored_len:
            return []
        num_pages = (state.total_len - 1) // PAGE_TOKENS
        extend_keys(state.page_keys, state.root_key, state.token_ids, num_pages)
        return self._prefix.find(state.page_keys[:num_pages])

    def _keys_in_flight(self) -> set[bytes]:
        """Keys of full pages that running prefills are about to compute."""
        return {
            key
            for state in self.running
            if state.total_len - state.computed_len > 1
            for key in state.page_keys[state.num_registered :]
        }

    def _next_key(self, state: RequestState, found: Sequence[int]) -> bytes | None:
        return state.page_keys[len(found)] if len(found) < len(state.page_keys) else None

    def _reserve(self, state: RequestState, found: list[int]) -> bool:
        """Take the pages of all known tokens and a slot, or nothing.

        One page per running request stays spare, so that admission does not cause preemption at once.
        """
        missing = pages_needed(state.total_len) - len(found)
        revived = sum(1 for page in found if self._pool.ref_count(page) == 0)
        if missing + revived + len(self.running) > self._pool.num_available:
            return False
        for page in found:
            self._pool.share(page)
        fresh = self._pool.allocate(missing)
        assert fresh is not None, "the pool has fewer pages than it says"
        state.pages = found + fresh
        state.computed_len = len(found) * PAGE_TOKENS
        state.num_registered = len(found)
        if state.cached_len is None:
            state.cached_len = min(state.computed_len, state.prompt_len)
        if self._prefix is not None and state.request.use_prefix_cache:
            self._prefix.count(state.total_len, state.computed_len)
        self._slots.assign(state)
        return True

    def mark_computed(self, state: RequestState, computed_len: int) -> None:
        """The KV of the first ``computed_len`` tokens is valid: offer new full pages for sharing."""
        state.computed_len = computed_len
        num_full = computed_len // PAGE_TOKENS
        if num_full > state.num_registered and self._prefix is not None:
            if state.request.use_prefix_cache:
                extend_keys(state.page_keys, state.root_key, state.token_ids, num_full)
                for index in range(state.num_registered, num_full):
                    self._prefix.register(state.page_keys[index], state.pages[index])
            state.num_registered = num_full


def _order(state: RequestState) -> tuple[int, int]:
    return state.order
