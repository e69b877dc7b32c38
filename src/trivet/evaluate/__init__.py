"""Quality: how far is a model from its baseline, and may it take the baseline's place?

corpora.py        texts to measure on
scoring.py        logits of a text, chunk by chunk, and sums over them
quality.py        perplexity, divergence, agreement per corpus
subject.py        a model as checks see it: scores of continuations, greedy texts
endpoint.py       the same of a model behind a URL
task.py           items with a right answer, from files; builtin_tasks.py makes some
checks/           the checks of the gate, one file each
statistics.py     paired tests and intervals
gate.py           the rules: one verdict of all findings
gating.py         run the checks of a gate
next_step.py      what to try after a gate; ledger.py keeps what was tried
sandbox.py        code that a model wrote, run without network, files or power; sql.py for SQL
run.py            all of it from a model's name
report.py         the files a gate leaves
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.evaluate.corpora import Corpus, builtin_corpora, load_corpora
    from trivet.evaluate.gate import GateResult, judge_checks, judge_corpora
    from trivet.evaluate.gating import GateOptions, GateReport
    from trivet.evaluate.ledger import default_ledger
    from trivet.evaluate.quality import (
        EncodedCorpus,
        Quality,
        QualityReport,
        encode_corpora,
        measure_quality,
    )
    from trivet.evaluate.report import write_gate
    from trivet.evaluate.results import CheckResult, Finding, Kind, Verdict
    from trivet.evaluate.run import Evaluation, evaluate_model, evaluate_sensitivity, new_scorer
    from trivet.evaluate.scoring import Scorer, Window, make_windows, score_windows
    from trivet.evaluate.task import Task, load_tasks, parse_kinds

__all__ = [
    "CheckResult",
    "Corpus",
    "EncodedCorpus",
    "Evaluation",
    "Finding",
    "GateOptions",
    "GateReport",
    "GateResult",
    "Kind",
    "Quality",
    "QualityReport",
    "Scorer",
    "Task",
    "Verdict",
    "Window",
    "builtin_corpora",
    "default_ledger",
    "encode_corpora",
    "evaluate_model",
    "evaluate_sensitivity",
    "judge_checks",
    "judge_corpora",
    "load_corpora",
    "load_tasks",
    "make_windows",
    "measure_quality",
    "new_scorer",
    "parse_kinds",
    "score_windows",
    "write_gate",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "corpora": ("Corpus", "builtin_corpora", "load_corpora"),
            "gate": ("GateResult", "judge_checks", "judge_corpora"),
            "gating": ("GateOptions", "GateReport"),
            "ledger": ("default_ledger",),
            "quality": (
                "EncodedCorpus",
                "Quality",
                "QualityReport",
                "encode_corpora",
                "measure_quality",
            ),
            "report": ("write_gate",),
            "results": ("CheckResult", "Finding", "Kind", "Verdict"),
            "run": ("Evaluation", "evaluate_model", "evaluate_sensitivity", "new_scorer"),
            "scoring": ("Scorer", "Window", "make_windows", "score_windows"),
            "task": ("Task", "load_tasks", "parse_kinds"),
        },
    )
