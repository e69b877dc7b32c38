"""The block types of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Without importance the encoders give the bytes of ggml's reference (and of the gguf package); with
it they search the scale of each block. Source: ggml-quants.c. Differs: with importance, codes are
chosen for the scale as stored, in half precision, and the scale is fitted to the codes once more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.ggml.search import Steps, inverse, scale_and_minimum, symmetric_scale

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GROUP = 32
_HALF_CODES = {"Q4_0": 8, "Q5_0": 16}  # codes -half..half-1
_MAX_CODES = {"Q4_1": 15, "Q5_1": 31}
_STEPS = Steps(-0.9, 0.05, 36)


def halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 [n] at a byte of every block [n, bytes]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def as_bytes(scales: Float32) -> Bytes:
    """float16 bytes [n, 2] of scales [n]."""
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)


def split_codes(kind: str, blocks: Bytes) -> NDArray[np.uint8] | NDArray[np.int8]:
    """The codes [n, 32] of blocks as stored: unsigned, or int8 for Q8_0."""
    if kind == "Q8_0":
        return np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    packed = blocks[:, -16:]
    codes = np.empty((len(blocks), GROUP), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :16])
    np.right_shift(packed, 4, out=codes[:, 16:])
    if kind in ("Q5_0", "Q5_1"):
        high = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
        codes |= high << 4
    return codes


def _joined(kind: str, head: list[Bytes], codes: Bytes) -> Bytes:
    """Blocks of scales and codes [n, 32]."""
    low = codes & 15
    parts = [*head]
    if kind in ("Q5_0", "Q5_1"):
        parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    return np.concatenate([*parts, low[:, :16] | low[:, 16:] << 4], axis=1)


def decode(kind: str, blocks: Bytes) -> Float32:
    """Values float32 [n, 32] of blocks uint8 [n, bytes]."""
    codes = split_codes(kind, blocks)
    scale = halves(blocks, 0).astype(np.float32)[:, None]
    if kind == "Q8_0":
        return codes.astype(np.float32) * scale
    if kind in _HALF_CODES:
        return scale * (codes.astype(np.int8) - np.int8(_HALF_CODES[kind])).astype(np.float32)
    minimum = halves(blocks, 2).astype(np.float32)[:, None]
    return scale * codes.astype(np.float32) + minimum


def encode(kind: str, x: Float32, weights: Float32 | None = None) -> Bytes:
    """Blocks uint8 [n, bytes] of finite values float32 [n, 32].

    weights  float32 [n, 32] importance of each value's error, or None; Q8_0 does not use it
    """
    if kind == "Q8_0":
        return _encode_q8(x)
    if weights is not None:
        search = _search_symmetric if kind in _HALF_CODES else _search_minimum
        return search(kind, x, weights)
    if kind in _HALF_CODES:
        half = _HALF_CODES[kind]
        place = np.abs(x).argmax(axis=1)
        scale = np.take_along_axis(x, place[:, None], axis=1) / np.float32(-half)
        codes = np.trunc(x * inverse(scale) + np.float32(half + 0.5))
        top = np.float32(2 * half - 1)
        return _joined(kind, [as_bytes(scale)], np.minimum(codes, top).astype(np.uint8))
    top = np.float32(_MAX_CODES[kind])
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / top
    codes = np.trunc((x - low) * inverse(scale) + np.float32(0.5))
    return _joined(kind, [as_bytes(scale), as_bytes(low)], np.minimum(codes, top).astype(np.uint8))


def _encode_q8(x: Float32) -> Bytes:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    whole += np.floor(np.float32(2) * (size - whole))  # halves go away from zero
    codes = (np.sign(scaled) * whole).astype(np.int8)
    return np.concatenate([as_bytes(scale), codes.view(np.uint8)], axis=1)


def _stored(values: Float32) -> Float32:
    return values.astype(np.float16).astype(np.float32)


def _search_symmetric(kind: str, rows: Float32, row_weights: Float32) -> Bytes:
    half = _HALF_CODES[kind]
    x, weights = np.ascontiguousarray(rows.T), np.ascontiguousarray(row_weights.T)

    def coded(scale: Float32) -> tuple[Float32, Float32]:
        codes = np.clip(np.rint(x * inverse(scale)), -half, half - 1)
        return codes, (weights * (scale * codes - x) ** 2).sum(axis=0)

    scale = _stored(symmetric_scale(x, weights, half))
    codes, error = coded(scale)
    sum_ll = (weights * codes * codes).sum(axis=0)
    fit = (weights * x * codes).sum(axis=0) / np.where(sum_ll > 0, sum_ll, 1)
    refit = _stored(np.where(sum_ll > 0, fit, scale))
    again, other = coded(refit)
    better = other < error
    scale, codes = np.where(better, refit, scale), np.where(better, again, codes)
    unsigned = (codes + np.float32(half)).astype(np.uint8)
    return _joined(kind, [as_bytes(scale)], np.ascontiguousarray(unsigned.T))


def _search_minimum(kind: str, rows: Float32, row_weights: Float32) -> Bytes:
    top = np.float32(_MAX_CODES[kind])
    x, weights = np.ascontiguousarray(rows.T), np.ascontiguousarray(row_weights.T)

    def coded(scale: Float32, low: Float32) -> tuple[Float32, Float32]:
        codes = np.clip(np.rint((x - low) * inverse(scale)), 0, top)
        return codes, (weights * (scale * codes + low - x) ** 2).sum(axis=0)

    # A group of positive values is better off with its own minimum, which the search cannot give.
    found, minus = scale_and_minimum(x, weights, int(top), _STEPS)
    own = x.min(axis=0)
    positive = own > 0
    scale = _stored(np.where(positive, (x.max(axis=0) - own) / top, found))
    low = _stored(np.where(positive, own, -minus))
    codes, error = coded(scale, low)
    for _ in range(2):
        tried_scale, tried_low = _stored(found), _stored(-minus)
        again, other = coded(tried_scale, tried_low)
        better = other < error
        scale, low = np.where(better, tried_scale, scale), np.where(better, tried_low, low)
        codes, error = np.where(better, again, codes), np.where(better, other, error)
        found, minus = _fitted(x, weights, codes, scale, low)
    return _joined(
        kind, [as_bytes(scale), as_bytes(low)], np.ascontiguousarray(codes.astype(np.uint8).T)
    )


def _fitted(
    x: Float32, weights: Float32, codes: Float32, scale: Float32, low: Float32
) -> tuple[Float32, Float32]:
    """Least-squares scale and -minimum of given codes; the ones given where there is no fit."""
    weighted = weights * codes
    sums = [weights, weights * x, weighted, weighted * codes, weighted * x]
    w, wx, c, ll, xl = (s.sum(axis=0).astype(np.float64) for s in sums)
    det = w * ll - c * c
    usable = det > 1e-9 * w * ll
    det = np.where(usable, det, 1)
    fit = np.where(usable, (w * xl - wx * c) / det, scale)
    shift = np.where(usable, (ll * wx - c * xl) / det, low)
    return fit.astype(np.float32), -shift.astype(np.float32)
