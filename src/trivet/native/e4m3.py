"""The number format e4m3 (fp8), bit for bit.

e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448, no infinity, 0x7F and 0xFF are
NaN. Every value is exact in bf16. Source: OCP 8-bit floating point.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

MAX = 448.0
NAN = 0x7F


def encode_values(values: Float32) -> UInt8:
    """Numbers to e4m3, rounded to nearest even, beyond 448 saturated; NaN stays NaN. Same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = (bits & np.uint32(0x7FFFFFFF)).view(np.float32)
    limited = np.fmin(magnitude, np.float32(MAX))
    raw = limited.view(np.uint32)
    # Normal numbers keep 3 of 23 mantissa bits; a carry out of them raises the exponent.
    rounded = raw + np.uint32(0x7FFFF) + (raw >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)
    normal = rounded.astype(np.int32) - ((127 - 7) << 3)
    small = np.rint(limited * np.float32(512)).astype(np.int32)  # below 2^-6: steps of 2^-9
    code = np.where(limited < np.float32(2.0**-6), small, normal)
    signs = (bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    result: UInt8 = np.where(np.isnan(magnitude), NAN, code).astype(np.uint8) | signs
    return result


def _decoded_codes() -> Float32:
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp((8 + mantissa).astype(np.float64), exponent - 10)
    value = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), normal)
    value = np.where(codes & 127 == NAN, np.nan, value)
    return np.where(codes & 128, -value, value).astype(np.float32)


_VALUES = _decoded_codes()


def decode_values(codes: UInt8) -> Float32:
    """The numbers of e4m3 codes, float32, same shape."""
    result: Float32 = _VALUES[codes]
    return result
