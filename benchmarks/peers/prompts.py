"""Prompts: windows of natural text as token ids of the demo model's tokenizer."""

from __future__ import annotations

import functools

VOCAB = {"demo": None, "reference-b": None, "shape-1b": 32000}


@functools.cache
def _ids(vocab_size: int | None) -> list[int]:
    from trivet.evaluate.corpora import builtin_corpora
    from trivet.quant import load_packed

    tokenizer = load_packed("demo", "auto").tokenizer()
    ids = tokenizer.encode(builtin_corpora()[0].text, add_special_tokens=False)
    # shape-1b has the first tokens of this vocabulary; weights are random, so a hole does no harm.
    return [i for i in ids if vocab_size is None or i < vocab_size]


def text_ids(text: str) -> list[int]:
    """A text as the demo model's token ids."""
    from trivet.quant import load_packed

    tokenizer = load_packed("demo", "auto").tokenizer()
    return tokenizer.encode(text, add_special_tokens=False)


def windows(model: str, count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` windows of the standard library's documentation, none beginning like another."""
    ids = _ids(VOCAB[model])
    starts = [(seed * 131 + i * 997) % (len(ids) - length) for i in range(count)]
    return [ids[s : s + length] for s in starts]
