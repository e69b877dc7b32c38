"""A number hidden in a long text is asked for again, at depths from the beginning to the end.

The filler is made from a seed, so that no two lines are the same and the number is found by reading,
not by counting. The answer is scored, not generated: right when every digit is the most likely token,
and its probability is the expected accuracy.

Source: the passkey task of Mohtashami and Jaggi 2023 (Landmark Attention), with our own filler.
"""

from __future__ import annotations

import random

from trivet.evaluate.results import Kind
from trivet.evaluate.subject import Prompt, Subject
from trivet.evaluate.task import Form, Item, Task

_PLACES = ("garden", "kitchen", "station", "library", "harbour", "market", "forest", "office")
_THINGS = ("box", "lamp", "chair", "bottle", "clock", "ladder", "basket", "mirror", "kettle")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")


def make_task(subject: Subject, num_prompts: int, num_tokens: int, seed: int) -> Task:
    """Prompts of about ``num_tokens`` tokens; the number stands at evenly spread depths."""
    rng = random.Random(f"{seed} passkey")
    line_tokens = max(1, len(subject.encode(_line(rng) * 8)) // 8)
    num_lines = max(2, (num_tokens - 60) // line_tokens)
    items = []
    for number in range(num_prompts):
        key = f"{rng.randrange(10_000, 100_000)}"
        lines = [_line(rng) for _ in range(num_lines)]
        depth = number / max(1, num_prompts - 1)
        lines.insert(round(depth * num_lines), f"The pass key is {key}. Remember it.\n")
        text = f"Remember the pass key.\n{''.join(lines)}What is the pass key?\nThe pass key is"
        items.append(Item((Prompt(text),), answer=f" {key}", data={"depth": depth}))
    return Task(
        "passkey", Kind.LONG_CONTEXT, Form.EXACT, tuple(items), "made by trivet.evaluate.checks.passkey"
    )  # fmt: skip


def _line(rng: random.Random) -> str:
    pick = rng.choice
    return f"The {pick(_COLOURS)} {pick(_THINGS)} stands in the {pick(_PLACES)}.\n"
