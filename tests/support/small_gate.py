"""A gate small enough for tests: few items, short texts, every check."""

from __future__ import annotations

from trivet.evaluate.gating import Sizes

SMALL = Sizes(
    corpus_tokens=100,
    task_items=3,
    file_items=3,
    long_tokens=300,
    passkeys=2,
    passkey_tokens=128,
    side_by_side=4,
    side_tokens=8,
    repetition_prompts=4,
    repetition_tokens=8,
)
