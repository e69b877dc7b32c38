"""One task's finding: signal, significance, and the honest undecided."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from support.toy_model import make_toy_model
from support.toy_runner import ToyRunner
from trivet.errors import EndpointError, EngineError
from trivet.evaluate import sandbox
from trivet.evaluate.builtin_tasks import builtin_tasks
from trivet.evaluate.checks.choice import probability
from trivet.evaluate.checks.judge import MIN_ITEMS, Answer, judge_answers
from trivet.evaluate.checks.passkey import NUM_KEYS
from trivet.evaluate.corpora import Corpus
from trivet.evaluate.gate import judge_checks
from trivet.evaluate.gating import SIZES, Gate, GateOptions, add_tasks, finish, run_gate
from trivet.evaluate.next_step import Recipe, next_step
from trivet.evaluate.quality import unmeasured
from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict
from trivet.evaluate.subject import LocalSubject, Score
from trivet.evaluate.task import Form


def _judge(baseline: list[Answer], candidate: list[Answer], chance: float = 0.25) -> CheckResult:
    return judge_answers("choice", "t", Kind.MATHS, chance, baseline, candidate, seed=0, level=0.01)


def _answers(right: int, of: int, expected: float | None = None) -> list[Answer]:
    return [Answer(at < right, expected) for at in range(of)]


def test_a_baseline_at_chance_has_no_vote() -> None:
    found = _judge(_answers(34, 100), _answers(0, 100))
    assert found.finding is Finding.NO_SIGNAL
    assert not found.votes
    assert _judge(_answers(35, 100), _answers(0, 100)).finding is Finding.REJECT


def test_a_significant_drop_rejects_and_a_small_sample_is_undecided() -> None:
    assert _judge(_answers(90, 100), _answers(70, 100)).finding is Finding.REJECT
    assert _judge(_answers(9, 10), _answers(8, 10)).finding is Finding.UNDECIDED
    assert _judge(_answers(180, 200), _answers(180, 200)).finding is Finding.PASS
    assert _judge(_answers(18, 20), _answers(18, 20)).finding is Finding.UNDECIDED


def test_expected_accuracy_decides_with_few_items() -> None:
    base = [Answer(True, 0.80 + 0.001 * at) for at in range(40)]
    near = [Answer(True, 0.795 + 0.001 * at) for at in range(40)]
    far = [Answer(True, 0.70 + 0.001 * at) for at in range(40)]
    assert _judge(base, near).finding is Finding.PASS
    assert _judge(base, far).finding is Finding.REJECT
    assert _judge(base[:10], near[:10]).finding is Finding.UNDECIDED


def test_a_drop_that_may_be_small_rejects_at_the_last_look_only() -> None:
    base = [Answer(True, 0.8)] * 24
    near = [Answer(True, 0.8 - drop) for drop in [0.01, 0.07] * 12]
    far = [Answer(True, 0.8 - drop) for drop in [0.07, 0.13] * 12]

    def judge(own: list[Answer], *, is_last: bool) -> Finding:
        return judge_answers(
            "choice", "t", Kind.MATHS, 0.0, base, own, seed=0, level=0.01, is_last=is_last
        ).finding

    assert judge(near, is_last=False) is Finding.UNDECIDED
    assert judge(near, is_last=True) is Finding.REJECT
    assert judge(far, is_last=False) is Finding.REJECT


def test_one_pattern_that_moved_is_no_proof_of_a_drop() -> None:
    base = [Answer(True, 0.8)] * 24
    own = [Answer(True, 0.8 if at >= 8 else 0.6) for at in range(24)]

    def judge(size: int) -> CheckResult:
        groups = [at // size for at in range(24)]
        return judge_answers(
            "choice", "t", Kind.MATHS, 0.0, base, own, seed=0, level=0.01, groups=groups
        )

    assert judge(1).finding is Finding.REJECT
    assert judge(8).finding is Finding.UNDECIDED


def test_an_expectation_far_below_the_accuracy_decides_nothing() -> None:
    """Drawing hardly ever gives the answers that greedy decoding gives: the counts are left."""
    base, own = _answers(30, 30, 0.19), _answers(30, 30, 0.10)
    assert _judge(base, own).finding is Finding.UNDECIDED
    assert _judge(base, own).metrics["expected_drop"] is None
    assert _judge(_answers(30, 30, 0.25), _answers(30, 30, 0.20)).finding is Finding.REJECT


def test_a_line_may_be_ended_in_any_way() -> None:
    likely, end = math.log(0.9), math.log(0.01)
    assert probability("text\n", Score((likely, end), True)) == pytest.approx(0.9)
    assert probability("text;", Score((likely, end), True)) == pytest.approx(0.009)
    assert probability("\n", Score((end,), True)) == pytest.approx(0.01)
    assert probability("text", Score((likely, -math.inf), False)) == 0.0


def test_a_model_that_computes_no_numbers_is_rejected() -> None:
    assert _judge(_answers(30, 40, 0.7), _answers(0, 40, 0.0)).finding is Finding.REJECT


def _check(kind: Kind, finding: Finding, is_task: bool = True) -> CheckResult:
    return CheckResult("c", f"{kind.value} {finding.value}", kind, finding, "why", is_task=is_task)


PASSING = [_check(kind, Finding.PASS) for kind in (Kind.CHAT, Kind.SQL, Kind.CODE)]


@pytest.mark.parametrize(
    ("extra", "asked", "verdict"),
    [
        ([], (), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.REJECT)], (), Verdict.REJECT),
        ([_check(Kind.MATHS, Finding.REJECT)], (Kind.CHAT,), Verdict.PASS),
        ([_check(Kind.MODEL, Finding.REJECT, False)], (Kind.CHAT,), Verdict.REJECT),
        ([_check(Kind.MATHS, Finding.UNDECIDED)], (), Verdict.UNDECIDED),
        ([_check(Kind.MATHS, Finding.UNDECIDED)], (Kind.SQL,), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.NO_SIGNAL)], (), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.NO_SIGNAL)], (Kind.MATHS,), Verdict.UNDECIDED),
        ([_check(Kind.MODEL, Finding.NOT_RUN, False)], (), Verdict.UNDECIDED),
        ([_check(Kind.MODEL, Finding.NOT_APPLICABLE, False)], (), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.LEFT_OUT)], (), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.LEFT_OUT)], (Kind.CHAT,), Verdict.PASS),
        ([_check(Kind.MATHS, Finding.LEFT_OUT)], (Kind.MATHS,), Verdict.UNDECIDED),
    ],
)
def test_the_verdict_of_many_checks(
    extra: list[CheckResult], asked: tuple[Kind, ...], verdict: Verdict
) -> None:
    assert judge_checks([*PASSING, *extra], asked).verdict is verdict


def test_fewer_than_three_votes_are_undecided() -> None:
    ruling = judge_checks([*PASSING[:2], _check(Kind.MODEL, Finding.PASS, False)])
    assert ruling.verdict is Verdict.UNDECIDED
    assert "2 tasks carry a signal" in ruling.reasons[0]
    assert judge_checks([_check(Kind.SQL, Finding.REJECT)]).verdict is Verdict.REJECT


def test_what_was_left_out_is_named_and_has_no_vote() -> None:
    left_out = _check(Kind.MATHS, Finding.LEFT_OUT)
    ruling = judge_checks([*PASSING, left_out])
    assert ruling.kinds[Kind.MATHS] is Finding.LEFT_OUT
    assert ruling.num_votes == 3
    assert "left out, no time in the budget: maths left out" in ruling.reasons
    few = judge_checks([*PASSING[:2], left_out])
    assert few.verdict is Verdict.UNDECIDED
    assert next_step(Verdict.UNDECIDED, [left_out], Recipe("w8a8"))[0] == "run"


class _Clock:
    """Stands for `time.monotonic` in the gate; checks take time by moving it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("trivet.evaluate.gating.time.monotonic", lambda: self.now)


