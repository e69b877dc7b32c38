"""One task's finding: signal, significance, and the honest undecided."""

from __future__ import annotations

import pytest

from support.toy_model import make_toy_model
from trivet.errors import EndpointError, EngineError
from trivet.evaluate import sandbox
from trivet.evaluate.builtin_tasks import builtin_tasks
from trivet.evaluate.checks.judge import Answer, judge_answers
from trivet.evaluate.gate import judge_checks
from trivet.evaluate.gating import SIZES, Gate, GateOptions, add_tasks, finish
from trivet.evaluate.quality import unmeasured
from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict
from trivet.evaluate.subject import LocalSubject
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


def test_a_short_budget_shrinks_the_amounts_and_keeps_the_contexts() -> None:
    whole = SIZES["fast"]
    half = whole.scaled(0.5)
    assert half.task_items == whole.task_items // 2
    assert half.corpus_tokens == whole.corpus_tokens // 2
    assert half.passkey_tokens == whole.passkey_tokens
    assert whole.scaled(0.001).task_items == 2


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
