"""Numpy reference of the linear and activation kernels, bit for bit the numerics contract.

float32 operations are emulated in float64: sums, products and quotients of two float32 values rounded
through float64 round correctly (53 >= 2 * 24 + 2 bits); fused multiply-add needs the sum rounded to
odd first. Subnormal inputs count as zero and subnormal results become zero (DAZ, FTZ). A NaN result is
a NaN, whatever its payload. Slow: one numpy pass per column, for tests and toy models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.config import RowRule, Scheme
from trivet.native.e4m3 import decode_values
from trivet.native.weights import ROW_ACTIVATION_GROUP, WeightTensor, hadamard_width

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Operand = NDArray[np.float32] | np.float32

_MIN_NORMAL = 2.0**-126
_TINY_BELOW = 2.0**-126 - 2.0**-151  # rounds to 24 bits below the smallest normal number


def _flush(x: Operand) -> Float64:
    """Inputs of an operation: subnormal numbers read as zero of their sign."""
    wide: Float64 = np.asarray(x, np.float32).astype(np.float64)
    return np.where(np.abs(wide) < _MIN_NORMAL, np.copysign(0.0, wide), wide)


def _round(wide: Float64) -> Float32:
    """A result: float64 to float32, to nearest even; subnormal results become zero of their sign."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        flushed = np.where(np.abs(wide) < _TINY_BELOW, np.copysign(0.0, wide), wide)
        result: Float32 = flushed.astype(np.float32)
    return result


def add32(a: Operand, b: Operand) -> Float32:
    """One float32 addition."""
    with np.errstate(invalid="ignore"):
        return _round(_flush(a) + _flush(b))


def mul32(a: Operand, b: Operand) -> Float32:
    """One float32 multiplication."""
    with np.errstate(invalid="ignore"):
        return _round(_flush(a) * _flush(b))


def div32(a: Operand, b: Operand) -> Float32:
    """One float32 division."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _round(_flush(a) / _flush(b))


def fma32(a: Operand, b: Operand, c: Operand) -> Float32:
    """One float32 fused multiply-add: a * b + c rounded once.

    The product is exact in float64. The sum is rounded to odd (the inexact neighbour whose last bit is
    set), from which rounding to float32 is correct. Source: Boldo and Melquiond, IEEE TC 57(4), 2008.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = np.broadcast_arrays(_flush(a) * _flush(b), _flush(c))
        total = product + addend
        shadow = total - product
        error = (product - (total - shadow)) + (addend - shadow)
        bits = np.ascontiguousarray(total).view(np.int64)
        inexact = np.isfinite(total) & (error != 0.0) & (bits & 1 == 0)
        away = (error > 0.0) == (total > 0.0)
        bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    return _round(bits.view(np.float64))


def to_bf16(x: Float32) -> NDArray[np.uint16]:
    """Bits of x rounded to bf16: nearest even, NaN quiet, subnormal numbers to zero of their sign."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    rounded = np.where(magnitude > 0x7F800000, bits >> 16 | 0x40, rounded)
    rounded = np.where(magnitude < 0x00800000, bits >> 16 & 0x8000, rounded)
    result: NDArray[np.uint16] = rounded.astype(np.uint16)
    return result


def from_bf16(bits: NDArray[np.uint16]) -> Float32:
    """The float32 values of bf16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Activations as the integer linears read them.

    codes   int8 [R, K]        scales  float32 [R, G]        sums  int32 [R, G], sums of codes
    """

    codes: NDArray[np.int8]
    scales: Float32
    sums: NDArray[np.int32]


def _quantize_span(x: Float32, stored: Operand | None = None) -> QuantizedRows:
    """One scale per row of x [R, K]; of the stored range, where the row is finite."""
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    amax = bits.max(axis=1, keepdims=True).view(np.float32)
    if stored is not None:
        amax = np.where(np.isfinite(amax), stored, amax).astype(np.float32)
    with np.errstate(invalid="ignore"):
        positive = _flush(amax) > 0.0
    inverse = np.where(positive, div32(np.float32(127.0), amax), np.float32(0.0))
    value = mul32(x, inverse).astype(np.float64)
    value = np.where(value > -127.0, value, -127.0)
    codes = np.rint(np.where(value < 127.0, value, 127.0)).astype(np.int8)
    sums = codes.sum(axis=1, keepdims=True, dtype=np.int32)
    return QuantizedRows(codes, div32(amax, np.float32(127.0)), sums)


def _largest(x: Float32) -> Float32:
    """The largest magnitude of each row [R, 1], by its bits: a NaN is larger than everything."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    result: Float32 = bits.max(axis=1, keepdims=True).view(np.float32)
    return result


