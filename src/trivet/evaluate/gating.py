"""Run the checks of a gate on a candidate and its baseline, and keep what they found.

Sizes of the checks are fixed numbers of tokens and items, so that a gate run again gives the same
figures. A budget shorter than the size's own makes them smaller in proportion, and a check that would
begin after the budget is spent is named as not run.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.errors import ConfigError, EndpointError, EngineError
from trivet.evaluate import sandbox
from trivet.evaluate.builtin_tasks import builtin_tasks, held_out_prompts
from trivet.evaluate.checks import (
    answers,
    choice,
    divergence,
    identity,
    long_context,
    passkey,
    perplexity,
    repetition,
    side_by_side,
    weights,
)
from trivet.evaluate.checks.judge import Answer, judge_answers
from trivet.evaluate.corpora import Corpus
from trivet.evaluate.gate import GateResult, judge_checks
from trivet.evaluate.quality import QualityReport, encode_corpora, quality_of, unmeasured
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.scoring import TokenFigures, score_tokens
from trivet.evaluate.subject import Subject
from trivet.evaluate.task import Form, Task, load_tasks

FORMAT_VERSION = 1
_CHARS_PER_TOKEN = 8  # text tokenized for each token wanted of the long text
_SIGNIFICANCE = 0.05  # of all tasks together
# Rough times of the sizes on the demo model and two cores, a guess; a shorter budget scales them down.
_BUDGETS_S = {"fast": 110.0, "full": 840.0}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much each check looks at.

    corpus_tokens   scored of each corpus              task_items       of each task
    file_items      of each task of a folder           long_tokens      of the long text
    passkeys        prompts, of passkey_tokens each    side_by_side     prompts, of side_tokens each
    """

    corpus_tokens: int
    task_items: int
    file_items: int
    long_tokens: int
    passkeys: int
    passkey_tokens: int
    side_by_side: int
    side_tokens: int
    repetition_prompts: int
    repetition_tokens: int

    def scaled(self, factor: float) -> Sizes:
        """All amounts of work times a factor; contexts keep their length."""
        kept = ("passkey_tokens", "side_by_side", "side_tokens", "repetition_tokens")
        changed = {
            field.name: max(2, round(getattr(self, field.name) * factor))
            for field in dataclasses.fields(self)
            if field.name not in kept
        }
        return dataclasses.replace(self, **changed)


