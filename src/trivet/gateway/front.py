"""The gateway's side of a model: find or make its packed cache, take the tokenizer from it.

Packing happens here, before the workers are told to load, so that they only map what is there. A cache
that is there is only looked at: what packing needs (numpy and more) is not imported then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trivet.checkpoint.cache import CacheQuery
from trivet.checkpoint.header import PackedHeader
from trivet.config import ServerConfig
from trivet.errors import TrivetError
from trivet.gateway.log import say
from trivet.gateway.tokens import ModelFront

_PROGRESS_S = 2.0  # a line of progress at most this often; nothing for a job that ends sooner


class _Progress:
    """Lines on standard error while a model is packed for the first time; ends it when cancelled."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self._printed_at = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._is_cancelled():
            raise TrivetError(f"{what} was cancelled")
        now = time.monotonic()
        if now - self._printed_at >= _PROGRESS_S:
            self._printed_at = now
            say(f"{what}: {100 * done // max(1, total)} %")


def load_front(
    config: ServerConfig, on_packed: Callable[[], None], is_cancelled: Callable[[], bool]
) -> ModelFront:
    """The tokenizer of a model; ``on_packed`` is called as soon as workers can map its weights.

    Raises CheckpointError or ConfigError: the model cannot be used. TrivetError: it was being packed
    and ``is_cancelled`` became true.
    """
    model, weights = config.model.model, config.model.weights
    query = CacheQuery.of(model, weights)
    packed, _ = query.find(PackedHeader.open)
    if packed is None:
        from trivet.quant import load_packed

        packed = load_packed(model, weights, progress=_Progress(is_cancelled)).file
    on_packed()
    tokenizer = packed.tokenizer()
    special = dict(tokenizer.data.special_tokens)
    for name, token_id in (
        ("bos_token", tokenizer.bos_id),
        ("eos_token", next(iter(tokenizer.data.eos_ids), None)),
    ):
        if name not in special and token_id is not None:
            special[name] = tokenizer.id_to_token(token_id) or ""
    return ModelFront(tokenizer, special)
