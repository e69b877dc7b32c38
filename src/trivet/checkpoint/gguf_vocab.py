"""Tokenizers to and from the metadata of a GGUF file.

GGUF stores tokens, merges or scores, and a *name* for the rules that split text before BPE. A wrong
guess gives valid but wrong ids and ruins a model quietly, so an unknown name is an error, and on
writing a name counts only when the tokenizer rebuilt from it gives the same ids on many texts.
Names and patterns follow llama.cpp's ``llama-vocab.cpp`` and the tokenizer.json of the models
themselves.
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
    is_byte_token,
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

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
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
    ends = [eos_id, *(_token_id(metadata, name, len(tokens), path) for name in ("eot", "eom"))]
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


# --- writing -------------------------------------------------------------------------------------

# One name per set of rules, the commonest model's.
_WRITTEN = ("gpt-2", "smollm", "llama-bpe", "qwen2", "default")
PROBES = (
    "Hello, world!",
    "  two  spaces\n\nand lines\t\t",
    "1234567890 3.14 x2 4th \u0661\u0662\u0663",
    "caf\u00e9 cafe\u0301 \xfcber stra\xdfe \u0130I",
    "we'll WE'LL They've I'M it's 'quoted' d'accord",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 :-) \u20ac5 \xbd",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0645\u0631\u062d\u0628\u0627"
    " \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947"
    " \u05e9\u05dc\u05d5\u05dd",
    "def f(x):\n    return x ** 2  # square\n\n\tif a!=b: c+=1;\r\n",
    'http://a.b/c?d=e&f#g <tag attr="1">',
    "in 1999, $1,000.50 (approx.) -- 50% off!!! ...",
    " leading",
    "trailing ",
    "\n",
    " ",
    "a",
    "_x__y_ CamelCase",
)


def tokenizer_metadata(
    data: TokenizerData, vocab_size: int, path: Path
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The ``tokenizer.*`` keys that llama.cpp reads, and what they cannot say, for a report.

    vocab_size  rows of the embedding; ids without a token are filled up
    path        named in messages
    Raises CheckpointError: not BPE, more tokens than rows, or rules of splitting that no name known
    here gives.
    """
    content = json.loads(data.json)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(
            path, f"the tokenizer's model is {kind!r:.40}; GGUF export writes BPE"
        )
    tokens, types = _tokens_of(content, vocab_size, path)
    common: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
    }
    special, notes = _special_ids(data, tokens, types)
    tokenizer = Tokenizer(data, path)
    with_special = tokenizer.encode("a")
    bare = tokenizer.encode("a", add_special_tokens=False)
    added = len(with_special) - len(bare)
    first = added > 0 and with_special[0] == data.bos_id
    last = added > int(first) and with_special[-1] in data.eos_ids
    special["tokenizer.ggml.add_bos_token"] = first
    special["tokenizer.ggml.add_eos_token"] = last
    if data.chat_template is not None:
        special["tokenizer.chat_template"] = data.chat_template
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", [])]
    tried = []
    if data.style == BYTE_LEVEL:
        for name in _ordered_splits(content):
            head = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
            tried.append(head | common | {"tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges]})
    else:
        ranks = {
            token: -float(i) for i, token in reversed(list(enumerate(a + b for a, b in merges)))
        }
        scores = np.array([ranks.get(token, 0.0) for token in tokens], np.float32)
        head = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        prefix = {"tokenizer.ggml.add_space_prefix": data.strip_leading}
        tried.append(head | common | {"tokenizer.ggml.scores": scores} | prefix)
    texts = [*PROBES, *(f"a {tokens[i]} b" for i, kind in enumerate(types) if kind == _CONTROL)][
        :64
    ]
    expected = [(tokenizer.encode(t), tokenizer.encode(t, False)) for t in texts]
    for metadata in tried:
        metadata |= special
        rebuilt = tokenizer_from_gguf(metadata, path)
        other = Tokenizer(rebuilt, path)
        if [(other.encode(t), other.encode(t, False)) for t in texts] == expected:
            lost = sorted(set(data.eos_ids) - set(rebuilt.eos_ids))
            if lost:
                notes.append(f"end-of-text ids {lost} have no key in GGUF")
            return metadata, tuple(notes)
    raise CheckpointError(
        path,
        "splits text by rules that no GGUF name known here gives;"
        f" tried: {', '.join(m['tokenizer.ggml.pre'] for m in tried)}",
    )


def _tokens_of(
    content: Mapping[str, Any], vocab_size: int, path: Path
) -> tuple[list[str], list[int]]:
    """Tokens by id and their types; ids without a token are called ``[PADn]``."""
    vocab: dict[str, int] = content["model"]["vocab"]
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [_UNUSED] * vocab_size
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    ids = vocab | {name: token["id"] for name, token in added.items()}
    largest = max(ids.values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            path, f"the tokenizer has the id {largest}, but vocab_size is {vocab_size}"
        )
    unknown = content["model"].get("unk_token")
    has_bytes = bool(content["model"].get("byte_fallback"))
    for token, i in ids.items():
        kind = _NORMAL
        if token in added:
            kind = _CONTROL if added[token].get("special") else _USER_DEFINED
        if has_bytes and token == unknown:
            kind = _UNKNOWN
        elif has_bytes and is_byte_token(token):
            kind = _BYTE
        tokens[i], types[i] = token, kind
    return tokens, types


def _special_ids(
    data: TokenizerData, tokens: Sequence[str], types: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """Keys of the special ids. The first end is the tokenizer's own; a turn's end comes second."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: dict[str, Any] = {}
    if data.bos_id is not None:
        found["bos"] = data.bos_id
    ends = list(data.eos_ids)
    own = ids.get(data.special_tokens.get("eos_token", ""))
    ends.sort(key=lambda i: (i != own, tokens[i] not in _TURN_ENDS))
    found |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    for key, name in (("unknown", "unk_token"), ("padding", "pad_token")):
        spelled = data.special_tokens.get(name)
        if spelled is not None and spelled in ids:
            found[key] = ids[spelled]
    notes = []
    kept = set(ends[:3])
    for i, token in enumerate(tokens):
        if token in _TURN_ENDS and types[i] == _CONTROL and i not in data.eos_ids and i not in kept:
            notes.append(f"readers of GGUF also end a text at {token}")
    return {f"tokenizer.ggml.{key}_token_id": i for key, i in found.items()}, notes


def _ordered_splits(content: Mapping[str, Any]) -> list[str]:
    """Names to try, first those whose patterns tokenizer.json spells."""
    step = content.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    patterns: list[str] = []
    for part in steps:
        if part.get("type") == "Split":
            patterns += [p for p in part.get("pattern", {}).values() if isinstance(p, str)]
        elif part.get("type") == "Digits" and part.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif part.get("type") == "ByteLevel" and part.get("use_regex", True):
            patterns.append(_GPT2)
    return sorted(_WRITTEN, key=lambda name: _SPLITS[name].patterns != tuple(patterns))
