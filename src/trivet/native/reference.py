"""Numpy reference of the numerics contract (HACKING.md): every kernel outside `reference_linear` and
`reference_sampling`, and the forward of a whole model. What the native core computes equals this bit
for bit, on every level.

Slow and plain, for tests and toy models. Weights come as `WeightTensor`s, KV lies in arrays by position
in the KV format; pages, threads and steps do not exist here, because they cannot change a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trivet.config import SPAN_TOKENS, KVFormat, Scheme
from trivet.native.reference_linear import (
    add32,
    div32,
    fma32,
    from_bf16,
    linear,
    mul32,
    quantize_fp8,
    quantize_group,
    quantize_int4,
    rotate32,
    to_bf16,
)
from trivet.native.weights import WeightTensor, hadamard_width

Float32 = NDArray[np.float32]

F = np.float32
LANES = 16

EXP_LOW, EXP_HIGH = F(-87.33654), F(88.37626)
LOG2E = F(1.44269504088896341)
ROUND_MAGIC = F(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
LN2_HIGH, LN2_LOW = F(0.693359375), F(-2.12194440e-4)
EXP_COEFFICIENTS = tuple(
    F(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    )
)


def exp32(x: Float32) -> Float32:
    """exp of the contract: clamp, Cody-Waite reduction, polynomial, scale by the exponent's bits."""
    x = np.asarray(x, np.float32)
    x = np.where(x < EXP_LOW, EXP_LOW, x)
    x = np.where(x > EXP_HIGH, EXP_HIGH, x)
    shifted = fma32(x, LOG2E, ROUND_MAGIC)
    n = add32(shifted, -ROUND_MAGIC)
    r = fma32(n, -LN2_HIGH, x)
    r = fma32(n, -LN2_LOW, r)
    p = np.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma32(p, r, coefficient)
    exponent = shifted.view(np.uint32) - ROUND_MAGIC.view(np.uint32) + np.uint32(127)
    return mul32(p, (exponent << 23).view(np.float32))


def silu32(x: Float32) -> Float32:
    """x / (1 + exp(-x))."""
    return div32(x, add32(F(1.0), exp32(-np.asarray(x, np.float32))))


def silu_mul(gate: Float32, up: Float32) -> Float32:
    """Gated activation silu(gate) * up."""
    return mul32(silu32(gate), up)


def tree_sum(lanes: Float32) -> Float32:
    """Sum over the last axis of 16 lanes: l[j] += l[j+8], then +4, +2, +1."""
    width = LANES // 2
    while width:
        lanes = add32(lanes[..., :width], lanes[..., width : 2 * width])
        width //= 2
    return lanes[..., 0]


def rms_norm(x: Float32, gain: Float32, eps: float) -> Float32:
    """RMSNorm of rows x [R, n] with gain [n]."""
    rows, n = x.shape
    lanes = np.zeros((rows, LANES), np.float32)
    for begin in range(0, n, LANES):
        part = x[:, begin : begin + LANES]
        width = part.shape[1]
        lanes[:, :width] = fma32(part, part, lanes[:, :width])
    mean = add32(div32(tree_sum(lanes), F(n)), F(eps))
    root: Float32 = np.sqrt(mean.astype(np.float64)).astype(np.float32)
    return mul32(mul32(x, div32(F(1.0), root)[:, None]), gain[None, :])


def rope(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate heads x [..., head_dim] by tables cos, sin [..., head_dim / 2], rotate-half form."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate(
        [fma32(-high, sin, mul32(low, cos)), fma32(low, sin, mul32(high, cos))], axis=-1
    )


def lookup(weight: WeightTensor, tokens: NDArray[np.int32]) -> Float32:
    """Rows of an embedding as float32 [R, K]: exactly what the codes mean."""
    codes = weight.codes[tokens]
    if weight.format.bits == 16:
        return from_bf16(codes.astype(np.uint16))
    assert not weight.format.is_row, "whole-row int8 cannot be looked up"
    assert weight.order is None, "a weight with an order cannot be looked up"
    assert weight.scales is not None
    group = weight.format.group_size or weight.shape[1]

    def spread(values: NDArray[np.generic]) -> Float32:
        wide = np.repeat(values[tokens].astype(np.float32), group, axis=1)
        return wide[:, : weight.shape[1]]

    values = codes.astype(np.float32)
    if weight.format.bits == 4 and weight.format.scheme is not Scheme.MIN:
        values = values - (F(8.0) if weight.zeros is None else spread(weight.zeros))
    if weight.minima is not None:
        return fma32(spread(weight.scales), values, spread(weight.minima))
    return mul32(spread(weight.scales), values)