def _scaled(x: Float32, largest: Float32, limit: Operand, low: float, high: float) -> Float64:
    """x * limit / largest clamped to [low, high]; a NaN becomes low."""
    with np.errstate(invalid="ignore"):
        positive = _flush(largest) > 0.0
    inverse = np.where(positive, div32(limit, largest), np.float32(0.0))
    value = mul32(x, inverse).astype(np.float64)
    value = np.where(value > low, value, low)
    return np.where(value < high, value, high)


def quantize_fp8(x: Float32) -> tuple[Float32, Float32]:
    """Rows [R, K] in e4m3, one scale each: the values of the codes [R, K], the scales [R, 1]."""
    largest = _largest(x)
    value = _scaled(x, largest, np.float32(448.0), -448.0, 448.0)
    _, exponent = np.frexp(value)
    step = np.ldexp(1.0, np.maximum(exponent - 4, -9))  # three bits behind the first, or 2^-9
    codes = np.copysign(np.rint(np.abs(value) / step) * step, value)
    return codes.astype(np.float32), div32(largest, np.float32(448.0))


def quantize_int4(x: Float32) -> tuple[Float32, Float32]:
    """Rows [R, K] as codes -8..7 (float32 [R, K]) and scales [R, 1].

    The value of largest magnitude becomes -8, so that its scale has the other sign.
    """
    largest, wide = _largest(x), _flush(x)
    low = np.where(wide < 0.0, wide, 0.0).min(axis=1, keepdims=True)
    high = np.where(wide > 0.0, wide, 0.0).max(axis=1, keepdims=True)
    eight = np.where(-low >= high, np.float32(8.0), np.float32(-8.0))
    codes = np.rint(_scaled(x, largest, eight, -8.0, 7.0)).astype(np.float32)
    return codes + np.float32(0.0), div32(largest, eight)


def quantize_group(x: Float32, group: int) -> QuantizedRows:
    """Activations of the grouped formats: one scale per row and group; the last may be shorter."""
    spans = [_quantize_span(x[:, k : k + group]) for k in range(0, x.shape[1], group)]
    return QuantizedRows(
        np.concatenate([span.codes for span in spans], axis=1),
        np.concatenate([span.scales for span in spans], axis=1),
        np.concatenate([span.sums for span in spans], axis=1),
    )


