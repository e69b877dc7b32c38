"""The block types of 256 values, "k-quants": Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

A block has sub-blocks of 16 or 32 values whose scales (and minima) are small integers times one
half precision number of the block. Encoding finds each sub-block's scale, then the integers, then
improves both by turns: each integer moves by one where that lowers the weighted error, and the
block's numbers are fitted to codes and integers. Nothing found later is kept unless the error
falls, so the result is at least as good as the search it starts from. Source: ggml-quants.c
(layouts, searches, weights of the error).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.ggml.legacy import as_bytes, halves
from trivet.checkpoint.ggml.search import (
    Steps,
    inverse,
    positive_codes,
    scale_and_minimum,
    symmetric_scale,
)

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]

BLOCK = 256


@dataclasses.dataclass(frozen=True)
class _Shape:
    """group: values of a sub-block; max_code, max_scale: largest code and largest scale integer."""

    group: int
    max_code: int
    max_scale: int
    steps: Steps
    weighted_steps: Steps

    @property
    def num_groups(self) -> int:
        return BLOCK // self.group


_WEIGHTED = Steps(-0.9, 0.05, 36)
_MINIMUM = {
    "Q2_K": _Shape(16, 3, 15, Steps(-0.5, 0.1, 15), _WEIGHTED),
    "Q4_K": _Shape(32, 15, 63, Steps(-1.0, 0.1, 20), _WEIGHTED),
    "Q5_K": _Shape(32, 31, 63, Steps(-0.5, 0.1, 15), _WEIGHTED),
}
_SIGNED = {"Q3_K": (4, 32), "Q6_K": (32, 128)}  # half of the codes, half of the scale integers


# --- layouts -------------------------------------------------------------------------------------


def decode(kind: str, blocks: Bytes) -> Float32:
    """Values float32 [n, 256] of blocks uint8 [n, bytes]."""
    codes, scale, minimum = split(kind, blocks)
    groups = codes.reshape(len(blocks), scale.shape[1], -1).astype(np.float32)
    values = scale[:, :, None] * groups
    if minimum is not None:
        values -= minimum[:, :, None]
    return values.reshape(len(blocks), BLOCK)


def split(
    kind: str, blocks: Bytes
) -> tuple[NDArray[np.int8] | NDArray[np.uint8], Float32, Float32 | None]:
    """Codes [n, 256], the scale of each sub-block [n, s], and what is subtracted there [n, s] or None.

    Codes are unsigned where there is a minimum and signed (int8) elsewhere. Scales and minima are
    exact products of a half precision number and a small integer.
    """
    n = len(blocks)
    if kind == "Q2_K":
        codes = _planes(blocks[:, 16:80], 2)
        packed = blocks[:, :16]
        return codes, *_times(blocks, 80, packed & np.uint8(15), packed >> np.uint8(4))
    if kind in ("Q4_K", "Q5_K"):
        scales, minima = _unpacked_k4(blocks[:, 4:16])
        low = blocks[:, -128:].reshape(n, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None]
        codes = (low & np.uint8(15)).reshape(n, BLOCK)
        if kind == "Q5_K":
            codes |= _planes(blocks[:, 16:48], 1) << np.uint8(4)
        return codes, *_times(blocks, 0, scales, minima)
    if kind == "Q3_K":
        low = _planes(blocks[:, 32:96], 2)
        high = _planes(blocks[:, :32], 1)
        signed = (low | high << np.uint8(2)).astype(np.int8) - np.int8(4)
        integers = _unpacked_k3(blocks[:, 96:108])
        return signed, halves(blocks, 108).astype(np.float32)[:, None] * integers, None
    assert kind == "Q6_K", kind
    low6 = blocks[:, :128].reshape(n, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    codes6 = (low6 & np.uint8(15)).reshape(n, BLOCK) | _planes(blocks[:, 128:192], 2) << np.uint8(4)
    integers = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = halves(blocks, 208).astype(np.float32)[:, None] * integers
    return codes6.astype(np.int8) - np.int8(32), scale, None


def _times(blocks: Bytes, at: int, scales: Bytes, minima: Bytes) -> tuple[Float32, Float32]:
    scale = halves(blocks, at).astype(np.float32)[:, None] * scales.astype(np.float32)
    minimum = halves(blocks, at + 2).astype(np.float32)[:, None] * minima.astype(np.float32)
    return scale, minimum


def _planes(packed: Bytes, bits: int) -> Bytes:
    """[n, 256] fields of ``bits`` bits: byte l of each 32 holds values l, l + 32, l + 64, ..."""
    per_byte = 8 // bits
    shifts = (bits * np.arange(per_byte)).astype(np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, 32) >> shifts
    return (fields & np.uint8((1 << bits) - 1)).reshape(len(packed), BLOCK)


def _to_planes(fields: Bytes, bits: int) -> Bytes:
    """Inverse of `_planes`."""
    per_byte = 8 // bits
    parts = fields.reshape(len(fields), -1, per_byte, 32)
    packed = parts[:, :, 0].copy()
    for i in range(1, per_byte):
        packed |= parts[:, :, i] << np.uint8(bits * i)
    return packed.reshape(len(fields), -1)


def _unpacked_k4(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and minima from 12 bytes."""
    low, mid, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate(
        [low & np.uint8(63), (rest & np.uint8(15)) | (low >> np.uint8(2)) & np.uint8(0x30)], axis=1
    )
    minima = np.concatenate(
        [mid & np.uint8(63), (rest >> np.uint8(4)) | (mid >> np.uint8(2)) & np.uint8(0x30)], axis=1
    )
    return scales, minima


