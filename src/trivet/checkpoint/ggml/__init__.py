"""ggml's block types: values to bytes and back, bit for bit what llama.cpp reads.

`decode` and `encode` work on rows; one file per family of types (`legacy`, `kquants`), the named
mixes in `mixes`, importance matrices in `imatrix`. Knows neither files nor model families.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.ggml import kquants, legacy
from trivet.checkpoint.ggml.blocks import FLOAT_TYPES, TYPES, BlockType
from trivet.checkpoint.source import bf16_to_float, float_to_bf16
from trivet.errors import QuantError

_Float32 = NDArray[np.float32]
_Bytes = NDArray[np.uint8]

__all__ = ["FLOAT_TYPES", "TYPES", "BlockType", "decode", "encode"]

_RUN_VALUES = 1 << 17  # values worked on at once: bounded memory, and numpy calls worth their cost


def decode(kind: str, raw: _Bytes) -> _Float32:
    """Values float32 [N, K] of rows of blocks uint8 [N, bytes of a row], bit for bit ggml's."""
    form = TYPES[kind]
    rows = len(raw)
    if kind in FLOAT_TYPES:
        return _float_values(kind, raw)
    blocks = raw.reshape(-1, form.num_bytes)
    family = legacy if form.values == legacy.GROUP else kquants
    values = np.empty((len(blocks), form.values), np.float32)
    for begin, end in _runs(len(blocks), form.values):
        values[begin:end] = family.decode(kind, blocks[begin:end])
    return values.reshape(rows, -1)


def encode(kind: str, x: _Float32, importance: _Float32 | None = None) -> _Bytes:
    """Rows of blocks uint8 [N, bytes of a row] of values float32 [N, K].

    K           a multiple of the type's block
    importance  float32 [K], mean squares of the inputs that meet each column, all finite and >= 0;
                None: the values alone decide. Q8_0 and the float types do not use it
    Raises QuantError: a value is NaN, infinite or too large for the type.
    """
    form = TYPES[kind]
    rows, columns = x.shape
    assert columns % form.values == 0, (kind, columns)
    if not np.isfinite(x).all():
        raise QuantError("holds NaN or infinite values")
    if kind in FLOAT_TYPES:
        return _float_bytes(kind, x)
    family = legacy if form.values == legacy.GROUP else kquants
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, form.values)
    limit = np.float32(65504 if kind != "Q8_0" else 65504 * 127)
    if blocks.size and np.abs(blocks).max() > limit:
        raise QuantError(f"a value is too large for {kind}")
    weights = None if importance is None else _block_weights(family, x, importance, form.values)
    raw = np.empty((len(blocks), form.num_bytes), np.uint8)
    for begin, end in _runs(len(blocks), form.values):
        run = None if weights is None else weights(begin, end)
        raw[begin:end] = family.encode(kind, blocks[begin:end], run)
    return raw.reshape(rows, -1)


def _runs(num_blocks: int, values: int) -> list[tuple[int, int]]:
    step = _RUN_VALUES // values
    return [(at, min(at + step, num_blocks)) for at in range(0, num_blocks, step)]


def _block_weights(family: Any, x: _Float32, importance: _Float32, values: int) -> Any:
    """A function of a run of blocks [begin, end) that gives the weights of its values.

    The 32-value types also weigh a value by its own size and its row's, as ggml does; k-quants do so
    themselves. A column that was never active still counts a little, so that no block is without
    weight.
    """
    columns = x.shape[1]
    assert importance.shape == (columns,), (importance.shape, columns)
    floor = float(importance.mean(dtype=np.float64)) * 1e-6
    floored = np.maximum(importance, np.float32(floor if floor > 0 else 1.0)).astype(np.float32)
    per_row = columns // values
    by_block = floored.reshape(per_row, values)
    sizes = np.einsum("ij,ij->i", x, x) / np.float32(columns) if family is legacy else None
    blocks = x.reshape(-1, values)

    def weights(begin: int, end: int) -> _Float32:
        index = np.arange(begin, end)
        run: _Float32 = by_block[index % per_row]
        if sizes is not None:
            size = sizes[index // per_row][:, None].astype(np.float32)
            run = run * np.sqrt(size + blocks[begin:end] ** 2)
        return run

    return weights


def _float_values(kind: str, raw: _Bytes) -> _Float32:
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    return bf16_to_float(raw.view("<u2"))


def _float_bytes(kind: str, x: _Float32) -> _Bytes:
    x = np.ascontiguousarray(x, np.float32)
    if kind == "F32":
        return x.view(np.uint8)
    with np.errstate(over="ignore"):
        half: Any = x.astype("<f2") if kind == "F16" else float_to_bf16(x).astype("<u2")
    infinite = np.isinf(half) if kind == "F16" else (half & 0x7F80) == 0x7F80
    if infinite.any():
        raise QuantError(f"a value is too large for {kind}")
    raw: _Bytes = half.view(np.uint8)
    return raw