SIZES = {
    "fast": Sizes(1280, 32, 32, 1024, 8, 256, 20, 20, 8, 48),
    "full": Sizes(8192, 120, 200, 4096, 24, 1536, 20, 64, 20, 192),
}


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """What a gate is asked for.

    size    ``fast`` or ``full``
    tasks   folder of task files; None: the built-in tasks
    kinds   kinds of task that may block; empty: all
    budget_s  seconds for all checks; None: sizes as they are
    """

    size: str = "fast"
    tasks: Path | None = None
    kinds: tuple[Kind, ...] = ()
    budget_s: float | None = None
    seed: int = 0
    corpus_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class GateReport:
    """Everything a gate found. `result` is the contract's part of it.

    sandbox  the isolation that code ran in, `trivet.evaluate.sandbox.isolation`; None: no task had code
    """

    result: GateResult
    checks: list[CheckResult]
    kinds: dict[Kind, Finding]
    quality: QualityReport
    tasks: list[dict[str, Any]]
    sizes: Sizes
    options: GateOptions
    seconds: float
    texts: list[dict[str, Any]]
    sandbox: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The gate file, less what the caller knows of the models and corpora."""
        return {
            "format": FORMAT_VERSION,
            **self.result.as_json(),
            "gate": self.options.size,
            "kinds": {kind.value: finding.value for kind, finding in self.kinds.items()},
            "blocking": [kind.value for kind in self.options.kinds] or "all",
            "checks": [check.as_json() for check in self.checks],
            "tasks": self.tasks,
            "seeds": {"gate": self.options.seed},
            "sizes": dataclasses.asdict(self.sizes),
            "budget_s": self.options.budget_s,
            "seconds": self.seconds,
            "python": platform.python_version(),
            "sandbox": self.sandbox,
            "side_by_side": self.texts,
        }


class Gate:
    """One run of a gate. Checks are added by `run`; each is timed and may fail by itself.

    advance  called with (what is done now, share of the whole)
    """

    def __init__(
        self,
        options: GateOptions,
        sizes: Sizes,
        advance: Callable[[str, float], None] | None = None,
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.checks: list[CheckResult] = []
        self.texts: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self._report = advance or (lambda _label, _share: None)
        self._plan: list[tuple[str, Kind, Callable[[], Sequence[CheckResult]]]] = []

    def add(self, name: str, kind: Kind, run: Callable[[], Sequence[CheckResult]]) -> None:
        """Plan a check. name and kind stand for it when it cannot run."""
        self._plan.append((name, kind, run))

    def run(self) -> None:
        """Run what is planned, in order."""
        for number, (name, kind, run) in enumerate(self._plan):
            self._report(name, number / len(self._plan))
            begin = time.monotonic()
            budget = self.options.budget_s
            if budget is not None and begin - self.started > budget:
                reason = f"{name}: not run, the budget of {budget:g} s is spent"
                self.checks.append(CheckResult(name, name, kind, Finding.NOT_RUN, reason))
                continue
            try:
                found = run()
            except (EngineError, EndpointError, sandbox.SandboxError, ConfigError) as error:
                reason = f"{name}: could not run: {error}"
                found = [CheckResult(name, name, kind, Finding.NOT_RUN, reason)]
            took = (time.monotonic() - begin) / max(1, len(found))
            self.checks += [dataclasses.replace(check, seconds=took) for check in found]
        self._report("done", 1.0)


def pick_tasks(options: GateOptions, sizes: Sizes) -> list[Task]:
    """The tasks of a gate: those of the folder, or the built-in ones; a sample of each by the seed."""
    if options.tasks is None:
        return builtin_tasks(options.seed, sizes.task_items)
    return [task.sample(sizes.file_items, options.seed) for task in load_tasks(options.tasks)]


def answer_task(subject: Subject, task: Task) -> list[Answer]:
    """A subject's answers to all items of a task."""
    if task.form in choice.FORMS:
        return choice.answer(subject, task, _no_progress)
    return answers.answer(subject, task, _no_progress)


def _no_progress(_count: int) -> None:
    pass


def run_gate(
    candidate: Subject,
    baseline: Subject,
    corpora: Sequence[Corpus],
    options: GateOptions,
    *,
    context: int,
    stride: int,
    progress: Callable[[str, float], None] | None = None,
) -> GateReport:
    """All checks on two models. What one of them does not give is named as not run."""
    sizes = SIZES[options.size]
    if options.corpus_tokens is not None:
        sizes = dataclasses.replace(sizes, corpus_tokens=options.corpus_tokens)
    if options.budget_s is not None:
        sizes = sizes.scaled(min(1.0, options.budget_s / _BUDGETS_S[options.size]))
    gate = Gate(options, sizes, progress)
    encoded = encode_corpora(
        baseline, corpora, max_tokens=sizes.corpus_tokens, context=context, stride=stride
    )
    figures: dict[str, TokenFigures] = {}

    def read_corpora() -> list[CheckResult]:
        for corpus in encoded:
            figures[corpus.corpus.name] = score_tokens(baseline, candidate, corpus.windows)
        return perplexity.check(figures, options.seed) + divergence.check(figures, options.seed)

    long_ids = baseline.encode(corpora[0].text[: sizes.long_tokens * _CHARS_PER_TOKEN])
    gate.add("identity", Kind.MODEL, lambda: [identity.check(candidate, baseline)])
    gate.add("weights", Kind.MODEL, lambda: [_check_weights(candidate, baseline, long_ids)])
    gate.add("perplexity", Kind.MODEL, read_corpora)
    tasks = pick_tasks(options, sizes)
    room = min(candidate.max_tokens, baseline.max_tokens)
    passkeys = passkey.make_task(
        baseline, sizes.passkeys, min(sizes.passkey_tokens, room - 32), options.seed
    )
    add_tasks(gate, candidate, baseline, [*tasks, passkeys])
    gate.add(
        "perplexity by position",
        Kind.LONG_CONTEXT,
        lambda: [
            long_context.check(candidate, baseline, long_ids, sizes.long_tokens, options.seed)
        ],
    )
    add_texts(gate, candidate, baseline)
    gate.run()
    is_read = len(figures) == len(encoded)
    quality = quality_of(figures) if is_read else unmeasured([c.corpus.name for c in encoded])
    return finish(gate, [*tasks, passkeys], quality)


