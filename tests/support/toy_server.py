"""A toy model behind the real worker and gateway: hooks, tokenizer and settings for server tests.

The engine is the real one on a `ToyRunner`. The vocabulary covers all bytes, so that any text has
tokens and any run of tokens may split a character. The ``model`` setting carries the toy's options:
``toy:step_seconds=0.01,load_seconds=2,pages=64``.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from support.toy_runner import ToyArena, ToyRunner
from trivet.config import EngineConfig, ModelConfig, ServerConfig
from trivet.engine import Engine
from trivet.errors import CheckpointError, RequestError, TrivetError
from trivet.gateway import Hooks, LocalServer
from trivet.gateway.tokens import ModelFront
from trivet.worker.frames import WorkerConfig
from trivet.worker.load import ready_message
from trivet.worker.process import LoadedEngine

HOOKS = Hooks(engine="support.toy_server:load_engine", front="support.toy_server:load_front")
EOS, BOS, IM_START, IM_END = 0, 257, 258, 259
_WORDS = [
    " the",
    " of",
    "lo wo",
    "ing",
    "\N{ROCKET}",
    "END",
    "\n\n",
    " caf\N{LATIN SMALL LETTER E WITH ACUTE}",
]
FIRST_WORD = 260
VOCAB_SIZE = FIRST_WORD + len(_WORDS)
MAX_MODEL_LEN = 512


def toy_options(model: str) -> dict[str, str]:
    """``toy:a=1,b=2`` -> its options."""
    _, _, rest = model.partition(":")
    return dict(item.split("=", 1) for item in rest.split(",") if item)


class ToyDetokenizer:
    """Holds back incomplete characters; drops special tokens when asked."""

    def __init__(self, tokenizer: ToyTokenizer, skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip and token_id in ToyTokenizer.special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        self._decoder.reset()
        return ""


class ToyTokenizer:
    """Token b + 1 is byte b; then three special tokens and a few words."""

    special: Mapping[int, str] = {
        EOS: "<eos>",
        BOS: "<bos>",
        IM_START: "<|im_start|>",
        IM_END: "<|im_end|>",
    }
    vocab_size = VOCAB_SIZE
    eos_ids = frozenset({EOS})
    bos_id = None
    chat_template = "toy"
    max_token_chars = 200
    longest_encoded = 250_000  # a longer text should have been refused before

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= self.longest_encoded
        ids = []
        for byte in text.encode():
            ids.append(byte + 1)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special:
            return self.special[token_id].encode()
        if token_id >= FIRST_WORD:
            return _WORDS[token_id - FIRST_WORD].encode()
        return bytes([token_id - 1])

    def detokenizer(
        self, skip_special_tokens: bool = True, continuing: bool = True
    ) -> ToyDetokenizer:
        return ToyDetokenizer(self, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if messages[0]["content"] == "refuse":
            raise RequestError("messages: the template refuses them", "messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + ("assistant:" if add_generation_prompt else "")


def load_front(
    config: ServerConfig, on_packed: Callable[[], None], is_cancelled: Callable[[], bool]
) -> ModelFront:
    end = time.monotonic() + float(toy_options(config.model.model).get("pack_seconds", 0))
    while time.monotonic() < end:
        if is_cancelled():
            raise TrivetError("packing was cancelled")
        time.sleep(0.01)
    on_packed()
    return ModelFront(ToyTokenizer(), {"eos_token": "<eos>", "bos_token": "<bos>"})


def load_engine(config: WorkerConfig) -> LoadedEngine:
    options = toy_options(config.model)
    time.sleep(float(options.get("load_seconds", 0)))
    if "fail" in options:
        raise CheckpointError("toy.safetensors", "is made to fail")
    if "crash" in options:
        os._exit(9)
    runner = ToyRunner(VOCAB_SIZE, 4096, step_seconds=float(options.get("step_seconds", 0)))
    num_pages = int(options.get("pages", 256))
    engine_config = EngineConfig(
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        num_pages=num_pages,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
    )
    engine = Engine(runner, ToyArena(num_pages), engine_config)
    ready = ready_message(
        engine,
        numerics_id=runner.numerics_id,
        weights="toy",
        kv="bf16",
        vocab_size=VOCAB_SIZE,
        page_bytes=4096,
        threads=1,
    )
    return LoadedEngine(engine, ready)


def toy_config(model: str = "toy", **settings: Any) -> ServerConfig:
    """Settings of a toy server on a free port."""
    settings.setdefault("served_model_name", "toy")
    settings.setdefault("port", 0)
    return ServerConfig(model=ModelConfig(model=model), **settings)


@contextlib.contextmanager
def toy_server(model: str = "toy", **settings: Any) -> Iterator[LocalServer]:
    """A running toy server in this process, its worker beside it."""
    with LocalServer(toy_config(model, **settings), HOOKS) as server:
        yield server
