"""Quality: how far is a model from its baseline, and may it take the baseline's place?

corpora.py  texts to measure on
scoring.py  logits of a text, chunk by chunk, and sums over them
quality.py  perplexity, divergence, agreement per corpus
gate.py     the verdict
run.py      all of it from a model's name
"""

from __future__ import annotations

from trivet.evaluate.corpora import Corpus, builtin_corpora, load_corpora
from trivet.evaluate.gate import GateResult, Verdict, judge_corpora
from trivet.evaluate.quality import (
    EncodedCorpus,
    Quality,
    QualityReport,
    encode_corpora,
    measure_quality,
)
from trivet.evaluate.run import Evaluation, evaluate_model, new_scorer
from trivet.evaluate.scoring import Scorer, Window, make_windows, score_windows

__all__ = [
    "Corpus",
    "EncodedCorpus",
    "Evaluation",
    "GateResult",
    "Quality",
    "QualityReport",
    "Scorer",
    "Verdict",
    "Window",
    "builtin_corpora",
    "encode_corpora",
    "evaluate_model",
    "judge_corpora",
    "load_corpora",
    "make_windows",
    "measure_quality",
    "new_scorer",
    "score_windows",
]
