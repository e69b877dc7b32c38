"""A `trivet.loader.LoadedModel` around the toy runner, with a toy tokenizer: no weights, no core."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from support.toy_runner import ToyArena, ToyRunner
from trivet.config import ModelConfig
from trivet.engine import StepLoad
from trivet.engine.step_time import MeasuredStep, StepTime, fit
from trivet.errors import RequestError
from trivet.loader import LoadedModel, Progress

_ALPHABET = "\0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:!?()\n-+"
assert len(_ALPHABET) == 64


class ToyDetokenizer:
    """One character per token; token 0 (EOS) has none."""

    def push(self, token_id: int) -> str:
        return _ALPHABET[token_id].strip("\0")

    def finish(self) -> str:
        return ""


class ToyTokenizer:
    """Characters of a 64-letter alphabet; all others are spaces. ``bos`` is put first when set."""

    def __init__(self, bos: int | None = None) -> None:
        self._bos = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [max(1, _ALPHABET.find(letter)) for letter in text]
        return [self._bos, *ids] if add_special_tokens and self._bos is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(ToyDetokenizer().push, ids))

    def detokenizer(self) -> ToyDetokenizer:
        return ToyDetokenizer()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        if not messages:
            raise RequestError("messages: at least one is needed", "messages")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text + ("assistant:" if add_generation_prompt else "")


@dataclasses.dataclass(frozen=True)
class ToyModel(LoadedModel):
    """A loaded model without native parts."""

    def new_arena(self, num_pages: int) -> Any:
        return ToyArena(num_pages)

    def step_time(self, arena: Any) -> StepTime:
        loads = [StepLoad(n, 1, n, n, n) for n in range(1, 9)]
        return fit([MeasuredStep(load, 1.0) for load in loads], "toy")


def make_toy_model(
    config: ModelConfig | None = None, *, bos: int | None = None, seed: int = 0
) -> ToyModel:
    """A toy model as if loaded with ``config``."""
    config = config or ModelConfig(model="toy")
    weights = "w4a8-g32" if config.weights == "auto" else config.weights
    spec = SimpleNamespace(
        hidden_size=1, vocab_size=64, num_parameters=100, to_json=lambda: {"family": "toy"}
    )
    packed = SimpleNamespace(
        weights_form=weights,
        weight_bytes=1000,
        spec=spec,
        tensors={},
        report=[SimpleNamespace(exact=True)],
        path=Path("toy.trivet"),
        notes=(),
        tokenizer=lambda: ToyTokenizer(bos),
    )
    return ToyModel(
        config=config,
        packed=cast(Any, packed),
        runner=cast(Any, ToyRunner(64, seed=seed)),
        threads=1,
    )


def load_toy_model(config: ModelConfig, progress: Progress | None = None) -> LoadedModel:
    """In the place of `trivet.loader.load_model`: quantized forms are slightly other models."""
    return make_toy_model(config, seed=0 if config.weights == "bf16" else 1)
