"""Prompts for speed measurements: distinct pieces of natural text, or a file of prompts.

Random tokens would distort speculation, and repeated prompts the prefix cache; the built-in corpora
give distinct text of any length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trivet import files
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate.corpora import builtin_corpora

_MAX_FILE_BYTES = 256 << 20


class ChatEncoder(Protocol):
    """What is needed of `trivet.checkpoint.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str: ...


class NaturalText:
    """Token ids of the built-in corpora, to cut prompts from. Prose and code take turns."""

    def __init__(self, tokenizer: ChatEncoder) -> None:
        self._streams = [
            tokenizer.encode(corpus.text[:600_000], add_special_tokens=False)
            for corpus in builtin_corpora()
        ]

    def prompts(self, count: int, num_tokens: int, *, salt: int = 0) -> list[list[int]]:
        """``count`` distinct prompts of exactly ``num_tokens`` ids.

        Their beginnings are spread over the texts; another ``salt`` gives other beginnings.
        """
        if num_tokens < 1:
            raise ConfigError("prompt_tokens", num_tokens, "an integer >= 1")
        prompts: list[list[int]] = []
        for index in range(count):
            stream = self._streams[index % len(self._streams)]
            if num_tokens > len(stream):
                stream = stream * (num_tokens // len(stream) + 1)
            room = len(stream) - num_tokens + 1
            # An odd multiplier near the golden ratio spreads the beginnings evenly.
            start = (
                (index // len(self._streams) + salt * 7919) * max(1, int(room * 0.618034)) % room
            )
            prompts.append(stream[start : start + num_tokens])
        return prompts


def read_prompts(path: str | Path, tokenizer: ChatEncoder) -> list[list[int]]:
    """Prompts of a JSONL file: each line has ``prompt``, ``messages`` or ``turns`` (its first turn).

    ``prompt`` is raw text; the other two go through the chat template.
    Raises CheckpointError naming the line.
    """
    path = Path(path)
    lines = files.read_text(path, _MAX_FILE_BYTES).split("\n")  # U+2028 is no line end in JSONL
    prompts = [
        _parse_line(path, number, line, tokenizer)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise CheckpointError(path, "holds no prompt")
    return prompts


def _parse_line(path: Path, number: int, line: str, tokenizer: ChatEncoder) -> list[int]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        raise CheckpointError(path, f"line {number} is not JSON") from None
    if not isinstance(item, dict):
        raise CheckpointError(path, f"line {number} is not a JSON object")
    if isinstance(item.get("prompt"), str):
        ids = tokenizer.encode(item["prompt"])
    else:
        messages = item.get("messages")
        if messages is None and isinstance(item.get("turns"), list) and item["turns"]:
            first = item["turns"][0]
            messages = [first if isinstance(first, dict) else {"role": "user", "content": first}]
        if not _are_messages(messages):
            raise CheckpointError(
                path, f"line {number} has none of prompt (text), messages, turns (lists)"
            )
        assert isinstance(messages, list)
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    if not ids:
        raise CheckpointError(path, f"line {number} has an empty prompt")
    return ids


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in value)
    )
