"""Run the checks of a gate on a candidate and its baseline, and keep what they found.

Sizes of the checks are fixed numbers of tokens and items, so that a gate run again gives the same
figures. A task whose items are too few to tell is looked at once more, with EXTENSION times the items.

A budget makes the checks smaller: the pace is measured on the first part of the corpora, and the
largest of a few sizes is taken that fits. Where the smallest does not fit, whole tasks are left out,
the longest first, and those of kinds that were asked for last. What is left when the time is up is
ended where it stands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
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
from trivet.evaluate.checks.judge import MIN_ITEMS, Answer, judge_answers
from trivet.evaluate.corpora import Corpus
from trivet.evaluate.gate import GateResult, judge_checks
from trivet.evaluate.quality import (
    EncodedCorpus,
    QualityReport,
    encode_corpora,
    quality_of,
    unmeasured,
)
from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict
from trivet.evaluate.scoring import CHUNK_ROWS, TokenFigures, score_tokens
from trivet.evaluate.subject import Subject
from trivet.evaluate.task import Form, Task, load_tasks

FORMAT_VERSION = 1
_CHARS_PER_TOKEN = 8  # text tokenized for each token wanted of the long text
_SIGNIFICANCE = 0.05  # of all tasks together
EXTENSION = 3  # times the items, at the second look at a task
_FACTORS = (1.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.1)  # of the sizes, under a budget
_MARGIN = 0.85  # of the time that is left is planned for
_CHARS_PER_ROW = 3.5  # rough, for estimates of time only
_CORPUS_COST = 1.4  # of a row whose whole vocabulary is compared, to a row of a task
_DRAWN_COST = 2.0  # of a generated token, to a row that is read


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much each check looks at.

    corpus_tokens   scored of each corpus      task_items  of each task, at the first look
    file_items      of each task of a folder   long_tokens  of the long text
    passkey_texts   of passkey_tokens each     texts        generated, of text_tokens each
    """

    corpus_tokens: int
    task_items: int
    file_items: int
    long_tokens: int
    passkey_texts: int
    passkey_tokens: int
    texts: int
    text_tokens: int

    def scaled(self, factor: float) -> Sizes:
        """All amounts of work times a factor, but no check so small that it can say nothing."""
        least = {
            "corpus_tokens": 256,
            "task_items": MIN_ITEMS,
            "file_items": MIN_ITEMS,
            "long_tokens": 512,
            "passkey_texts": -(-MIN_ITEMS // passkey.NUM_KEYS),
            "text_tokens": 16,
        }
        changed = {
            name: min(getattr(self, name), max(floor, round(getattr(self, name) * factor)))
            for name, floor in least.items()
        }
        return dataclasses.replace(self, **changed)


SIZES = {
    "fast": Sizes(1280, 24, 24, 1024, 6, 256, 20, 32),
    "full": Sizes(8192, 120, 200, 4096, 32, 1024, 20, 128),
}


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """What a gate is asked for.

    size    ``fast`` or ``full``
    tasks   folder of task files; None: the built-in tasks
    kinds   kinds of task that may block; empty: all
    budget_s  seconds for all of it, loading included; None: sizes as they are
    """

    size: str = "fast"
    tasks: Path | None = None
    kinds: tuple[Kind, ...] = ()
    budget_s: float | None = None
    seed: int = 0
    corpus_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "an integer >= 0")


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