@dataclasses.dataclass
class KVRows:
    """K and V of one layer by position, in the KV format.

    k, v              float32 [positions, kv_heads, head_dim]: bf16 values, or the values of codes
    k_scale, v_scale  float32 [positions, kv_heads], all formats but bf16
    """

    k: Float32
    v: Float32
    k_scale: Float32 | None = None
    v_scale: Float32 | None = None

    @classmethod
    def store(cls, k: Float32, v: Float32, kv: KVFormat) -> KVRows:
        """Round k and v [positions, kv_heads, head_dim], rotated as the format asks, to the format."""
        if kv is KVFormat.BF16:
            return cls(from_bf16(to_bf16(k)), from_bf16(to_bf16(v)))
        positions, heads, dim = k.shape

        def quantize(x: Float32) -> tuple[Float32, Float32]:
            flat = x.reshape(-1, dim)
            if kv.codes == "fp8":
                codes, scales = quantize_fp8(flat)
            elif kv.codes == "int4":
                codes, scales = quantize_int4(flat)
            else:
                rows = quantize_group(flat, dim)
                codes, scales = rows.codes.astype(np.float32), rows.scales
            codes, scales = codes.reshape(x.shape), scales.reshape(positions, heads)
            if kv.keeps_first:
                codes[0], scales[0] = from_bf16(to_bf16(x[0])), 1.0
            return codes, scales

        (k_codes, k_scale), (v_codes, v_scale) = quantize(k), quantize(v)
        return cls(k_codes, v_codes, k_scale, v_scale)


def pair_product(a: Float32, b: Float32, begin: Float32 | None = None) -> Float32:
    """a [..., K] times b [..., K] summed over K as TDPBF16PS does; float32 holding bf16 values.

    Per 32 of K: an even and an odd chain of fused multiply-adds, their sum added to the accumulator,
    which starts at ``begin`` or +0. K is padded with zeros.
    """
    a, b = np.broadcast_arrays(a, b)
    k = a.shape[-1]
    acc = np.zeros(a.shape[:-1], np.float32) if begin is None else begin
    for start in range(0, k, 32):
        even, odd = np.zeros_like(acc), np.zeros_like(acc)
        for i in range(start, min(start + 32, k), 2):
            even = fma32(a[..., i], b[..., i], even)
            if i + 1 < k:
                odd = fma32(a[..., i + 1], b[..., i + 1], odd)
        acc = add32(acc, add32(even, odd))
    return acc


@dataclasses.dataclass
class SpanResult:
    """One span of keys for query vectors [R, H]: maximum m, sum l and unnormalized o [R, H, dim]."""

    m: Float32
    l: Float32  # noqa: E741 - the contract's name
    o: Float32


def softmax_span(
    scores: Float32, seen: NDArray[np.bool_], v_scale: Float32 | None
) -> tuple[Float32, Float32, Float32]:
    """(P, m, l) of scaled scores [..., keys] of one span; P holds bf16 values, 0 where not ``seen``."""
    ordered = np.where(seen & ~np.isnan(scores), scores, F(-np.inf))
    m: Float32 = ordered.max(axis=-1, initial=-np.inf).astype(np.float32)
    p = np.where(seen, exp32(add32(scores, -m[..., None])), F(0.0))
    lanes = np.zeros((*m.shape, LANES), np.float32)
    for begin in range(0, scores.shape[-1], LANES):
        part = p[..., begin : begin + LANES]
        width = part.shape[-1]
        lanes[..., :width] = add32(lanes[..., :width], part)
    if v_scale is not None:
        p = np.where(seen, mul32(p, v_scale), F(0.0))
    return from_bf16(to_bf16(p)), m, tree_sum(lanes)


def attend_span(
    q: Float32, rows: KVRows, begin: int, end: int, valid: NDArray[np.intp]
) -> SpanResult:
    """Query vectors q [R, H, dim] (bf16 values) against keys [begin, end), one span.

    Row r sees the first valid[r] >= 1 keys. Keys that a row does not see take no part, whatever K and
    V hold there.
    """
    num_rows, num_heads, dim = q.shape
    kv_head = np.arange(num_heads) // (num_heads // rows.k.shape[1])
    k, v = rows.k[begin:end, kv_head], rows.v[begin:end, kv_head]  # [keys, H, dim]
    sm_scale = F(1.0 / np.sqrt(np.float64(dim)))
    seen = np.broadcast_to(
        (np.arange(end - begin) < valid[:, None])[:, None], (num_rows, num_heads, end - begin)
    )
    dots = pair_product(q[:, :, None], k.transpose(1, 0, 2)[None])
    if rows.k_scale is None or rows.v_scale is None:
        p, m, total = softmax_span(mul32(dots, sm_scale), seen, None)
    else:
        factors = mul32(sm_scale, rows.k_scale[begin:end, kv_head].T)
        p, m, total = softmax_span(mul32(dots, factors), seen, rows.v_scale[begin:end, kv_head].T)
    values = np.where(seen[:, :, None], v.transpose(1, 2, 0)[None], F(0.0))  # [R, H, dim, keys]
    return SpanResult(m, total, add32(pair_product(p[:, :, None], values), F(0.0)))


