"""Builds the arrays of one step (`trivet.native.api.StepInput`) without per-step allocation.

Every running request has a *slot*: its row in ``page_tables`` and its page-table index in the
segments. Slots keep the last token and the position of each decoding request, so that the rows of all
decodes are gathered by a handful of numpy calls; only prefill chunks and drafts are copied one by one.
The arrays of a StepInput are views that the next step overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trivet.config import PAGE_TOKENS
from trivet.engine.request_state import RequestState
from trivet.native.api import Int32, StepInput


class SlotTable:
    """Slots of the running requests, and the arrays indexed by them.

    page_tables  int32 [max_num_seqs, pages of max_model_len]; unused entries are -1
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        num_columns = -(-max_model_len // PAGE_TOKENS)
        self.page_tables: Int32 = np.full((max_num_seqs, num_columns), -1, np.int32)
        self.last_tokens: Int32 = np.zeros(max_num_seqs, np.int32)
        self.positions: Int32 = np.zeros(max_num_seqs, np.int32)
        self._known: list[Int32 | None] = [None] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Requests that could still start running."""
        return len(self._free)

    def assign(self, state: RequestState) -> None:
        """Give a request, whose first pages are set, a slot."""
        slot = self._free.pop()
        state.slot = slot
        self.page_tables[slot, : len(state.pages)] = state.pages
        self._known[slot] = np.array(state.token_ids, np.int32)
        self.advance(state)

    def extend(self, state: RequestState, pages: Sequence[int]) -> None:
        """Append pages to a running request and to its page table."""
        first = len(state.pages)
        state.pages.extend(pages)
        self.page_tables[state.slot, first : len(state.pages)] = pages

    def advance(self, state: RequestState) -> None:
        """Take over the request's last token and position after its state has changed."""
        self.last_tokens[state.slot] = state.token_ids[-1]
        self.positions[state.slot] = state.computed_len

    def release(self, state: RequestState) -> None:
        """Take the slot back."""
        assert state.slot is not None, "the request has no slot"
        self.page_tables[state.slot, : len(state.pages)] = -1
        self._known[state.slot] = None
        self._free.append(state.slot)
        state.slot = None

    def known_tokens(self, state: RequestState, start: int, end: int) -> Int32:
        """Tokens [start, end) of those the request had when it got its slot."""
        assert state.slot is not None, "the request has no slot"
        known = self._known[state.slot]
        assert known is not None, "the slot is not assigned"
        assert end <= known.size, "a prefill reaches beyond the tokens known at admission"
        return known[start:end]


class StepBuilder:
    """Assembles decodes first, then prefill chunks, in the order in which they are added.

    max_rows        most rows of one step
    """

    def __init__(self, slots: SlotTable, max_rows: int) -> None:
        self._slots = slots
        max_segments = len(slots.last_tokens)
        self._tokens: Int32 = np.zeros(max_rows, np.int32)
        self._segments: Int32 = np.zeros((max_segments, 4), np.int32)
        self._logit_rows: Int32 = np.zeros(max_rows, np.int32)
        self._counting: Int32 = np.arange(max_rows + 1, dtype=np.int32)
        self._num_rows = 0
        self._num_segments = 0
        self._num_logits = 0

    def start(self, decodes: Sequence[RequestState], drafts: Sequence[Sequence[int]]) -> None:
        """Begin a step with one row for each decode and one for each draft token after it.

        Every such row has logits; the logits of decode i start at row i plus the drafts before it.
        """
        count = len(decodes)
        segments = self._segments[:count]
        if count:
            slots = np.array([state.slot for state in decodes], np.intp)
            segments[:, 2] = self._slots.positions[slots]
            segments[:, 3] = slots
        num_drafted = sum(map(len, drafts))
        if num_drafted == 0:
            segments[:, 0] = self._counting[:count]
            segments[:, 1] = 1
            if count:
                self._tokens[:count] = self._slots.last_tokens[slots]
        else:
            lengths = np.array([1 + len(draft) for draft in drafts], np.int32)
            ends = np.cumsum(lengths)
            segments[:, 0] = ends - lengths
            segments[:, 1] = lengths
            self._tokens[segments[:, 0]] = self._slots.last_tokens[slots]
            for first, draft in zip(segments[:, 0].tolist(), drafts, strict=True):
                self._tokens[first + 1 : first + 1 + len(draft)] = draft
        self._num_rows = self._num_logits = count + num_drafted
        self._num_segments = count
        self._logit_rows[: self._num_logits] = self._counting[: self._num_logits]

    def add_prefill(
        self, state: RequestState, count: int, num_logits: int, skip_logits: int
    ) -> int:
        """Add the next ``count`` known tokens; the rows ``skip_logits .. + num_logits`` have logits.

        Returns the index of the first of them among the step's logits.
        """
        assert state.slot is not None, "the request has no slot"
        start, row = state.computed_len, self._num_rows
        tokens = self._slots.known_tokens(state, start, start + count)
        self._tokens[row : row + count] = tokens
        self._segments[self._num_segments] = (row, count, start, state.slot)
        first_logit = self._num_logits
        end_logit = first_logit + num_logits
        self._logit_rows[first_logit:end_logit] = self._counting[:num_logits] + (row + skip_logits)
        self._num_rows += count
        self._num_segments += 1
        self._num_logits = end_logit
        return first_logit

    def build(self) -> StepInput:
        """The finished step; its arrays are valid until the next `start`."""
        return StepInput(
            tokens=self._tokens[: self._num_rows],
            segments=self._segments[: self._num_segments],
            page_tables=self._slots.page_tables,
            logit_rows=self._logit_rows[: self._num_logits],
        )
