"""Held-out prompts answered by both models, for a reader: where do the texts part?

No verdict: greedy texts of two equally good models part sooner or later. The share of identical texts
and the place of the first differing token are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.subject import Generated, Prompt


def compare(
    prompts: Sequence[Prompt], base: Sequence[Generated], own: Sequence[Generated], num_tokens: int
) -> tuple[CheckResult, list[dict[str, Any]]]:
    """A result without a vote, and one entry for each prompt, from texts of up to num_tokens."""
    texts = [pair(prompt, *both) for prompt, *both in zip(prompts, base, own, strict=True)]
    same = sum(text["identical"] for text in texts)
    firsts = [text["first_difference"] for text in texts if not text["identical"]]
    reason = f"{same} of {len(texts)} greedy texts of {num_tokens} tokens are identical"
    metrics = {
        "identical_share": same / len(texts),
        "mean_first_difference": sum(firsts) / len(firsts) if firsts else None,
        "prompts": len(texts),
        "tokens": num_tokens,
    }
    finding = Finding.NOT_APPLICABLE
    check = CheckResult("side_by_side", "side by side", Kind.MODEL, finding, reason, metrics)
    return check, texts


def pair(prompt: Prompt, base: Generated, own: Generated) -> dict[str, Any]:
    """Both texts of one prompt; ``first_difference`` counts tokens.

    ``common`` is the text both begin with, for showing where they part.
    """
    shorter = min(len(base.tokens), len(own.tokens))
    first = next((at for at in range(shorter) if base.tokens[at] != own.tokens[at]), shorter)
    identical = list(base.tokens) == list(own.tokens)
    shared = min(len(base.text), len(own.text))
    split = next((at for at in range(shared) if base.text[at] != own.text[at]), shared)
    return {
        "prompt": prompt.text,
        "is_chat": prompt.is_chat,
        "baseline": base.text,
        "candidate": own.text,
        "identical": identical,
        "first_difference": None if identical else first,
        "common": base.text[:split],
    }
