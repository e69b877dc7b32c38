"""Is it the same tokenizer, template and set of special tokens as the baseline's?

A wrong pre-tokenizer, a lost BOS or another chat template ruins answers while the weights are perfect.
Both models are asked for the token ids of the same texts and rendered chats; any difference rejects.
The texts are short ones that tell pre-tokenizers apart, and pages of prose and code, in which a
vocabulary or merges that were cut show.
"""

from __future__ import annotations

import hashlib
from typing import Any

from trivet.evaluate.corpora import builtin_corpora
from trivet.evaluate.results import CheckResult, Finding, Kind
from trivet.evaluate.subject import Subject

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


_PAGE_CHARS, _PAGES = 4000, 12  # of each of the built-in corpora, spread over it


def _pages() -> list[str]:
    pages = []
    for corpus in builtin_corpora():
        step = max(1, len(corpus.text) // _PAGES)
        starts = range(0, len(corpus.text), step)[:_PAGES]
        pages += [corpus.text[start : start + _PAGE_CHARS] for start in starts]
    return pages


def describe(subject: Subject) -> dict[str, Any]:
    """What a model makes of the probes; equal for equal tokenizers. None: it does not say."""
    chats = [subject.encode_chat(messages) for messages in _CHATS]
    return {
        "token ids of texts": [subject.encode(text) for text in (*_TEXTS, *_pages())],
        "token ids without special tokens": [
            subject.encode(text, add_special_tokens=False) for text in _TEXTS
        ],
        "token ids of chats": chats,
        "end tokens": subject.end_tokens,
        "context": subject.context,
    }


def check(candidate: Subject, baseline: Subject) -> CheckResult:
    """Compare all probes."""
    own, base = describe(candidate), describe(baseline)
    unknown = [name for name in base if own[name] is None or base[name] is None]
    differ = [name for name in base if name not in unknown and own[name] != base[name]]
    metrics = {
        "differ": differ,
        "not_compared": unknown,
        "sha256": hashlib.sha256(repr(own).encode()).hexdigest(),
        "baseline_sha256": hashlib.sha256(repr(base).encode()).hexdigest(),
    }
    if differ:
        reason = f"not as the baseline's: {', '.join(differ)}"
        return CheckResult("identity", "identity", Kind.MODEL, Finding.REJECT, reason, metrics)
    reason = "tokenizer, template and special tokens are the baseline's"
    if unknown:
        reason += f"; not known of a model behind a URL: {', '.join(unknown)}"
    return CheckResult("identity", "identity", Kind.MODEL, Finding.PASS, reason, metrics)