def _packed_k4(scales: Bytes, minima: Bytes) -> Bytes:
    low = scales[:, :4] | (scales[:, 4:] >> np.uint8(4)) << np.uint8(6)
    mid = minima[:, :4] | (minima[:, 4:] >> np.uint8(4)) << np.uint8(6)
    rest = (scales[:, 4:] & np.uint8(15)) | (minima[:, 4:] & np.uint8(15)) << np.uint8(4)
    return np.concatenate([low, mid, rest], axis=1)


def _unpacked_k3(packed: Bytes) -> Float32:
    """Sixteen 6-bit scales, -32..31, from 12 bytes."""
    low = np.concatenate([packed[:, :8] & np.uint8(15), packed[:, :8] >> np.uint8(4)], axis=1)
    tops = [packed[:, 8:] >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)]
    fields: Float32 = (low | np.concatenate(tops, axis=1) << np.uint8(4)).astype(np.float32)
    return fields - np.float32(32)


def _packed_k3(fields: Bytes) -> Bytes:
    low = (fields[:, :8] & np.uint8(15)) | (fields[:, 8:] & np.uint8(15)) << np.uint8(4)
    high = fields >> np.uint8(4)
    rest = (
        high[:, :4]
        | high[:, 4:8] << np.uint8(2)
        | high[:, 8:12] << np.uint8(4)
        | high[:, 12:] << np.uint8(6)
    )
    return np.concatenate([low, rest], axis=1)


# --- encoding ------------------------------------------------------------------------------------


def encode(kind: str, x: Float32, weights: Float32 | None = None) -> Bytes:
    """Blocks uint8 [n, bytes] of finite values float32 [n, 256].

    weights  float32 [n, 256]: how much the squared error of each value counts (an importance
             matrix's means); None: values alone decide
    """
    if kind in _SIGNED:
        return _encode_signed(kind, x, weights)
    return _encode_minimum(kind, x, weights)


def _by_group(values: Float32, group: int) -> Float32:
    """[n, 256] -> contiguous [group, sub-blocks, n]."""
    return np.ascontiguousarray(values.reshape(len(values), -1, group).transpose(2, 1, 0))


def _by_block(codes: Float32) -> Bytes:
    """[group, sub-blocks, n] -> [n, 256]."""
    cast = codes.astype(np.uint8).transpose(2, 1, 0)
    return np.ascontiguousarray(cast).reshape(codes.shape[2], BLOCK)


def _stored(values: NDArray[np.floating]) -> Float32:
    stored: Float32 = values.astype(np.float16).astype(np.float32)
    return stored