def merge_spans(first: SpanResult, second: SpanResult) -> SpanResult:
    """Take in the span that follows."""
    m = np.where(second.m > first.m, second.m, first.m)
    a, b = exp32(add32(first.m, -m)), exp32(add32(second.m, -m))
    return SpanResult(
        m,
        fma32(first.l, a, mul32(second.l, b)),
        fma32(first.o, a[..., None], mul32(second.o, b[..., None])),
    )


def attention(q: Float32, rows: KVRows, positions: NDArray[np.intp]) -> Float32:
    """Causal attention of rotated q [R, heads, head_dim] at ascending positions over stored K, V."""
    rounded = from_bf16(to_bf16(q))
    out = np.zeros_like(q)
    total: SpanResult | None = None
    for begin in range(0, int(positions[-1]) + 1, SPAN_TOKENS):
        first = int(np.searchsorted(positions, begin))  # rows before it do not reach the span
        valid = np.minimum(positions[first:] + 1 - begin, SPAN_TOKENS)
        span = attend_span(rounded[first:], rows, begin, begin + int(valid[-1]), valid)
        if total is not None:
            done = len(total.m) - len(span.m)
            out[len(q) - len(total.m) : first] = div32(total.o[:done], total.l[:done, :, None])
            kept = SpanResult(total.m[done:], total.l[done:], total.o[done:])
            span = merge_spans(kept, span)
        total = span
    assert total is not None
    out[len(q) - len(total.m) :] = div32(total.o, total.l[..., None])
    return out


def _block_rotated(x: Float32) -> Float32:
    """Heads x [R, heads, head_dim] through the block Hadamard."""
    dim = x.shape[-1]
    return rotate32(x.reshape(-1, dim), hadamard_width(dim)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class ReferenceLinear:
    """A weight [N, K] and its bias [N]."""

    weight: WeightTensor
    bias: Float32 | None = None


def _side_by_side(
    x: Float32, parts: Sequence[ReferenceLinear], residual: Float32 | None = None
) -> Float32:
    """Outputs of the parts beside each other, each added to its columns of residual."""
    outputs, column = [], 0
    for part in parts:
        end = column + part.weight.shape[0]
        own = None if residual is None else residual[:, column:end]
        outputs.append(linear(x, part.weight, part.bias, own))
        column = end
    return np.concatenate(outputs, axis=1)


@dataclasses.dataclass(frozen=True)
class ReferenceLayer:
    """One layer: norms, and linears whose parts read one input and write side by side: q|k|v and
    gate|up, fused along N or each by itself.
    """

    attn_norm: Float32
    ffn_norm: Float32
    qkv: Sequence[ReferenceLinear]
    o: Sequence[ReferenceLinear]
    gate_up: Sequence[ReferenceLinear]
    down: Sequence[ReferenceLinear]


@dataclasses.dataclass(frozen=True)
class ReferenceModel:
    """A whole model in plain arrays; cos and sin are float32 [positions, head_dim / 2]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    cos: Float32
    sin: Float32
    embedding: WeightTensor
    layers: Sequence[ReferenceLayer]
    final_norm: Float32
    head: WeightTensor

    def forward(self, tokens: NDArray[np.int32], kv: KVFormat) -> Float32:
        """Logits of every row of a prompt that starts at position 0: float32 [R, vocabulary]."""
        hidden = lookup(self.embedding, tokens)
        num_rows = len(tokens)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        cos, sin = self.cos[:num_rows, None], self.sin[:num_rows, None]
        for layer in self.layers:
            x = rms_norm(hidden, layer.attn_norm, self.norm_eps)
            qkv = _side_by_side(x, layer.qkv)
            q = rope(qkv[:, :q_size].reshape(num_rows, -1, self.head_dim), cos, sin)
            k = rope(
                qkv[:, q_size : q_size + kv_size].reshape(num_rows, -1, self.head_dim), cos, sin
            )
            v = qkv[:, q_size + kv_size :].reshape(num_rows, -1, self.head_dim)
            if kv.rotates_k:
                q, k = _block_rotated(q), _block_rotated(k)
            rows = KVRows.store(k, v, kv)
            attended = attention(q, rows, np.arange(num_rows)).reshape(num_rows, q_size)
            hidden = _side_by_side(attended, layer.o, hidden)
            x = rms_norm(hidden, layer.ffn_norm, self.norm_eps)
            gate_up = _side_by_side(x, layer.gate_up)
            ffn = gate_up.shape[1] // 2
            x = silu_mul(gate_up[:, :ffn], gate_up[:, ffn:])
            hidden = _side_by_side(x, layer.down, hidden)
        return linear(rms_norm(hidden, self.final_norm, self.norm_eps), self.head)
