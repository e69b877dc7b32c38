"""Calibration: rendered as served, nothing repeated, nothing padded, a part never calibrated on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_models import build_folder
from trivet.checkpoint import Tokenizer, resolve_model
from trivet.errors import CheckpointError, ConfigError
from trivet.models import open_model
from trivet.quant.calibrate import (
    HELD_OUT_TOKENS,
    CalibrationConfig,
    build_calibration,
    read_traffic,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = build_folder(tmp_path_factory.mktemp("calibrate") / "model", "llama3")
    return Tokenizer(open_model(resolve_model(folder)).tokenizer_data())


def write_lines(path: Path, entries: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries), "utf-8")
    return path


def chats(count: int) -> list[object]:
    return [
        {"messages": [{"role": "user", "content": f"question {i}: " + "word " * (4 + 3 * i)}]}
        for i in range(count)
    ]


def test_chats_are_rendered_exactly_as_served(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    answered = [*messages, {"role": "assistant", "content": "good day"}]
    path = write_lines(
        tmp_path / "traffic.jsonl",
        [{"messages": messages}, {"messages": answered}, {"turns": ["hello there", "more"]},
         {"prompt": "plain words"}, {"text": "plain words too"}],
    )  # fmt: skip
    first, second, turns, prompt, text = read_traffic(path, tokenizer)
    served = tokenizer.apply_chat_template(messages)
    assert list(first.ids) == tokenizer.encode(served, add_special_tokens=False)
    assert turns.ids == first.ids
    whole = tokenizer.apply_chat_template(answered, add_generation_prompt=False)
    assert list(second.ids) == tokenizer.encode(whole, add_special_tokens=False)
    assert list(prompt.ids) == tokenizer.encode("plain words")  # BOS where serving adds it
    assert list(text.ids) == tokenizer.encode("plain words too")


def test_repeats_count_once_and_held_out_windows_are_other_documents(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "traffic.jsonl", chats(24) * 2)
    found = build_calibration(tokenizer, path, samples=8, window=64)
    assert found.report["repeats_dropped"] >= 24
    train = {tuple(w) for w in found.train}
    assert found.held_out
    assert not train & {tuple(w) for w in found.held_out}
    assert sum(found.report["train"]["tokens_by_domain"].values()) == found.num_tokens


def test_no_more_is_held_out_than_an_error_needs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = ["tree", "river", "stone", "cloud", "seven", "green", "walks", "never"]
    rng = np.random.default_rng(3)
    path = tmp_path / "many.jsonl"
    texts = [" ".join(rng.choice(words, 300)) for _ in range(400)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    found = build_calibration(tokenizer, path, samples=512, window=128, general_share=0)
    assert found.num_tokens > 8 * HELD_OUT_TOKENS
    tokens = sum(map(len, found.held_out))
    assert 0.9 * HELD_OUT_TOKENS < tokens <= 1.1 * HELD_OUT_TOKENS


def test_long_documents_are_cut_and_none_is_dropped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a long text without end and with many words in it. " * 400, "utf-8")
    found = build_calibration(tokenizer, path, samples=8, window=32, general_share=0.0)
    assert found.report["documents"]["traffic"] == 1
    assert all(len(w) <= 32 for w in found.train)
    assert found.num_tokens == pytest.approx(8 * 32, rel=0.3)


def test_a_share_of_general_text_and_code_is_mixed_in(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "traffic.jsonl", chats(60))
    found = build_calibration(tokenizer, path, samples=16, window=64, general_share=0.5)
    tokens = found.report["train"]["tokens_by_domain"]
    total = sum(tokens.values())
    assert tokens["prose"] / total == pytest.approx(0.25, abs=0.1)
    assert tokens["code"] / total == pytest.approx(0.25, abs=0.1)
    assert 0 < found.report["unlike_general"]["token_divergence"] < 0.7


def test_every_range_of_length_is_drawn_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "traffic.jsonl", chats(80))
    found = build_calibration(tokenizer, path, samples=12, window=128, general_share=0.0)
    shortest, _, middle, _, longest = found.report["train"]["length_quartiles"]
    assert shortest < longest
    assert middle < longest or shortest < middle


def test_the_same_seed_draws_the_same(tokenizer: Tokenizer) -> None:
    first = build_calibration(tokenizer, samples=4, window=64, seed=3)
    assert build_calibration(tokenizer, samples=4, window=64, seed=3).sha256 == first.sha256
    assert build_calibration(tokenizer, samples=4, window=64, seed=4).sha256 != first.sha256


def test_texts_that_give_too_little_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "Just one short prompt."}) + "\n")
    [few, swamped] = build_calibration(tokenizer, path, samples=4, window=64).warnings
    assert "of the 256 asked for" in few
    assert "75% were asked for" in swamped
    alone = build_calibration(tokenizer, path, samples=4, window=64, general_share=0)
    assert len(alone.warnings) == 1
    assert build_calibration(tokenizer, samples=4, window=64).warnings == []


def test_the_general_mix_is_not_what_the_gate_reads() -> None:
    from trivet.evaluate import corpora
    from trivet.quant import calibrate

    assert not set(calibrate.CODE_MODULES) & set(corpora._CODE_MODULES)
    prose, _ = corpora.builtin_corpora()
    judged = prose.text[: 8 * corpora_tokens()]
    assert all(text() not in judged for text in calibrate._prose())


def corpora_tokens() -> int:
    """Tokens that an evaluation reads of a corpus by default."""
    from trivet.evaluate.quality import MAX_TOKENS

    return MAX_TOKENS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ('{"question": 1}', "keys .'question'"),
        ('{"messages": "hello"}', "no list of objects"),
        ('{"turns": 5}', "turns is no list"),
        ("[1, 2]", "no object"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Tokenizer, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "a good line"}\n' + line, "utf-8")
    with pytest.raises(CheckpointError, match=f"jsonl:2.*{message}"):
        list(read_traffic(path, tokenizer))


def test_a_separator_within_a_text_ends_no_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85"}\r\n{"prompt": "three"}\n', "utf-8")
    assert len(list(read_traffic(path, tokenizer))) == 2


@pytest.mark.parametrize(
    "setting",
    [
        {"samples": 0},
        {"samples": (1 << 20) + 1},
        {"window": 1},
        {"window": 1 << 20},
        {"general_share": 1.5},
        {"general_share": float("nan")},
        {"seed": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named_when_they_are_made(
    tokenizer: Tokenizer, setting: dict[str, Any]
) -> None:
    [name] = setting
    with pytest.raises(ConfigError, match=name):
        CalibrationConfig(**setting)
    with pytest.raises(ConfigError, match=name):
        build_calibration(tokenizer, **setting)


def test_unusable_traffic_is_found_before_all_of_it_becomes_tokens(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(tokenizer: Tokenizer, *lines: str) -> list[str]:
        path = tmp_path / "traffic.jsonl"
        path.write_text("\n".join(lines), "utf-8")
        asked: list[str] = []
        encode = tokenizer.encode

        def noted(text: str, add_special_tokens: bool = True) -> list[int]:
            asked.append(text)
            return encode(text, add_special_tokens)

        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", noted)
            CalibrationConfig(path).check(tokenizer)
        return asked

    short, long = '{"prompt": "a"}', json.dumps({"prompt": "word " * 9000})
    chat = '{"messages": [{"role": "user", "content": "how many words are in this chat?"}]}'
    CalibrationConfig().check(tokenizer)
    assert [len(text) for text in check(tokenizer, short, long, long, chat)] == [1, 4096]
    with pytest.raises(CheckpointError, match="jsonl:3: is not valid JSON"):
        check(tokenizer, long, long, "{")
    with pytest.raises(ConfigError, match="texts of 8 tokens"):
        check(tokenizer, short, short)
    bare = Tokenizer(dataclasses.replace(tokenizer.data, chat_template=None))
    with pytest.raises(CheckpointError, match="jsonl:2: messages: the model has no chat template"):
        check(bare, long, chat)


def test_settings_out_of_range_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held_out_share"):
        build_calibration(tokenizer, held_out_share=0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        build_calibration(tokenizer, tmp_path / "missing.jsonl")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(CheckpointError, match="holds no text"):
        build_calibration(tokenizer, empty)