class _OutOfTimeError(Exception):
    """The budget was spent while a check ran."""


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A check that is to be run.

    name, kind  stand for it when it cannot run
    rows     rough size, in rows that both models read; 0: not known
    extend   a second look, with more items; None: there is none
    is_optional  it may be left out for want of time
    """

    name: str
    kind: Kind
    run: Callable[[], Sequence[CheckResult]]
    rows: float = 0.0
    extend: Callable[[], Sequence[CheckResult]] | None = None
    is_optional: bool = False


class Gate:
    """One run of a gate. Checks are added by `add`; each is timed and may fail by itself.

    started  on `time.monotonic`, when the budget began; None: now
    advance  called with (what is done now, share of the whole)
    """

    def __init__(
        self,
        options: GateOptions,
        sizes: Sizes,
        advance: Callable[[str, float], None] | None = None,
        started: float | None = None,
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.checks: list[CheckResult] = []
        self.texts: list[dict[str, Any]] = []
        self.started = time.monotonic() if started is None else started
        self._report = advance or (lambda _label, _share: None)
        self._plan: list[_Planned] = []
        self._waiting: list[_Planned] = []  # the part of the plan that did not run yet
        self._pace: tuple[float, float] = (0.0, 0.0)  # rows read so far, and their seconds

    def add(
        self,
        name: str,
        kind: Kind,
        run: Callable[[], Sequence[CheckResult]],
        rows: float = 0.0,
        extend: Callable[[], Sequence[CheckResult]] | None = None,
        *,
        is_optional: bool = False,
    ) -> None:
        """Plan a check."""
        planned = _Planned(name, kind, run, rows, extend, is_optional)
        self._plan.append(planned)
        self._waiting.append(planned)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        budget = self.options.budget_s
        return math.inf if budget is None else self.started + budget - time.monotonic()

    def tick(self, _count: int = 0) -> None:
        """Called by checks while they run. Raises _OutOfTimeError: the budget is spent."""
        if self.left_s < 0:
            raise _OutOfTimeError

    def note_pace(self, rows: float, seconds: float) -> None:
        """Rows that both models read, and the time it took."""
        self._pace = (self._pace[0] + rows, self._pace[1] + seconds)

    def seconds_of(self, rows: float) -> float:
        """How long so many rows take at the pace so far; 0 before any were read."""
        read, seconds = self._pace
        return rows * seconds / read if read else 0.0

    def run(self) -> None:
        """Run what is planned and did not run, in order."""
        while self._waiting:
            self._leave_out()
            if self._waiting:
                planned = self._waiting.pop(0)
                self._report(planned.name, 1 - (len(self._waiting) + 1) / len(self._plan))
                self.checks += self._found(planned, planned.run)

    def _leave_out(self) -> None:
        """Drop what there is no time for: the longest first, kinds that were asked for last."""
        while math.isfinite(self.left_s):
            optional = [planned for planned in self._waiting if planned.is_optional]
            needed = self.seconds_of(sum(planned.rows for planned in self._waiting))
            if not optional or needed <= _MARGIN * self.left_s:
                return
            asked = self.options.kinds
            longest = max(optional, key=lambda planned: (planned.kind not in asked, planned.rows))
            self._waiting.remove(longest)
            self.checks.append(self._left_out(longest))

    def _left_out(self, planned: _Planned) -> CheckResult:
        finding = Finding.LEFT_OUT if planned.is_optional else Finding.NOT_RUN
        reason = (
            f"{planned.name}: {finding.value}, the budget of {self.options.budget_s:g} s is spent"
        )
        return CheckResult(planned.name, planned.name, planned.kind, finding, reason)

    def _found(
        self, planned: _Planned, run: Callable[[], Sequence[CheckResult]], rows: float = 0.0
    ) -> list[CheckResult]:
        rows = rows or planned.rows
        begin = time.monotonic()
        found: Sequence[CheckResult]
        try:
            self.tick()
            found = run()
        except _OutOfTimeError:
            found = [self._left_out(planned)]
        except (EngineError, EndpointError, sandbox.SandboxError, ConfigError) as error:
            reason = f"{planned.name}: could not run: {error}"
            found = [CheckResult(planned.name, planned.name, planned.kind, Finding.NOT_RUN, reason)]
        took = time.monotonic() - begin
        if rows:
            self.note_pace(rows, took)
        share = took / max(1, len(found))
        return [dataclasses.replace(check, seconds=check.seconds + share) for check in found]

    def look_again(self) -> None:
        """Second looks. None once the gate rejects: nothing could change that."""
        for planned in self._plan:
            places = [
                at
                for at, check in enumerate(self.checks)
                if check.name == planned.name and check.finding is Finding.UNDECIDED
            ]
            ruling = judge_checks(self.checks, self.options.kinds)
            rows = (EXTENSION - 1) * planned.rows
            fits = self.seconds_of(rows) <= _MARGIN * self.left_s
            if planned.extend is None or not places or not fits or ruling.verdict is Verdict.REJECT:
                continue
            self._report(f"{planned.name} again", 1.0)
            [found] = self._found(planned, planned.extend, rows)
            if found.finding is not Finding.LEFT_OUT:
                first = self.checks[places[0]]
                seconds = first.seconds + found.seconds
                self.checks[places[0]] = dataclasses.replace(found, seconds=seconds)
        self._report("done", 1.0)


def pick_tasks(
    options: GateOptions, sizes: Sizes, found: Sequence[Task] | None = None
) -> list[Task]:
    """The tasks of a gate: those of the folder, or the built-in ones; a sample of each by the seed.

    found  those of the folder, where it was read already
    Each has the items of both looks; the first look takes the first of them.
    """
    if options.tasks is None:
        return builtin_tasks(options.seed, EXTENSION * sizes.task_items)
    most = EXTENSION * sizes.file_items
    found = load_tasks(options.tasks) if found is None else found
    return [task.sample(most, options.seed) for task in found]


def answer_task(
    baseline: Subject, candidate: Subject, task: Task, advance: Callable[[int], None]
) -> tuple[list[Answer], list[Answer]]:
    """The answers of both models to all items of a task, the baseline's first."""
    if task.form in choice.FORMS:
        base, own = (choice.answer(subject, task, advance) for subject in (baseline, candidate))
        return base, own
    return answers.compare(baseline, candidate, task, advance)


