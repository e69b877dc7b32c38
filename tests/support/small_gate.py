"""A gate small enough for tests: few items, short texts, every check."""

from __future__ import annotations

from trivet.evaluate.gating import Sizes

SMALL = Sizes(
    corpus_tokens=100,
    task_items=3,
    file_items=3,
    long_tokens=300,
    passkey_texts=1,
    passkey_tokens=128,
    texts=4,
    text_tokens=8,
)
