"""Build the engine of a model: packed weights, runner, KV pages, drafter."""

from __future__ import annotations

import os

from trivet.engine import Engine
from trivet.worker.frames import Ready


def ready_message(
    engine: Engine,
    *,
    numerics_id: str,
    weights: str,
    kv: str,
    vocab_size: int,
    threads: int,
    isa: str = "",
    notes: tuple[str, ...] = (),
) -> Ready:
    """What the gateway is told about a loaded engine."""
    config = engine.config
    chunk = config.max_prefill_chunk or config.max_model_len
    if config.max_prefill_chunk is not None:
        chunk = min(chunk, config.max_step_tokens)
    return Ready(
        pid=os.getpid(),
        numerics_id=numerics_id,
        weights=weights,
        kv=kv,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        num_pages=config.num_pages,
        page_tokens=32,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_chunk=chunk,
        threads=threads,
        isa=isa,
        notes=list(notes),
    )
