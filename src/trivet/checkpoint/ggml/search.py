"""Searches for the scale (and minimum) of groups of weights, all groups of a run at once.

Arrays are float32 [g, ...]: the g values of a group lie along the first axis, so that sums over a
group add whole rows, in the order of ggml's loops and the same on every machine. Source:
ggml-quants.c (make_qx_quants, make_qkx2_quants, make_qkx3_quants, make_qp_quants). Differs: errors
are taken from the sums of the least-squares fit instead of a second pass, and callers refine what
is found here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

TINY = np.float32(1e-15)  # a group whose largest magnitude is below this is zero


class Steps(NamedTuple):
    """Which scales a search for scale and minimum tries: (codes + first + step * i) / range."""

    first: float
    step: float
    number: int


def inverse(scales: Float32) -> Float32:
    """1 / scale, and 0 where the scale is 0."""
    is_zero = scales == 0
    return np.where(is_zero, np.float32(0), np.float32(1) / np.where(is_zero, 1, scales))


def symmetric_scale(x: Float32, weights: Float32, half: int) -> Float32:
    """Scales [...] of x [g, ...] for codes -half..half-1, smallest weighted squared error.

    The value of largest magnitude gets a code near -half, so a scale may be negative.
    """
    place = np.abs(x).argmax(axis=0)
    largest = np.take_along_axis(x, place[None], axis=0)[0]
    is_zero = np.abs(largest) < TINY
    largest = np.where(is_zero, np.float32(1), largest)
    weighted = weights * x
    codes, work = np.empty_like(x), np.empty_like(x)
    scale = np.zeros_like(largest)
    best = np.full_like(largest, -1)
    for step in (0, *range(-9, 0), *range(1, 10)):
        np.multiply(x, np.float32(-(half + 0.1 * step)) / largest, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, -half, half - 1, out=codes)
        sum_xl = np.multiply(weighted, codes, out=work).sum(axis=0)
        np.multiply(weights, codes, out=work)
        sum_ll = np.multiply(work, codes, out=work).sum(axis=0)
        found = sum_ll > 0
        fit = np.divide(sum_xl, sum_ll, out=np.zeros_like(sum_xl), where=found)
        gain = fit * sum_xl
        better = found & (gain > best)
        scale = np.where(better, fit, scale)
        best = np.where(better, gain, best)
    scale[is_zero] = 0
    return scale


def scale_and_minimum(
    x: Float32, weights: Float32, max_code: int, steps: Steps
) -> tuple[Float32, Float32]:
    """Scales and minima [...] of x [g, ...] for scale * code - minimum with codes 0..max_code.

    Both are >= 0: a group of positive values has the minimum 0. Smallest weighted squared error.
    """
    low = np.minimum(x.min(axis=0), 0)
    span = x.max(axis=0) - low
    is_flat = span <= 0
    span = np.where(is_flat, np.float32(1), span)
    shifted = x - low
    weighted = weights * x
    sum_w, sum_x = weights.sum(axis=0), weighted.sum(axis=0)
    work, codes = np.empty_like(x), np.empty_like(x)
    sum_xx = np.multiply(weighted, x, out=work).sum(axis=0)
    wide_w, wide_x, wide_xx = (s.astype(np.float64) for s in (sum_w, sum_x, sum_xx))

    scale = (span / np.float32(max_code)).astype(np.float32)
    minimum = low.copy()
    np.multiply(shifted, np.float32(max_code) / span, out=codes)
    np.rint(codes, out=codes)
    codes *= scale
    codes += low
    codes -= x
    np.multiply(codes, codes, out=codes)
    best = np.multiply(codes, weights, out=codes).sum(axis=0).astype(np.float64)
    for i in range(steps.number + 1):
        np.multiply(shifted, np.float32(steps.first + steps.step * i + max_code) / span, out=codes)
        np.rint(codes, out=codes)
        np.minimum(codes, np.float32(max_code), out=codes)
        np.multiply(weights, codes, out=work)
        sum_l = work.sum(axis=0).astype(np.float64)
        sum_ll = np.multiply(work, codes, out=work).sum(axis=0).astype(np.float64)
        sum_xl = np.multiply(weighted, codes, out=work).sum(axis=0).astype(np.float64)
        det = wide_w * sum_ll - sum_l * sum_l
        found = det > 0
        det[~found] = 1
        fit = (wide_w * sum_xl - wide_x * sum_l) / det
        shift = (sum_ll * wide_x - sum_l * sum_xl) / det
        above = shift > 0
        if above.any():
            only = np.divide(sum_xl, sum_ll, out=np.zeros_like(sum_xl), where=sum_ll > 0)
            fit, shift = np.where(above, only, fit), np.where(above, 0.0, shift)
        error = wide_xx - fit * sum_xl - shift * wide_x
        better = found & (error < best)
        scale = np.where(better, fit, scale).astype(np.float32)
        minimum = np.where(better, shift, minimum).astype(np.float32)
        best = np.where(better, error, best)
    scale[is_flat] = 0
    minimum = np.where(is_flat, low, minimum)
    return np.maximum(scale, 0), -minimum


def positive_codes(values: Float32, weights: Float32, max_code: int) -> tuple[Float32, Float32]:
    """Codes 0..max_code [s, ...] of values >= 0 [s, ...] and their common scale [...]."""
    largest = values.max(axis=0)
    is_zero = largest < TINY
    largest = np.where(is_zero, np.float32(1), largest)
    best = np.full(largest.shape, np.inf, np.float32)
    codes = np.zeros_like(values)
    for step in (0, -4, -3, -2, -1, 1, 2, 3, 4):
        inv = np.float32(0.1 * step + max_code) / largest
        tried = np.minimum(np.rint(values * inv), np.float32(max_code))
        change = values - tried / inv
        error = (weights * change * change).sum(axis=0)
        better = error < best
        codes = np.where(better, tried, codes)
        best = np.where(better, error, best)
    sum_ll = (weights * codes * codes).sum(axis=0)
    fit = (weights * values * codes).sum(axis=0) / np.where(sum_ll > 0, sum_ll, 1)
    usable = ~is_zero & (sum_ll > 0)
    return np.where(usable, codes, 0), np.where(usable, fit, 0).astype(np.float32)
