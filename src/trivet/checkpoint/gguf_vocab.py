"""A tokenizer rebuilt from the metadata of a GGUF file.

GGUF stores tokens, merges or scores, and a *name* for the rules that split text before BPE. A wrong
guess gives valid but wrong ids and ruins a model quietly, so an unknown name is an error. Names and
patterns follow llama.cpp's ``llama-vocab.cpp`` and the tokenizer.json of the models themselves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trivet.checkpoint.tokenizer import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    Tokenizer,
    TokenizerData,
    byte_alphabet,
)
from trivet.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Split:
    """Rules of one pre-tokenizer: patterns in order, and what llama.cpp and the models add."""

    patterns: tuple[str, ...]
    normalize: bool = False  # NFC before splitting
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # when the file does not say


_SPLIT_GPT2 = _Split((_GPT2,))
_SPLIT_DIGITS = _Split((r"\p{N}", _GPT2))
_SPLIT_LLAMA3 = _Split((_WORDS % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
_SPLIT_QWEN2 = _Split((_WORDS % r"\p{N}",), normalize=True)
_SPLIT_DEFAULT = _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _SPLIT_GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SPLIT_DIGITS
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _SPLIT_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _SPLIT_QWEN2),
    "default": _SPLIT_DEFAULT,
}

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
_SPACE = "\u2581"


def _strings(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(path, f"metadata key {key} is missing or not a list of strings")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, path: Path) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, np.ndarray) or value.shape != (count,):
        raise CheckpointError(path, f"metadata key {key} is missing or not {count} numbers")
    numbers: list[Any] = value.tolist()
    return numbers


def _token_id(metadata: Mapping[str, Any], name: str, count: int, path: Path) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise CheckpointError(path, f"metadata key {key} is {value!r:.40}, not one of {count} ids")
    return value


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> TokenizerData:
    """Rebuild the tokenizer. Raises CheckpointError: keys missing, wrong, or of an unknown kind."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    vocab = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocab) != len(tokens):
        raise CheckpointError(
            path, "metadata key tokenizer.ggml.tokens is empty or repeats a token"
        )
    if "tokenizer.ggml.token_type" in metadata:
        types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), path)
    else:
        types = [1] * len(tokens)
    bos_id = _token_id(metadata, "bos", len(tokens), path)
    eos_id = _token_id(metadata, "eos", len(tokens), path)
    if model == "gpt2":
        content, add_bos = _byte_level(metadata, vocab, path)
        style, strip_leading = BYTE_LEVEL, False
    elif model == "llama":
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        content, add_bos = _sentencepiece(metadata, vocab, types, prefix, path), True
        style, strip_leading = SENTENCEPIECE, prefix
    else:
        raise CheckpointError(
            path, f"tokenizer.ggml.model is {model!r:.40}, which is not supported; supported:"
            " gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        )  # fmt: skip
    content["added_tokens"] = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind != _USER_DEFINED,
        }
        for i, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[i]
    ]  # fmt: skip
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos) is True and bos_id is not None
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False) is True and eos_id is not None
    content["post_processor"] = _post_processor(
        tokens, bos_id if add_bos else None, eos_id if add_eos else None
    )
    ends = [eos_id, _token_id(metadata, "eot", len(tokens), path)]
    ends += [vocab[t] for t in _TURN_ENDS if t in vocab and types[vocab[t]] == _CONTROL]
    template = metadata.get("tokenizer.chat_template")
    special = {"bos_token": bos_id, "eos_token": eos_id}
    special["unk_token"] = _token_id(metadata, "unknown", len(tokens), path)
    special["pad_token"] = _token_id(metadata, "padding", len(tokens), path)
    data = TokenizerData(
        json=json.dumps(content, ensure_ascii=False),
        style=style,
        strip_leading=strip_leading,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(e for e in ends if e is not None)),
        special_tokens={name: tokens[i] for name, i in special.items() if i is not None},
        chat_template=template if isinstance(template, str) else None,
    )
    Tokenizer(data, path)  # refuses what the library cannot build
    return data


def _base(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, **model,
        },
    }  # fmt: skip


def _byte_level(
    metadata: Mapping[str, Any], vocab: dict[str, int], path: Path
) -> tuple[dict[str, Any], bool]:
    """tokenizer.json content of byte-level BPE, and whether BOS is added by default."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise CheckpointError(
            path,
            f"tokenizer.ggml.pre is {name!r:.40}, which is not supported;"
            f" supported: {', '.join(sorted(_SPLITS))}",
        )
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", path):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(path, f"merge {merge!r:.60} does not join two known tokens")
        merges.append((left, right))
    content = _base({"vocab": vocab, "merges": merges, "ignore_merges": split.ignore_merges})
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in split.patterns
    ]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, byte_level]}
    content["decoder"] = byte_level
    content["normalizer"] = {"type": "NFC"} if split.normalize else None
    missing = [c for c in byte_alphabet() if c not in vocab]
    if len(missing) > 128:
        raise CheckpointError(path, f"tokenizer.ggml.tokens lacks {len(missing)} of the 256 bytes")
    return content, split.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    types: Sequence[int],
    prefix: bool,
    path: Path,
) -> dict[str, Any]:
    """tokenizer.json content of SentencePiece BPE: scores become ranked merges."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocab), path)
    ranked = []
    for token, i in vocab.items():
        if types[i] != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], i, vocab[left], left, right))
    ranked.sort(key=lambda m: m[:3])
    unknown = _token_id(metadata, "unknown", len(vocab), path)
    names = list(vocab)
    content = _base(
        {
            "vocab": vocab,
            "merges": [(left, right) for *_, left, right in ranked],
            "unk_token": names[unknown] if unknown is not None else None,
            "fuse_unk": True,
            "byte_fallback": True,
        }
    )
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, replace]}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ],
    }
    return content


def _post_processor(
    tokens: Sequence[str], bos_id: int | None, eos_id: int | None
) -> dict[str, Any] | None:
    def special(token_id: int, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[token_id], "type_id": type_id}}

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        before = [special(bos_id, type_id)] if bos_id is not None else []
        after = [special(eos_id, type_id)] if eos_id is not None else []
        return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]

    used = [i for i in (bos_id, eos_id) if i is not None]
    if not used:
        return None
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in used
        },
    }
