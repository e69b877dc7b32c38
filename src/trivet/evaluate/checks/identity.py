"""Is it the same tokenizer, template and set of special tokens as the baseline's?

A wrong pre-tokenizer, a lost BOS or another chat template ruins answers while the weights are perfect.
Both models are asked for the token ids of the same texts and a rendered chat; any difference rejects.
"""

from __future__ import annotations

import hashlib
from typing import Any

from trivet.errors import RequestError
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.subject import LocalSubject

_TEXTS = (
    "",
    "Hello, world!",
    "  two spaces\n\n\tand a tab\r\n",
    "I'LL they've don't 1234567 3.14 0x1f",
    "na\u00efve caf\u00e9 \u00dcber \u4f60\u597d\u4e16\u754c \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600 \u00a0\u2028 end ",
    "def f(x):\n    return x ** 2  # squares\n",
    "a" * 40,
    "<|im_start|>user\n<s></s>",
)
_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"},
     {"role": "assistant", "content": "Because."}, {"role": "user", "content": "And?"}],
)  # fmt: skip


def describe(subject: LocalSubject) -> dict[str, Any]:
    """What a model makes of the probes; equal for equal tokenizers."""
    tokenizer = subject.model.tokenizer
    chats: list[str | None] = []
    for messages in _CHATS:
        try:
            chats.append(tokenizer.apply_chat_template(messages))
        except RequestError as error:
            chats.append(f"refused: {error}")
    return {
        "token ids of texts": [tokenizer.encode(text) for text in _TEXTS],
        "token ids without special tokens": [
            tokenizer.encode(text, add_special_tokens=False) for text in _TEXTS
        ],
        "rendered chats": chats,
        "end tokens": sorted(subject.model.runner.eos_ids),
        "context": subject.model.runner.max_positions,
    }


def check(candidate: LocalSubject, baseline: LocalSubject) -> CheckResult:
    """Compare all probes."""
    own, base = describe(candidate), describe(baseline)
    differ = [name for name in base if own[name] != base[name]]
    metrics = {
        "differ": differ,
        "sha256": hashlib.sha256(repr(own).encode()).hexdigest(),
        "baseline_sha256": hashlib.sha256(repr(base).encode()).hexdigest(),
    }
    if differ:
        reason = f"not as the baseline's: {', '.join(differ)}"
        return CheckResult("identity", "identity", Kind.MODEL, Finding.REJECT, reason, metrics)
    reason = "tokenizer, template and special tokens are the baseline's"
    return CheckResult("identity", "identity", Kind.MODEL, Finding.PASS, reason, metrics)
