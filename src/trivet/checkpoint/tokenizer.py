"""Text to token ids and back, over the tokenizers library, for byte-level and SentencePiece BPE.

`TokenizerData` is what a checkpoint yields and the packed cache stores; `Tokenizer` is built from it
when text is first needed. Decoding goes through bytes, so that a stream can hold back characters
whose last bytes are not there yet.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from trivet.errors import CheckpointError, RequestError

BYTE_LEVEL, SENTENCEPIECE = "byte_level", "sentencepiece"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_LONG_CHARS = 16_384  # a text that other threads should not wait for
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclasses.dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as data.

    json            the tokenizers library's JSON
    style           ``byte_level`` or ``sentencepiece``: how token text maps to bytes
    strip_leading   decoding from the start drops one leading space (SentencePiece's prefix)
    special_tokens  ``bos_token`` and so on, for chat templates
    """

    json: str = dataclasses.field(repr=False)
    style: str
    strip_leading: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = dataclasses.field(default=None, repr=False)

    def settings(self) -> dict[str, Any]:
        """Everything but ``json``, as plain JSON values."""
        fields = dataclasses.asdict(self)
        del fields["json"]
        return fields

    @classmethod
    def from_settings(cls, json: str, settings: Mapping[str, Any]) -> TokenizerData:
        """Inverse of `settings`. Raises TypeError on unknown or missing keys."""
        fields = dict(settings)
        fields["eos_ids"] = tuple(fields["eos_ids"])
        return cls(json=json, **fields)


def quick_json(text: str) -> str:
    """The same tokenizer in the form that the tokenizers library reads fastest.

    Merges of BPE are written ``"a b"`` instead of ``["a", "b"]``, which takes a third less time to
    read; where a token holds a space, which only the longer form can say, nothing is changed.
    """
    content = json.loads(text)
    model = content["model"]
    merges = model.get("merges")
    if model.get("type") != "BPE" or not all(
        isinstance(merge, list) and not any(" " in token for token in merge) for merge in merges
    ):
        return text
    model["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes for bytes. Source: GPT-2's encoder."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def is_byte_token(token: str) -> bool:
    """Whether a token is SentencePiece's spelling of one byte, ``<0x0A>``."""
    return _BYTE_TOKEN.match(token) is not None


class Tokenizer:
    """Encodes and decodes. Raises CheckpointError when the library refuses the data."""

    def __init__(self, data: TokenizerData, path: str | Path = "tokenizer.json") -> None:
        self.data = data
        try:
            self._backend = tokenizers.Tokenizer.from_str(data.json)
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(path, f"the tokenizer cannot be built: {reason}") from None
        self._backend.no_padding()
        self._backend.no_truncation()
        self._added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in self._added.items() if token.special
        )
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self._bytes: dict[int, bytes] = {}

    @property
    def bos_id(self) -> int | None:
        """The id put first when special tokens are added, where the model has one."""
        return self.data.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return frozenset(self.data.eos_ids)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source, or None when the model has no chat template."""
        return self.data.chat_template

    def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text; special tokens written in the text become their ids.

        Raises RequestError naming ``param`` when the text holds a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param}: the text holds a lone surrogate at character {error.start}", param
            ) from None
        if len(text) < _LONG_CHARS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # the library lets other threads run in this call only
            [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @functools.cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of a text than this."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids from the start of a text; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skipped)
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.data.strip_leading and text.startswith(" ") else text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None when there is no such id."""
        if not 0 <= token_id < 1 << 32:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        try:
            token_id: int | None = self._backend.token_to_id(token)
        except UnicodeEncodeError:  # a lone surrogate, which no vocabulary holds
            return None
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for ids outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self.data.style == BYTE_LEVEL:
            alphabet = byte_alphabet()
            if all(c in alphabet for c in token):
                return bytes(alphabet[c] for c in token)
            return token.encode()
        match = _BYTE_TOKEN.match(token)
        return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text of a chat.

        ``extra`` are further template variables. The text already holds the special tokens it needs:
        encode it with ``add_special_tokens=False``. Raises RequestError: no template, or it fails.
        """
        if self.chat_template is None:
            raise RequestError("messages: the model has no chat template", "messages")
        from trivet.checkpoint.template import render_chat  # jinja2 is slow to import

        return render_chat(
            self.chat_template, messages, add_generation_prompt, self.data.special_tokens, extra
        )

    def detokenizer(self, skip_special_tokens: bool = True, continuing: bool = True) -> Detokenizer:
        """A new stream decoder. ``continuing``: other text stands before, so no space is dropped."""
        return Detokenizer(self, skip_special_tokens, continuing)


class Detokenizer:
    """Turns a stream of ids into text; pieces join to the decoded whole, less an incomplete end."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, continuing: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.data.strip_leading and not continuing

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if self._strip and text:
            self._strip = False
            return text[1:] if text.startswith(" ") else text
        return text

    def finish(self) -> str:
        """End the stream: the bytes of an incomplete last character are dropped."""
        self._decoder.reset()
        return ""


