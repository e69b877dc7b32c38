"""What a run records, and the figures drawn from it."""

from __future__ import annotations

import pytest

from support.engine_driver import assert_idle, make_config
from support.toy_runner import ToyArena, ToyRunner
from trivet.bench.measure import (
    BatchRun,
    MixedLoad,
    RecordingDrafter,
    Trace,
    are_identical,
    decode_ratio,
    draft_figures,
    loop_start,
    run_batch,
    run_mixed,
)
from trivet.engine import Engine
from trivet.errors import EngineError
from trivet.request import ErrorEvent, Event, Request, SamplingParams
from trivet.speculate import NgramDrafter

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
PROMPTS = [[1 + (i + j) % 50 for j in range(20)] for i in range(6)]


def _engine(drafter: RecordingDrafter | None = None, step_seconds: float = 0.0) -> Engine:
    config = make_config(prefix_cache=False, num_pages=64)
    runner = ToyRunner(step_seconds=step_seconds)
    return Engine(runner, ToyArena(64), config, drafter)


def _trace(arrivals: list[tuple[float, int]], arrived: float = 0.0, **fields: object) -> Trace:
    trace = Trace("r", 10, arrived, arrivals=arrivals, finished=arrivals[-1][0])
    trace.token_ids = list(range(sum(count for _, count in arrivals)))
    for name, value in fields.items():
        setattr(trace, name, value)
    return trace


def test_times_of_one_request() -> None:
    trace = _trace([(2.0, 1), (2.5, 1), (3.0, 2), (4.0, 1)], arrived=1.0)
    assert trace.ttft_s == 1.0
    assert trace.tpot_s == 2.0 / 4
    assert trace.decode_s(2) == 0.5
    assert trace.decode_s(3) == 1.0
    assert trace.gaps() == [0.5, 0.5, 1.0]


def test_one_token_has_no_tpot() -> None:
    assert _trace([(1.0, 1)]).tpot_s is None
    run = BatchRun([_trace([(1.0, 1)])], 1.0, 1)
    assert run.figures()["tpot_s"] is None
    assert run.figures()["decode_tok_s"] is None


def test_speeds_are_sums_over_the_batch() -> None:
    run = BatchRun([_trace([(1.0, 1), (3.0, 1)]), _trace([(2.0, 1), (3.0, 1)])], 4.0, 2)
    figures = run.figures()
    assert figures["decode_tok_s"] == 1 / 2 + 1
    assert figures["prefill_tok_s"] == 20 / 2.0
    assert figures["out_tok_s"] == 4 / 4.0
    assert figures["ttft_s"] == 1.5


def test_prompts_that_take_turns_do_not_count_twice() -> None:
    traces = [
        _trace([(1.0, 1), (2.0, 1)]),
        _trace([(3.0, 1), (4.0, 1)], arrived=2.0),
        _trace([(5.0, 1), (6.0, 1)], arrived=4.0),
    ]
    figures = BatchRun(traces, 6.0, 1).figures()
    assert figures["decode_tok_s"] == 1.0
    assert figures["prefill_tok_s"] == 30 / 3.0
    assert figures["ttft_s"] == 1.0


def test_no_more_requests_at_once_than_asked() -> None:
    engine = _engine()
    run = run_batch(engine, PROMPTS, GREEDY, at_once=2)
    running = [
        sum(t.arrived <= moment <= (t.finished or 0.0) for t in run.traces)
        for trace in run.traces
        for moment, _ in trace.arrivals[:-1]
    ]
    assert max(running) == 2
    assert are_identical(run, run_batch(_engine(), PROMPTS, GREEDY))
    assert_idle(engine)


def test_a_batch_runs_to_its_length_and_leaves_nothing() -> None:
    engine = _engine()
    run = run_batch(engine, PROMPTS, GREEDY)
    assert [len(trace.token_ids) for trace in run.traces] == [40] * 6
    assert run.wall_s > 0
    assert_idle(engine)


def test_speculation_is_recorded_and_changes_no_token() -> None:
    plain = run_batch(_engine(), PROMPTS, GREEDY)
    recorder = RecordingDrafter(NgramDrafter())
    drafted = run_batch(_engine(recorder), PROMPTS, GREEDY, recorder)
    assert are_identical(plain, drafted)
    for trace in drafted.traces:
        produced = 1
        for before, num_drafted, num_accepted in trace.drafts:
            assert before == produced
            assert 0 <= num_accepted <= num_drafted
            produced += 1 + num_accepted
        assert produced == len(trace.token_ids)
    assert recorder.drafts == {}


def test_alpha_counts_tested_tokens_only() -> None:
    trace = _trace([(0.0, 1), (1.0, 3), (2.0, 1), (3.0, 1)])
    trace.drafts = [(1, 4, 2), (4, 2, 0), (5, 0, 0)]
    figures = draft_figures([trace])
    assert figures.alpha == 2 / (3 + 1)
    assert figures.mean_accepted_length == 1 + 2 / 2
    assert figures.tokens_per_step == 5 / 3
    assert figures.rows_per_step == {5: 1, 3: 1, 1: 1}
    assert (figures.draft_tokens, figures.accepted_tokens) == (6, 2)


def test_loops_are_left_out() -> None:
    loop = list(range(100, 116))
    text = [1, 2, 3, *loop * 5]
    assert loop_start(text) == 3 + 3 * 16
    assert loop_start([5] * 40) == 18
    assert loop_start(list(range(100))) == 100
    trace = _trace([(0.0, 1), (1.0, 50), (2.0, 32)], token_ids=text)
    trace.drafts = [(1, 4, 4), (60, 4, 4)]
    figures = draft_figures([trace])
    assert figures.looped_share == 32 / 83
    assert figures.draft_tokens == 4


def test_the_speedup_counts_the_text_before_the_loop() -> None:
    text = [5] * 40
    plain = _trace([(float(i), 1) for i in range(40)], token_ids=text)
    fast = _trace([(0.0, 1), (1.0, 8), (2.0, 9), (100.0, 22)], token_ids=text)
    assert decode_ratio(BatchRun([plain], 39.0, 1), BatchRun([fast], 100.0, 1)) == 17.0 / 2.0


def test_a_mixed_load_cancels_what_is_left() -> None:
    engine = _engine(step_seconds=0.001)
    figures = run_mixed(
        engine,
        PROMPTS,
        [[3] * 100],
        MixedLoad(streams=2, long_every_s=0.1, duration_s=0.5, chat_output_tokens=8),
    )
    assert_idle(engine)
    assert set(figures) == {"ttft_s", "tpot_s", "chat_gap_p99_s", "long_ttft_s", "out_tok_s"}
    assert all(value is not None and value > 0 for value in figures.values())


def test_a_failed_request_is_not_a_result() -> None:
    class Failing:
        """Fails its first step."""

        has_work = True

        def add(self, request: Request, now: float) -> None:
            self.request = request

        def abort(self, request_id: str) -> bool:
            return False

        def step(self, now: float, clock: object = None) -> list[Event]:
            return [ErrorEvent(request_id=self.request.request_id, code="x", message="broken")]

    with pytest.raises(EngineError, match="broken"):
        run_batch(Failing(), [[1]], GREEDY)