def rotate32(x: Float32, width: int) -> Float32:
    """Block Hadamard of each row in float32: butterflies of stride 1, 2, 4, ..., then one product."""
    rows, k = x.shape
    if width < 2:
        return x
    stride = 1
    while stride < width:
        pairs = x.reshape(rows, k // (2 * stride), 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([add32(low, high), add32(low, -high)], axis=2).reshape(rows, k)
        stride *= 2
    return mul32(x, np.float32(1.0 / np.sqrt(width)))


def quantize_row(
    x: Float32, width: int | None = None, amax: Operand | None = None
) -> QuantizedRows:
    """Activations of whole-row int8: rotation of ``width`` (None: that of K), one scale per row, or
    that of the stored range ``amax``.
    """
    width = hadamard_width(x.shape[1]) if width is None else width
    return _quantize_span(rotate32(x, width), amax)


def _row_product(x: Float32, weight: WeightTensor) -> Float32:
    """Whole-row int8 by the format's rule, outlier columns left out."""
    assert weight.scales is not None
    if weight.format.outliers:
        x = x.copy()
        x[:, weight.outliers] = 0.0
    is_static = weight.format.rule is RowRule.STATIC
    width = None if weight.format.is_rotated else 1
    rows = quantize_row(x, width, weight.amax if is_static else None)
    t = mul32(rows.scales, weight.scales.astype(np.float32).T)
    return mul32(_int_dot(rows.codes, weight.codes), t)


def bf16_product(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> Float32:
    """bf16 bits a [R, K] times b [N, K] transposed: float32 [R, N], as TDPBF16PS computes it.

    K is padded with zeros to a multiple of 64. Per 32 columns: a chain of fused multiply-adds over
    the even ones, one over the odd ones, their sum added to the accumulator.
    """
    pad = -a.shape[1] % 64
    left = from_bf16(np.pad(a, ((0, 0), (0, pad))))[:, None, :]
    right = from_bf16(np.pad(b, ((0, 0), (0, pad))))[None, :, :]
    acc = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(0, a.shape[1] + pad, 32):
        even, odd = np.zeros_like(acc), np.zeros_like(acc)
        for i in range(k, k + 32, 2):
            even = fma32(left[..., i], right[..., i], even)
            odd = fma32(left[..., i + 1], right[..., i + 1], odd)
        acc = add32(acc, add32(even, odd))
    return acc


def _int_dot(x: NDArray[np.int8], codes: NDArray[Any]) -> Float32:
    """Exact integer product [R, N] as float32 (rounded to nearest even where it needs more bits)."""
    # float64 holds sums of up to 2^37 products of int8 codes exactly and uses the fast product.
    result: Float32 = (x.astype(np.float64) @ codes.astype(np.float64).T).astype(np.float32)
    return result


def _group_product(x: QuantizedRows, weight: WeightTensor) -> Float32:
    group, k = weight.format.group_size or ROW_ACTIVATION_GROUP, weight.shape[1]
    assert weight.scales is not None
    scales = weight.scales.astype(np.float32)
    acc = np.zeros((x.codes.shape[0], weight.shape[0]), np.float32)
    for g in range(-(-k // group)):
        own = g if weight.num_groups > 1 else 0  # one scale of the row serves all its groups
        columns = slice(g * group, min(k, (g + 1) * group))
        codes = weight.codes[:, columns].astype(np.int32)
        if weight.zeros is not None:
            codes = codes - weight.zeros[:, own : own + 1].astype(np.int32)
        elif weight.format.bits == 4 and weight.format.scheme is Scheme.SYM:
            codes = codes - 8
        sx = x.scales[:, g : g + 1]
        acc = fma32(_int_dot(x.codes[:, columns], codes), mul32(sx, scales[None, :, own]), acc)
        if weight.minima is not None:
            sum_x = mul32(x.sums[:, g : g + 1].astype(np.float32), sx)
            acc = fma32(sum_x, weight.minima.astype(np.float32)[None, :, own], acc)
    return acc


def _bf16_group_product(x: NDArray[np.uint16], weight: WeightTensor) -> Float32:
    """bf16 bits x [R, K]: a bf16 product per group with the codes less their offset, or the values of
    e4m3 codes, scaled once.
    """
    group, k = weight.format.group_size or weight.shape[1], weight.shape[1]
    assert weight.scales is not None
    scales = weight.scales.astype(np.float32)
    acc = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for g in range(weight.num_groups):
        columns = slice(g * group, min(k, (g + 1) * group))
        codes = weight.codes[:, columns].astype(np.float32)
        if weight.format.scheme is Scheme.FP8:
            codes = decode_values(weight.codes[:, columns].astype(np.uint8))
        elif weight.zeros is not None:
            codes = codes - weight.zeros[:, g : g + 1].astype(np.float32)
        elif weight.minima is None:
            codes = codes - np.float32(8.0)
        acc = fma32(bf16_product(x[:, columns], to_bf16(codes)), scales[None, :, g], acc)
        if weight.minima is not None:
            ones = to_bf16(np.ones((1, codes.shape[1]), np.float32))
            sum_x = bf16_product(x[:, columns], ones)
            acc = fma32(sum_x, weight.minima.astype(np.float32)[None, :, g], acc)
    return acc


def linear(
    x: Float32, weight: WeightTensor, bias: Float32 | None = None, residual: Float32 | None = None
) -> Float32:
    """x [R, K] through one linear: quantize the activations as the format says, multiply, add.

    bias [N] is added to the product, and the sum to residual [R, N]. Returns float32 [R, N].
    A weight with an order of columns takes those of x in that order, before anything else.
    """
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.format.bits == 16:
        y = bf16_product(to_bf16(x), weight.codes.astype(np.uint16))
    elif weight.format.activation_bits == 16:
        y = _bf16_group_product(to_bf16(x), weight)
    elif weight.format.is_row:
        y = _row_product(x, weight)
    else:
        group = weight.format.group_size or ROW_ACTIVATION_GROUP
        y = _group_product(quantize_group(x, group), weight)
    if bias is not None:
        y = add32(y, bias[None, :])
    if residual is not None:
        y = add32(residual, y)
    if weight.outlier_codes is not None:
        y = add32(y, bf16_product(to_bf16(x[:, weight.outliers]), weight.outlier_codes))
    return y
