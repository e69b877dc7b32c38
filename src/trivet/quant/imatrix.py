"""An importance matrix of a model on calibration text, from the native forward.

Every sequence is run alone from position 0; taps add up the squares of each linear's input. The
sums are of the float32 inputs, before the activation rule of the format that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trivet.checkpoint.ggml.imatrix import Entry, ImportanceMatrix
from trivet.config import PAGE_TOKENS
from trivet.errors import ConfigError
from trivet.models.load import FAMILIES
from trivet.native import Arena, StepInput, load_model
from trivet.native.model import Sink
from trivet.quant.load import PackedModel
from trivet.quant.observe import POINTS

_CHUNK_ROWS = 256


def collect_imatrix(
    packed: PackedModel,
    sequences: Sequence[Sequence[int]],
    *,
    datasets: Sequence[str] = (),
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ImportanceMatrix:
    """Mean squares of the inputs of all layers' matrices, under their GGUF names.

    sequences  token ids, each at most the model's context
    datasets   names of the texts, kept in the matrix
    progress   called with (what, tokens done, tokens in all)
    The head and the embedding have no entry, as in llama.cpp's own matrices.
    Raises ConfigError: no tokens, or a sequence longer than the context.
    """
    spec = packed.spec
    longest = max(map(len, sequences), default=0)
    if not 0 < longest <= spec.max_positions:
        allowed = f"texts of 1 to {spec.max_positions} tokens"
        raise ConfigError("calibration text", f"{longest} tokens", allowed)
    runner = load_model(packed, threads)
    pages = -(-longest // PAGE_TOKENS)
    arena = Arena(runner.kv_geometry(), pages)
    table = np.arange(pages, dtype=np.int32)[None, :]
    taps = runner.new_taps()
    for layer in range(spec.num_layers):
        for point in POINTS:
            taps.add(f"layer.{layer}.{point}", Sink.SUM_SQUARES)
    total, done = sum(map(len, sequences)), 0
    no_rows = np.zeros(0, np.int32)
    for tokens in sequences:
        for begin in range(0, len(tokens), _CHUNK_ROWS):
            part = np.asarray(tokens[begin : begin + _CHUNK_ROWS], np.int32)
            segments = np.array([[0, len(part), begin, 0]], np.int32)
            runner.forward(StepInput(part, segments, table, no_rows), arena, taps)
            done += len(part)
            if progress is not None:
                progress("importance", done, total)
    names = next(family for family in FAMILIES if family.name == spec.family).gguf_names
    entries = {}
    for layer in range(spec.num_layers):
        for point, roles in POINTS.items():
            sums = taps.array(f"layer.{layer}.{point}", Sink.SUM_SQUARES).astype(np.float32)
            for role in roles:
                name = names[role].format(i=layer)
                entries[name] = Entry(sums[None], np.array([total], np.float32))
    return ImportanceMatrix(entries, tuple(datasets), len(sequences), longest)