def _error_weights(kind: str, x: Float32, importance: Float32 | None) -> Float32:
    """Weights of the squared error, shaped like x [group, sub-blocks, n]."""
    weights: Float32
    if importance is None:
        weights = np.sqrt((x * x).mean(axis=0)) + np.abs(x)
        return weights
    if kind == "Q6_K":
        return importance
    size = (x * x).mean(axis=(0, 1))
    if kind != "Q2_K":
        size = size * np.float32(2)
    weights = importance * np.sqrt(size + x * x)
    return weights


@dataclasses.dataclass
class _Found:
    """One way to encode blocks. d, dmin [n]; integers [s, n]; codes [g, s, n]; error [s, n]."""

    d: Float32
    dmin: Float32
    scales: Float32
    minima: Float32
    codes: Float32
    error: Float32


def _encode_minimum(kind: str, values: Float32, importance: Float32 | None) -> Bytes:
    shape = _MINIMUM[kind]
    x = _by_group(values, shape.group)
    given = None if importance is None else _by_group(importance, shape.group)
    weights = _error_weights(kind, x, given)
    steps = shape.steps if importance is None else shape.weighted_steps
    scale, minimum = scale_and_minimum(x, weights, shape.max_code, steps)
    sums = weights.sum(axis=0)
    scales, d = positive_codes(scale, sums, shape.max_scale)
    minima, dmin = positive_codes(minimum, sums, shape.max_scale)
    best = _coded(x, weights, _stored(d), _stored(dmin), scales, minima, shape)
    for _ in range(2):
        _move_integers(x, weights, best, shape)
        d, dmin = _fitted(x, weights, best)
        again = _coded(x, weights, d, dmin, best.scales, best.minima, shape)
        better = again.error.sum(axis=0) < best.error.sum(axis=0)
        _take(best, again, better)
    return _joined_minimum(kind, best)


def _coded(
    x: Float32, weights: Float32, d: Float32, dmin: Float32, scales: Float32, minima: Float32,
    shape: _Shape,
) -> _Found:  # fmt: skip
    """The best codes for given numbers, and their error."""
    scale, minimum = d * scales, dmin * minima
    codes = x + minimum
    codes *= inverse(scale)
    np.rint(codes, out=codes)
    np.clip(codes, 0, shape.max_code, out=codes)
    change = codes * scale
    change -= minimum
    change -= x
    change *= change
    change *= weights
    return _Found(d, dmin, scales, minima, codes, change.sum(axis=0))


def _take(best: _Found, other: _Found, better: NDArray[np.bool_]) -> None:
    """Replace parts of best where ``better`` [n] or [s, n] holds."""
    if better.ndim == 1:
        best.d = np.where(better, other.d, best.d)
        best.dmin = np.where(better, other.dmin, best.dmin)
    best.scales = np.where(better, other.scales, best.scales)
    best.minima = np.where(better, other.minima, best.minima)
    best.error = np.where(better, other.error, best.error)
    np.copyto(best.codes, other.codes, where=better)


def _move_integers(x: Float32, weights: Float32, best: _Found, shape: _Shape) -> None:
    """Move each sub-block's integers by one where that lowers its error."""
    scales, minima = best.scales, best.minima
    for by_scale in (0, -1, 1):
        for by_minimum in (0, -1, 1):
            if by_scale == by_minimum == 0:
                continue
            moved = _coded(
                x,
                weights,
                best.d,
                best.dmin,
                np.clip(scales + np.float32(by_scale), 0, shape.max_scale),
                np.clip(minima + np.float32(by_minimum), 0, shape.max_scale),
                shape,
            )
            _take(best, moved, moved.error < best.error)


def _fitted(x: Float32, weights: Float32, best: _Found) -> tuple[Float32, Float32]:
    """Least-squares d and dmin of given codes and integers, as stored."""
    weighted = weights * best.codes
    sums = (weights, weights * x, weighted, weighted * best.codes, weighted * x)
    w, wx, c, cc, xc = (s.sum(axis=0).astype(np.float64) for s in sums)
    u, v = best.scales.astype(np.float64), -best.minima.astype(np.float64)
    uu, uv, vv = (u * u * cc).sum(axis=0), (u * v * c).sum(axis=0), (v * v * w).sum(axis=0)
    ux, vx = (u * xc).sum(axis=0), (v * wx).sum(axis=0)
    det = uu * vv - uv * uv
    usable = det > 1e-9 * uu * vv
    det = np.where(usable, det, 1)
    only_d = ux / np.where(uu > 0, uu, 1)
    d = np.where(usable, (ux * vv - vx * uv) / det, only_d)
    dmin = np.where(usable, (vx * uu - ux * uv) / det, best.dmin)
    usable = (d > 0) & (dmin >= 0) & (d < 65504) & (dmin < 65504)
    return _stored(np.where(usable, d, best.d)), _stored(np.where(usable, dmin, best.dmin))