def _timed(
    gate: Gate, clock: _Clock, name: str, kind: Kind, rows: float, *, is_optional: bool = True
) -> None:
    """Plan a check that takes a second for each row, and looks at the time in the middle."""

    def run() -> list[CheckResult]:
        for _ in range(2):
            clock.now += rows / 2
            gate.tick()
        return [CheckResult(name, name, kind, Finding.PASS, "why", is_task=is_optional)]

    gate.add(name, kind, run, rows, is_optional=is_optional)


def test_the_longest_tasks_are_left_out_and_those_asked_for_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = _Clock(monkeypatch)
    for kinds, left_out in (((), ["sql", "code"]), ((Kind.SQL,), ["code", "chat"])):
        clock.now = 0.0
        gate = Gate(GateOptions(budget_s=100, kinds=kinds), SIZES["fast"])
        _timed(gate, clock, "model", Kind.MODEL, 20, is_optional=False)
        tasks = {"sql": (Kind.SQL, 40), "code": (Kind.CODE, 35), "chat": (Kind.CHAT, 30)}
        for name, (kind, rows) in {**tasks, "sums": (Kind.MATHS, 5)}.items():
            _timed(gate, clock, name, kind, rows)
        gate.run()
        found = {check.name: check.finding for check in gate.checks}
        assert [name for name in found if found[name] is Finding.LEFT_OUT] == left_out
        assert all(f is Finding.PASS for n, f in found.items() if n not in left_out)
        assert clock.now <= 100


def test_a_check_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    gate = Gate(GateOptions(budget_s=10), SIZES["fast"])
    _timed(gate, clock, "sums", Kind.MATHS, 30)
    _timed(gate, clock, "model", Kind.MODEL, 30, is_optional=False)
    gate.run()
    assert clock.now == 15
    found = {check.name: check for check in gate.checks}
    assert found["sums"].finding is Finding.LEFT_OUT
    assert found["model"].finding is Finding.NOT_RUN
    assert "the budget of 10 s is spent" in found["model"].reason


