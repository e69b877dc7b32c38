"""Prompts are distinct, of the asked length, and read from files line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.toy_model import ToyTokenizer
from trivet.bench.prompts import NaturalText, read_prompts
from trivet.errors import CheckpointError, ConfigError


def test_natural_prompts_are_distinct_and_exact() -> None:
    text = NaturalText(ToyTokenizer())
    prompts = text.prompts(64, 128)
    assert {len(prompt) for prompt in prompts} == {128}
    assert len({tuple(prompt) for prompt in prompts}) == 64
    assert prompts == text.prompts(64, 128)
    assert prompts[0] != text.prompts(1, 128, salt=1)[0]


def test_a_prompt_may_be_longer_than_the_texts() -> None:
    [prompt] = NaturalText(ToyTokenizer()).prompts(1, 700_000)
    assert len(prompt) == 700_000
    with pytest.raises(ConfigError, match="prompt_tokens"):
        NaturalText(ToyTokenizer()).prompts(1, 0)


def test_the_three_kinds_of_lines(tmp_path: Path) -> None:
    tokenizer = ToyTokenizer()
    lines = [
        {"prompt": "abc"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"turns": ["hi", "more"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    raw, messages, turns = read_prompts(path, tokenizer)
    assert raw == tokenizer.encode("abc")
    assert messages == turns == tokenizer.encode("user: hi\nassistant:")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no prompt"),
        ("{", "line 1 is not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2 is not a JSON object"),
        ('{"text": "a"}', "none of prompt"),
        ('{"prompt": ""}', "empty prompt"),
        ('{"messages": []}', "none of prompt"),
        ('{"messages": [{"role": "user"}]}', "none of prompt"),
        ("[" * 100_000, "line 1 is not JSON"),
        (f'{{"prompt": {"9" * 5000}}}', "line 1 is not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        read_prompts(path, ToyTokenizer())


def test_a_separator_within_a_prompt_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', "utf-8")
    tokenizer = ToyTokenizer()
    assert read_prompts(path, tokenizer) == [tokenizer.encode("a\u2028b"), tokenizer.encode("c")]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl", ToyTokenizer())