def _joined_minimum(kind: str, best: _Found) -> Bytes:
    codes = _by_block(best.codes)
    scales = np.ascontiguousarray(best.scales.T).astype(np.uint8)
    minima = np.ascontiguousarray(best.minima.T).astype(np.uint8)
    numbers = [as_bytes(best.d), as_bytes(best.dmin)]
    if kind == "Q2_K":
        return np.concatenate(
            [scales | minima << np.uint8(4), _to_planes(codes, 2), *numbers], axis=1
        )
    pairs = (codes & np.uint8(15)).reshape(len(codes), 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(len(codes), 128)
    parts = [*numbers, _packed_k4(scales, minima)]
    if kind == "Q5_K":
        parts.append(_to_planes(codes >> np.uint8(4), 1))
    return np.concatenate([*parts, low], axis=1)


def _encode_signed(kind: str, values: Float32, importance: Float32 | None) -> Bytes:
    half, half_scale = _SIGNED[kind]
    x = _by_group(values, 16)
    weights = _error_weights(kind, x, None if importance is None else _by_group(importance, 16))
    scale = symmetric_scale(x, weights, half)

    def coded(d: Float32, integers: Float32) -> tuple[Float32, Float32]:
        whole = d * integers
        codes = x * inverse(whole)
        np.rint(codes, out=codes)
        np.clip(codes, -half, half - 1, out=codes)
        change = codes * whole
        change -= x
        change *= change
        change *= weights
        return codes, change.sum(axis=0)

    d = _stored(symmetric_scale(scale, weights.sum(axis=0), half_scale))
    integers = np.clip(np.rint(scale * inverse(d)), -half_scale, half_scale - 1)
    codes, error = coded(d, integers)
    for _ in range(2):
        start = integers
        for by in (-1, 1):
            moved = np.clip(start + np.float32(by), -half_scale, half_scale - 1)
            again, other = coded(d, moved)
            better = other < error
            integers, error = np.where(better, moved, integers), np.where(better, other, error)
            np.copyto(codes, again, where=better)
        weighted = weights * codes
        wide = integers.astype(np.float64)
        sum_ll = (wide * wide * (weighted * codes).sum(axis=0)).sum(axis=0)
        fit = (wide * (weighted * x).sum(axis=0)).sum(axis=0) / np.where(sum_ll > 0, sum_ll, 1)
        usable = (sum_ll > 0) & (np.abs(fit) < 65504)
        refit = _stored(np.where(usable, fit, d))
        again, other = coded(refit, integers)
        better = other.sum(axis=0) < error.sum(axis=0)
        d, error = np.where(better, refit, d), np.where(better, other, error)
        np.copyto(codes, again, where=better)
    return _joined_signed(kind, d, integers, codes + np.float32(half))


def _joined_signed(kind: str, d: Float32, integers: Float32, unsigned: Float32) -> Bytes:
    codes = _by_block(unsigned)
    whole = np.ascontiguousarray(integers.T)
    if kind == "Q3_K":
        fields = (whole + np.float32(32)).astype(np.uint8)
        parts = [
            _to_planes(codes >> np.uint8(2), 1),
            _to_planes(codes & np.uint8(3), 2),
            _packed_k3(fields),
        ]
        return np.concatenate([*parts, as_bytes(d)], axis=1)
    pairs = (codes & np.uint8(15)).reshape(len(codes), 2, 2, 64)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(len(codes), 128)
    scales = whole.astype(np.int8).view(np.uint8)
    return np.concatenate([low, _to_planes(codes >> np.uint8(4), 2), scales, as_bytes(d)], axis=1)