def test_a_task_with_too_few_items_is_looked_at_once_more() -> None:
    looks: list[str] = []

    def look(finding: Finding, label: str) -> Callable[[], list[CheckResult]]:
        def run() -> list[CheckResult]:
            looks.append(label)
            return [CheckResult("t", "t", Kind.MATHS, finding, label, is_task=True)]

        return run

    gate = Gate(GateOptions(), SIZES["fast"])
    gate.add("t", Kind.MATHS, look(Finding.UNDECIDED, "1"), 1.0, look(Finding.PASS, "2"))
    gate.run()
    gate.look_again()
    gate.look_again()
    assert looks == ["1", "2"]
    assert [check.finding for check in gate.checks] == [Finding.PASS]

    looks.clear()
    gate = Gate(GateOptions(), SIZES["fast"])
    gate.add("t", Kind.MATHS, look(Finding.UNDECIDED, "1"), 1.0, look(Finding.PASS, "2"))
    gate.add("bad", Kind.MODEL, lambda: [_check(Kind.MODEL, Finding.REJECT)])
    gate.run()
    gate.look_again()
    assert looks == ["1"]


class _PlainSubject(LocalSubject):
    """A toy without a chat template."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        return None


def test_a_budget_takes_smaller_sizes_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = CheckResult("weights", "weights", Kind.MODEL, Finding.PASS, "a toy has none")
    monkeypatch.setattr("trivet.evaluate.checks.weights.check", lambda *_: passed)
    toy = make_toy_model()
    assert isinstance(toy.runner, ToyRunner)
    toy.runner.step_seconds = 0.04
    model = _PlainSubject(toy, 512)
    corpora = [Corpus(name, "the quick brown fox jumps over it " * 400, "here") for name in "ab"]
    options = GateOptions(budget_s=3.0)
    begin = time.monotonic()
    report = run_gate(model, model, corpora, options, context=128, stride=128)
    assert time.monotonic() - begin < 15  # without a budget it takes minutes
    assert report.sizes.corpus_tokens < SIZES["fast"].corpus_tokens
    assert report.sizes.task_items == MIN_ITEMS
    assert report.as_json()["budget_s"] == 3.0
    found = {check.name: check.finding for check in report.checks}
    assert found["identity"] is Finding.PASS
    assert Finding.LEFT_OUT in found.values()


def test_a_short_budget_shrinks_the_amounts_and_keeps_what_a_check_needs() -> None:
    whole = SIZES["full"]
    half = whole.scaled(0.5)
    assert half.task_items == whole.task_items // 2
    assert half.corpus_tokens == whole.corpus_tokens // 2
    assert half.passkey_tokens == whole.passkey_tokens
    least = whole.scaled(0.001)
    assert least.task_items == least.file_items == MIN_ITEMS
    assert least.passkey_texts * NUM_KEYS >= MIN_ITEMS
    small = dataclasses.replace(whole, task_items=3)
    assert small.scaled(1.0) == small
    assert small.scaled(0.1).task_items == 3


def test_code_that_cannot_be_isolated_has_no_signal_and_no_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = {"network": None, "error": "unshare: not permitted"}
    monkeypatch.setattr(sandbox, "isolation", lambda: lacking)
    [task] = [task for task in builtin_tasks(0, 2) if task.form is Form.CODE]
    gate = Gate(GateOptions(), SIZES["fast"])
    model = LocalSubject(make_toy_model(), 64)
    add_tasks(gate, model, model, [task])
    gate.run()
    [found] = gate.checks
    assert (found.finding, found.votes) == (Finding.NO_SIGNAL, False)
    assert "no isolation of network, root, user, limits (unshare: not permitted)" in found.reason
    report = finish(gate, [task], unmeasured(["a"]))
    assert report.as_json()["sandbox"] == lacking
    assert report.result.verdict is Verdict.UNDECIDED
    assert judge_checks([*PASSING, found]).verdict is Verdict.PASS


def test_the_gate_says_what_isolated_its_code() -> None:
    tasks = builtin_tasks(0, 2)
    gate = Gate(GateOptions(), SIZES["fast"])
    assert finish(gate, tasks, unmeasured([])).as_json()["sandbox"] == sandbox.isolation()
    plain = [task for task in tasks if task.form is not Form.CODE]
    assert finish(gate, plain, unmeasured([])).as_json()["sandbox"] is None


def test_a_check_after_the_budget_or_in_error_is_named_and_not_run() -> None:
    errors = iter([EngineError("broken"), EndpointError("http://x", "does not answer")])

    def fails() -> list[CheckResult]:
        raise next(errors)

    for budget, reason in (
        (None, "could not run: broken"),
        (None, "could not run: http://x: does not answer"),
        (1e-9, "the budget"),
    ):
        gate = Gate(GateOptions(budget_s=budget), SIZES["fast"])
        gate.add("some check", Kind.MATHS, fails)
        gate.run()
        [found] = gate.checks
        assert found.finding is Finding.NOT_RUN
        assert reason in found.reason
        assert judge_checks([*PASSING, found]).verdict is Verdict.UNDECIDED
