"""What the gateway needs of a tokenizer, and how token ids are written in answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from trivet.text import Detokenizer


class Tokenizer(Protocol):
    """The part of `trivet.checkpoint.Tokenizer` that is used here."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def max_token_chars(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def detokenizer(
        self, skip_special_tokens: bool = True, continuing: bool = True
    ) -> Detokenizer: ...
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str: ...


@dataclasses.dataclass(frozen=True)
class ModelFront:
    """What the gateway knows of the model: its tokenizer and the names of special tokens."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)


class TokenNames:
    r"""Names of tokens in log-probability objects, each made once.

    A token that is no complete text is written as OpenAI does: ``bytes:\xf0\x9f``. So tokens of
    different bytes never share a name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """The name of a token."""
        name = self._names.get(token_id)
        if name is None:
            data = self._tokenizer.token_bytes(token_id)
            try:
                name = data.decode("utf-8")
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token_id] = name
        return name

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of a token, as the chat API lists them."""
        return list(self._tokenizer.token_bytes(token_id))


class CountingDetokenizer:
    """A detokenizer that knows how many characters it has given so far."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        text = self._inner.push(token_id)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        text = self._inner.finish()
        self.num_chars += len(text)
        return text
