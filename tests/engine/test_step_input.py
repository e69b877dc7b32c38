"""The arrays of a step."""

from __future__ import annotations

import numpy as np

from support.engine_driver import make_request
from support.toy_runner import ToyRunner
from trivet.engine.commit import StopRule
from trivet.engine.request_state import RequestState
from trivet.engine.step_input import SlotTable, StepBuilder
from trivet.request import StageTimes


def _running(
    slots: SlotTable, tokens: list[int], computed_len: int, pages: list[int]
) -> RequestState:
    request = make_request("r", tokens)
    state = RequestState(
        request=request,
        arrival=0,
        sampler=ToyRunner().new_sampler(request.params, 0, tokens),
        rule=StopRule(frozenset(), 0, 16),
        token_ids=list(tokens),
        times=StageTimes(arrived=0.0),
        root_key=b"",
        computed_len=computed_len,
        pages=pages,
    )
    slots.assign(state)
    return state


def test_decodes_drafts_and_chunks_lie_one_after_the_other() -> None:
    slots = SlotTable(max_num_seqs=3, max_model_len=96)
    first = _running(slots, list(range(40)), 39, [4, 5])
    second = _running(slots, [7, 8, 9], 2, [2])
    third = _running(slots, list(range(20, 60)), 10, [0, 1])
    builder = StepBuilder(slots, max_rows=32)
    builder.start([second, first], [[50, 51], []])
    assert builder.add_prefill(third, 5, num_logits=1, skip_logits=4) == 4
    step = builder.build()
    assert step.tokens.tolist() == [9, 50, 51, 39, 30, 31, 32, 33, 34]
    assert step.segments.tolist() == [[0, 3, 2, 1], [3, 1, 39, 0], [4, 5, 10, 2]]
    assert step.logit_rows.tolist() == [0, 1, 2, 3, 8]
    assert step.page_tables.tolist() == [[4, 5, -1], [2, -1, -1], [0, 1, -1]]
    for array in (step.tokens, step.segments, step.page_tables, step.logit_rows):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_a_step_leaves_nothing_of_the_one_before() -> None:
    slots = SlotTable(max_num_seqs=2, max_model_len=64)
    first = _running(slots, list(range(8)), 0, [0])
    second = _running(slots, [3, 4], 1, [1])
    builder = StepBuilder(slots, max_rows=32)
    builder.start([], [])
    assert builder.add_prefill(first, 8, num_logits=4, skip_logits=2) == 0
    assert builder.build().logit_rows.tolist() == [2, 3, 4, 5]
    first.computed_len = 7
    slots.advance(first)
    builder.start([first, second], [[], []])
    step = builder.build()
    assert step.tokens.tolist() == [7, 4]
    assert step.segments.tolist() == [[0, 1, 7, 0], [1, 1, 1, 1]]
    assert step.logit_rows.tolist() == [0, 1]


def test_released_slot_is_clean() -> None:
    slots = SlotTable(max_num_seqs=1, max_model_len=64)
    state = _running(slots, [1, 2, 3], 0, [6])
    slots.extend(state, [9])
    assert slots.page_tables.tolist() == [[6, 9]]
    slots.release(state)
    assert slots.page_tables.tolist() == [[-1, -1]]
    assert (state.slot, slots.num_free) == (None, 1)