def _check_weights(candidate: Subject, baseline: Subject, text_ids: list[int]) -> CheckResult:
    if candidate.loaded is None or baseline.loaded is None:
        reason = "weights: not run, the files of a model behind a URL cannot be read"
        return CheckResult("weights", "weights", Kind.MODEL, Finding.NOT_RUN, reason)
    return weights.check(candidate.loaded, baseline.loaded, text_ids)


def add_texts(gate: Gate, candidate: Subject, baseline: Subject) -> None:
    """Plan the checks that generate texts: repetition, and prompts side by side."""
    sizes, seed = gate.sizes, gate.options.seed

    def repeat() -> list[CheckResult]:
        prompts = held_out_prompts(seed + 1, sizes.repetition_prompts)
        return [
            repetition.check(
                candidate, baseline, prompts, sizes.repetition_tokens, seed, _no_progress
            )
        ]

    def compare() -> list[CheckResult]:
        prompts = held_out_prompts(seed, sizes.side_by_side)
        check, gate.texts = side_by_side.compare(
            candidate, baseline, prompts, sizes.side_tokens, _no_progress
        )
        return [check]

    gate.add("repetition", Kind.MODEL, repeat)
    gate.add("side by side", Kind.MODEL, compare)


def add_tasks(gate: Gate, candidate: Subject, baseline: Subject, tasks: Sequence[Task]) -> None:
    """Plan one check for each task, at a level of significance that holds over all of them."""
    level = _SIGNIFICANCE / max(1, len(tasks))
    for task in tasks:

        def compare(task: Task = task) -> list[CheckResult]:
            if task.form is Form.CODE and not sandbox.is_isolated():
                return [_no_sandbox(task)]
            answers = [answer_task(subject, task) for subject in (baseline, candidate)]
            return [
                judge_answers(
                    task.form.value, task.name, task.kind, task.chance, *answers,
                    seed=gate.options.seed, level=level,
                )
            ]  # fmt: skip

        gate.add(task.name, task.kind, compare)


def _no_sandbox(task: Task) -> CheckResult:
    """Code is never run without isolation; the task has no say then."""
    found = sandbox.isolation()
    reason = f"{task.name}: code is not run: {sandbox.shortcoming(found)}"
    return CheckResult(
        task.form.value, task.name, task.kind, Finding.NO_SIGNAL, reason, {"sandbox": found}
    )


def finish(gate: Gate, tasks: Sequence[Task], quality: QualityReport) -> GateReport:
    """Judge what was found."""
    ruling = judge_checks(gate.checks, gate.options.kinds)
    metrics: dict[str, Any] = {
        "votes": ruling.num_votes,
        "kinds": {kind.value: finding.value for kind, finding in ruling.kinds.items()},
        "checks": {check.name: check.finding.value for check in gate.checks},
        "delta_ppl": {one.corpus: one.delta_ppl for one in quality.corpora},
        "mean_kl": quality.overall.mean_kl,
        "top1_agreement": quality.overall.top1_agreement,
        "tokens": quality.overall.tokens,
    }
    result = GateResult(ruling.verdict, ruling.reasons, "serve it", metrics)
    return GateReport(
        result=result,
        checks=gate.checks,
        kinds=ruling.kinds,
        quality=quality,
        tasks=[
            {
                "task": task.name,
                "kind": task.kind.value,
                "form": task.form.value,
                "items": len(task.items),
                "source": task.source,
                "sha256": task.sha256,
            }
            for task in tasks
        ],
        sizes=gate.sizes,
        options=gate.options,
        seconds=time.monotonic() - gate.started,
        texts=gate.texts,
        sandbox=sandbox.isolation() if any(task.form is Form.CODE for task in tasks) else None,
    )