def run_gate(
    candidate: Subject,
    baseline: Subject,
    corpora: Sequence[Corpus],
    options: GateOptions,
    *,
    context: int,
    stride: int,
    progress: Callable[[str, float], None] | None = None,
    started: float | None = None,
    found: Sequence[Task] | None = None,
) -> GateReport:
    """All checks on two models. What one of them does not give is named as not run.

    found    tasks of the options' folder, where it was read already
    started  on `time.monotonic`, when the budget began; None: now
    """
    sizes = SIZES[options.size]
    if options.corpus_tokens is not None:
        sizes = dataclasses.replace(sizes, corpus_tokens=options.corpus_tokens)
    gate = Gate(options, sizes, progress, started)

    def read(encoded: Sequence[EncodedCorpus]) -> dict[str, TokenFigures]:
        return {
            corpus.corpus.name: score_tokens(baseline, candidate, corpus.windows, gate.tick)
            for corpus in encoded
        }

    def encode(num_tokens: int) -> list[EncodedCorpus]:
        return encode_corpora(
            baseline, corpora, max_tokens=num_tokens, context=context, stride=stride
        )

    long_ids = baseline.encode(corpora[0].text[: sizes.long_tokens * _CHARS_PER_TOKEN])
    gate.add("identity", Kind.MODEL, lambda: [identity.check(candidate, baseline)])
    gate.add(
        "weights",
        Kind.MODEL,
        lambda: [_check_weights(candidate, baseline, long_ids, gate.tick)],
    )
    gate.run()
    tasks = pick_tasks(options, sizes, found)
    room = min(candidate.max_tokens, baseline.max_tokens)
    keys = EXTENSION * sizes.passkey_texts
    tokens = min(sizes.passkey_tokens, room - 32)
    tasks.append(passkey.make_task(baseline, keys, tokens, options.seed))
    if options.budget_s is not None:
        _fit_budget(gate, baseline, candidate, encode, tasks)
    sizes = gate.sizes
    encoded = encode(sizes.corpus_tokens)
    figures: dict[str, TokenFigures] = {}

    def read_corpora() -> list[CheckResult]:
        figures.update(read(encoded))
        return perplexity.check(figures, options.seed) + divergence.check(figures, options.seed)

    rows = _CORPUS_COST * sum(len(w.input_ids) for corpus in encoded for w in corpus.windows)
    gate.add("perplexity", Kind.MODEL, read_corpora, rows)
    add_texts(gate, candidate, baseline)
    add_position(gate, candidate, baseline, long_ids)
    add_tasks(gate, candidate, baseline, tasks)
    gate.run()
    gate.look_again()
    is_read = len(figures) == len(encoded)
    quality = quality_of(figures) if is_read else unmeasured([c.corpus.name for c in encoded])
    return finish(gate, tasks, quality)


def _fit_budget(
    gate: Gate,
    baseline: Subject,
    candidate: Subject,
    encode: Callable[[int], list[EncodedCorpus]],
    tasks: Sequence[Task],
) -> None:
    """Measure the pace, and take the largest sizes that the time left is enough for."""
    windows = [corpus.windows[0] for corpus in encode(CHUNK_ROWS)]
    score_tokens(baseline, candidate, windows[:1])  # maps the weights
    begin = time.monotonic()
    score_tokens(baseline, candidate, windows)
    rows: float = sum(len(window.input_ids) for window in windows)
    gate.note_pace(_CORPUS_COST * rows, time.monotonic() - begin)
    for factor in _FACTORS:
        sizes = gate.sizes.scaled(factor)
        rows = _CORPUS_COST * (len(windows) * sizes.corpus_tokens + sizes.long_tokens)
        rows += _text_rows(sizes)
        rows += sum(task_rows(task, items_of(gate.options, sizes, task)) for task in tasks)
        if gate.seconds_of(rows) <= _MARGIN * gate.left_s:
            break
    gate.sizes = sizes


