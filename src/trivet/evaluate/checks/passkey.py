"""Numbers hidden in a long text are asked for again, at depths from the beginning to the end.

The filler is made from a seed, so that no two lines are the same and a number is found by reading, not
by counting. Each text holds NUM_KEYS numbers under names; all are asked for, so that a text is read
once and gives as many items, and the other numbers are what a weak model confuses. The answer is
scored, not generated: right when every digit is the most likely token, and its probability is the
expected accuracy.

Source: the passkey task of Mohtashami and Jaggi 2023 (Landmark Attention) and the multi-key form of
Hsieh et al. 2024 (RULER), with our own filler.
"""

from __future__ import annotations

import random

from trivet.evaluate.results import Kind
from trivet.evaluate.subject import Prompt, Subject
from trivet.evaluate.task import Form, Item, Task

NUM_KEYS = 4
_OWNERS = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
_PLACES = ("garden", "kitchen", "station", "library", "harbour", "market", "forest", "office")
_THINGS = ("box", "lamp", "chair", "bottle", "clock", "ladder", "basket", "mirror", "kettle")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")


def make_task(subject: Subject, num_texts: int, num_tokens: int, seed: int) -> Task:
    """Texts of about ``num_tokens`` tokens; over all of them the depths are evenly spread."""
    rng = random.Random(f"{seed} passkey")
    line_tokens = max(1, len(subject.encode(_line(rng) * 8)) // 8)
    num_lines = max(2 * NUM_KEYS, num_tokens // line_tokens - 2 * NUM_KEYS)
    items = []
    for number in range(num_texts):
        owners = rng.sample(_OWNERS, NUM_KEYS)
        keys = {owner: f"{rng.randrange(10_000, 100_000)}" for owner in owners}
        lines = [_line(rng) for _ in range(num_lines)]
        depths = {
            owner: (place + (number + 0.5) / num_texts) / NUM_KEYS
            for place, owner in enumerate(owners)
        }
        for owner in reversed(owners):
            lines.insert(round(depths[owner] * num_lines), _fact(owner, keys[owner]))
        text = f"Remember the pass keys.\n{''.join(lines)}"
        items += [
            Item(
                (Prompt(f"{text}What is the pass key of {owner}?\nThe pass key of {owner} is"),),
                answer=f" {keys[owner]}",
                data={"depth": depths[owner]},
                group=number,
            )
            for owner in owners
        ]
    return Task(
        "passkey", Kind.LONG_CONTEXT, Form.EXACT, tuple(items), "made by trivet.evaluate.checks.passkey"
    )  # fmt: skip


def _fact(owner: str, key: str) -> str:
    return f"The pass key of {owner} is {key}. Remember it.\n"


def _line(rng: random.Random) -> str:
    pick = rng.choice
    return f"The {pick(_COLOURS)} {pick(_THINGS)} stands in the {pick(_PLACES)}.\n"