def _style_of(decoder: Any, path: Path) -> tuple[str, bool]:
    """(style, strip_leading) from the ``decoder`` part of a tokenizer.json."""
    if not isinstance(decoder, dict):
        raise CheckpointError(path, "has no decoder")
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list):
        raise CheckpointError(path, f"decoders is {steps!r:.60}; expected a list")
    steps = [s for s in steps if isinstance(s, dict)]
    kinds = [s.get("type") for s in steps]
    if "ByteLevel" in kinds:
        return BYTE_LEVEL, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(s.get("type") == "Strip" and s.get("start") for s in steps)
        prefix = any(
            s.get("type") == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps
        )
        return SENTENCEPIECE, strips or prefix
    raise CheckpointError(
        path,
        f"has the decoder {kinds}, which is not supported; supported: byte-level and byte-fallback",
    )


def _spelling(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and 0 <= v < 1 << 32]


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja first, then tokenizer_config.json (a string or a list of named ones)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(file, f"cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def tokenizer_from_folder(folder: Path, config: Mapping[str, Any]) -> TokenizerData:
    """The tokenizer of a Hugging Face folder. config: its config.json. Raises CheckpointError."""
    from trivet.checkpoint.huggingface import read_json_object

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(path, "is missing (only tokenizer.json is read)")
    content = read_json_object(path)
    style, strip_leading = _style_of(content.get("decoder"), path)
    sides: dict[str, dict[str, Any]] = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        side = folder / name
        sides[name] = read_json_object(side) if side.is_file() else {}
    settings, generation = sides["tokenizer_config.json"], sides["generation_config.json"]
    special = {n: s for n in _SPECIAL_NAMES if (s := _spelling(settings.get(n))) is not None}
    template = _template_of(folder, settings)
    for name, text in {**special, "chat_template": template or ""}.items():
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise CheckpointError(folder / "tokenizer_config.json", f"{name} has a lone surrogate")
    data = TokenizerData(
        json=path.read_text("utf-8"),
        style=style,
        strip_leading=strip_leading,
        special_tokens=special,
        chat_template=template,
    )
    tokenizer = Tokenizer(data, path)
    bos_ids = _ids(config.get("bos_token_id"))
    eos_ids = _ids(config.get("eos_token_id")) + _ids(generation.get("eos_token_id"))
    if (
        "eos_token" in special
        and (found := tokenizer.token_to_id(special["eos_token"])) is not None
    ):
        eos_ids.append(found)
    if (
        "bos_token" in special
        and (found := tokenizer.token_to_id(special["bos_token"])) is not None
    ):
        bos_ids.insert(0, found)
    return dataclasses.replace(
        data, bos_id=bos_ids[0] if bos_ids else None, eos_ids=tuple(dict.fromkeys(eos_ids))
    )