def _text_rows(sizes: Sizes) -> float:
    return sizes.texts * (32 + _DRAWN_COST * sizes.text_tokens)


def items_of(options: GateOptions, sizes: Sizes, task: Task) -> int:
    """Items of the first look at a task."""
    if task.kind is Kind.LONG_CONTEXT and task.name == "passkey":
        wanted = sizes.passkey_texts * passkey.NUM_KEYS
    else:
        wanted = sizes.task_items if options.tasks is None else sizes.file_items
    return min(wanted, len(task.items))


def task_rows(task: Task, num_items: int) -> float:
    """Rough rows that each model reads for the first items of a task."""
    chars, before = 0.0, ""
    for item in task.items[:num_items]:
        for prompt in item.prompts:
            shared = itertools.takewhile(bool, map(operator.eq, before, prompt.text))
            chars += len(prompt.text) - sum(1 for _ in shared)
            before = prompt.text
            chars += sum(map(len, item.choices or [item.answer]))
    rows = chars / _CHARS_PER_ROW
    if task.form in answers.FORMS:
        rows += num_items * (_DRAWN_COST * task.max_tokens / 2 + 16)
    return rows


def _check_weights(
    candidate: Subject, baseline: Subject, text_ids: list[int], advance: Callable[[int], None]
) -> CheckResult:
    if candidate.loaded is None or baseline.loaded is None:
        reason = "weights: not run, the files of a model behind a URL cannot be read"
        return CheckResult("weights", "weights", Kind.MODEL, Finding.NOT_RUN, reason)
    return weights.check(candidate.loaded, baseline.loaded, text_ids, advance)


def add_position(
    gate: Gate, candidate: Subject, baseline: Subject, text_ids: Sequence[int]
) -> None:
    """Plan perplexity by position."""
    length, seed = gate.sizes.long_tokens, gate.options.seed
    gate.add(
        "perplexity by position",
        Kind.LONG_CONTEXT,
        lambda: [long_context.check(candidate, baseline, text_ids, length, seed, gate.tick)],
        _CORPUS_COST * length,
        is_optional=True,
    )


def add_texts(gate: Gate, candidate: Subject, baseline: Subject) -> None:
    """Plan what looks at generated texts: repetition, and prompts side by side."""
    sizes, seed = gate.sizes, gate.options.seed

    def compare() -> list[CheckResult]:
        prompts = held_out_prompts(seed, sizes.texts)
        base = baseline.generate(prompts, sizes.text_tokens, (), gate.tick)
        own = candidate.generate(prompts, sizes.text_tokens, (), gate.tick, base)
        check, gate.texts = side_by_side.compare(prompts, base, own, sizes.text_tokens)
        return [repetition.check(base, own, seed), check]

    gate.add("repetition", Kind.MODEL, compare, _text_rows(sizes))


def add_tasks(gate: Gate, candidate: Subject, baseline: Subject, tasks: Sequence[Task]) -> None:
    """Plan one check for each task, at a level of significance that holds over all of them."""
    options, level = gate.options, _SIGNIFICANCE / max(1, len(tasks))

    def plan(task: Task) -> None:
        num_first = items_of(options, gate.sizes, task)
        num_all = min(len(task.items), EXTENSION * num_first)
        known: list[Answer] = []
        own_known: list[Answer] = []

        def compare(end: int) -> list[CheckResult]:
            if task.form is Form.CODE and not sandbox.is_isolated():
                return [_no_sandbox(task)]
            part = dataclasses.replace(task, items=task.items[len(known) : end])
            for all_, new in zip(
                (known, own_known), answer_task(baseline, candidate, part, gate.tick), strict=True
            ):
                all_ += new
            asked = dataclasses.replace(task, items=task.items[:end])
            return [
                judge_answers(
                    task.form.value, task.name, task.kind, asked.chance, known, own_known,
                    seed=options.seed, level=level, groups=[item.group for item in asked.items],
                    is_last=end == num_all,
                )
            ]  # fmt: skip

        more = None
        if num_first < num_all:
            more = functools.partial(compare, num_all)
        gate.add(
            task.name,
            task.kind,
            functools.partial(compare, num_first),
            task_rows(task, num_first),
            more,
            is_optional=True,
        )

    for task in tasks:
        plan(task)


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
