"""Attention over page blocks: every level equals the reference bit for bit, and nothing that a row does
not see can reach it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from trivet.config import KVFormat
from trivet.native import _core, reference
from trivet.native.arena import KV_VALUES, page_block_bytes
from trivet.native.reference import KVRows, SpanResult
from trivet.native.reference_linear import (
    div32,
    from_bf16,
    quantize_fp8,
    quantize_int4,
    rotate32,
    to_bf16,
)
from trivet.native.weights import hadamard_width

PAGE = 32


@dataclasses.dataclass
class Keys:
    """``count`` keys of one KV head as page blocks and as the reference's rows."""

    pages: NDArray[np.uint8]
    rows: KVRows

    @classmethod
    def random(cls, count: int, dim: int, kv: KVFormat, stale: int = 0) -> Keys:
        """Random keys; slots beyond them hold the byte ``stale``."""
        rng = np.random.RandomState(count + dim)
        k, v = rng.standard_normal((2, count, 1, dim)).astype(np.float32)
        return cls.store(k, v, kv, stale)

    @classmethod
    def store(
        cls, k: NDArray[np.float32], v: NDArray[np.float32], kv: KVFormat, stale: int
    ) -> Keys:
        count, _, dim = k.shape
        rows = KVRows.store(k, v, kv)
        pages = np.full((-(-count // PAGE), page_block_bytes(dim, kv)), stale, np.uint8)
        for position in range(count):
            codes = [rows.k[position, 0], rows.v[position, 0]]
            scales = [0.0, 0.0]
            if rows.k_scale is not None and rows.v_scale is not None:
                scales = [float(rows.k_scale[position, 0]), float(rows.v_scale[position, 0])]
            raw = [_code_bytes(x, kv, position) for x in codes]
            page, slot = divmod(position, PAGE)
            _core.kernel_store_token(
                KV_VALUES[kv],
                raw[0],
                scales[0],
                raw[1],
                scales[1],
                slot,
                position == 0,
                pages[page],
            )
        return cls(pages, rows)


# The values of the e4m3 codes 0..126 (bits 0.0000.000 to 0.1111.110), by the format's definition.
E4M3 = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)


def _code_bytes(values: NDArray[np.float32], kv: KVFormat, position: int) -> NDArray[np.uint8]:
    """What a page stores of the values of codes."""
    if kv is KVFormat.BF16 or (kv.keeps_first and position == 0):
        return to_bf16(values).view(np.uint8)
    if kv.codes == "fp8":
        codes = np.searchsorted(E4M3, np.abs(values))
        assert (E4M3[codes] == np.abs(values)).all(), "values of e4m3 codes"
        return (codes | np.signbit(values) << 7).astype(np.uint8)
    return values.astype(np.int8).view(np.uint8)


def _span(
    level: str,
    q: NDArray[np.float32],
    keys: Keys,
    valid: list[int],
    kv: KVFormat,
    *,
    is_first: bool = True,
) -> SpanResult:
    """The kernel on query vectors q [R, group, dim]."""
    rows, group, dim = q.shape
    m, total = np.empty((2, rows * group), np.float32)
    o = np.empty((rows * group, dim), np.float32)
    _core.kernel_attention_span(
        level,
        KV_VALUES[kv],
        to_bf16(q.reshape(-1, dim)),
        group,
        np.array(valid, np.int32),
        keys.pages,
        is_first,
        float(np.float32(1 / np.sqrt(np.float64(dim)))),
        m,
        total,
        o,
    )
    shape = (rows, group)
    return SpanResult(m.reshape(shape), total.reshape(shape), o.reshape(*shape, dim))


def _reference(q: NDArray[np.float32], keys: Keys, valid: list[int]) -> SpanResult:
    rounded = from_bf16(to_bf16(q))
    return reference.attend_span(rounded, keys.rows, 0, valid[-1], np.array(valid, np.intp))


def _assert_spans_equal(got: SpanResult, want: SpanResult) -> None:
    assert_bits_equal(got.m, want.m)
    assert_bits_equal(got.l, want.l)
    assert_bits_equal(got.o, want.o)


CASES = [
    (2, 1, [1]),
    (8, 3, [1, 2, 3]),
    (20, 2, [30, 31, 32, 33, 34]),
    (64, 3, [255]),
    (64, 3, [60, 61, 62, 63, 64]),
    (64, 4, [256, 256, 256]),
    (48, 1, [224, 225, 226]),
    (80, 18, [97]),
    (128, 8, [96, 97]),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize(("dim", "group", "valid"), CASES)
def test_every_level_equals_the_reference(
    level: str, kv: KVFormat, dim: int, group: int, valid: list[int]
) -> None:
    keys = Keys.random(valid[-1], dim, kv)
    q = np.random.RandomState(7).standard_normal((len(valid), group, dim)).astype(np.float32)
    q *= np.float32(2.0)
    _assert_spans_equal(_span(level, q, keys, valid, kv), _reference(q, keys, valid))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize("valid", [[1], [33], [64], [37, 38, 39], [63, 64, 65]])
def test_stale_slots_take_no_part(level: str, kv: KVFormat, valid: list[int]) -> None:
    """A recycled page is full of NaN bits beyond the keys that are there."""
    dim = 32
    q = np.random.RandomState(8).standard_normal((len(valid), 2, dim)).astype(np.float32)
    clean = _span(level, q, Keys.random(valid[-1], dim, kv), valid, kv)
    stale = _span(level, q, Keys.random(valid[-1], dim, kv, stale=0xFF), valid, kv)
    _assert_spans_equal(stale, clean)
    assert np.isfinite(clean.o).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_later_token_cannot_reach_an_earlier_row(level: str, bad: float) -> None:
    dim, valid = 32, [39, 40, 41, 42]
    rng = np.random.RandomState(9)
    k, v = rng.standard_normal((2, valid[-1], 1, dim)).astype(np.float32)
    q = rng.standard_normal((len(valid), 3, dim)).astype(np.float32)
    clean = _span(level, q, Keys.store(k, v, KVFormat.BF16, 0), valid, KVFormat.BF16)
    k[40], v[40] = bad, bad
    spoiled = _span(level, q, Keys.store(k, v, KVFormat.BF16, 0), valid, KVFormat.BF16)
    for row, keys in enumerate(valid):
        if keys <= 40:
            assert_bits_equal(spoiled.o[row], clean.o[row])
        else:
            assert np.isnan(spoiled.o[row]).any()


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_does_not_depend_on_its_neighbours(level: str) -> None:
    dim, valid = 64, list(range(61, 66))
    keys = Keys.random(valid[-1], dim, KVFormat.BF16)
    q = np.random.RandomState(10).standard_normal((len(valid), 3, dim)).astype(np.float32)
    together = _span(level, q, keys, valid, KVFormat.BF16)
    for row, count in enumerate(valid):
        alone = _span(level, q[row : row + 1], keys, [count], KVFormat.BF16)
        assert_bits_equal(alone.o[0], together.o[row])
        assert_bits_equal(alone.l[0], together.l[row])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [2, 7, 16, 20, 64])
def test_merge_and_finish_equal_the_reference(level: str, dim: int) -> None:
    rng = np.random.RandomState(dim)
    first, second = (
        SpanResult(
            rng.standard_normal(5).astype(np.float32) * np.float32(4.0),
            rng.uniform(1, 9, 5).astype(np.float32),
            rng.standard_normal((5, dim)).astype(np.float32),
        )
        for _ in range(2)
    )
    second.m[0] = first.m[0]
    want = reference.merge_spans(first, second)
    m, total, o = first.m.copy(), first.l.copy(), first.o.copy()
    _core.kernel_attention_merge(level, second.m, second.l, second.o, m, total, o)
    _assert_spans_equal(SpanResult(m, total, o), want)
    out = np.empty_like(o)
    _core.kernel_attention_finish(level, total, o, out)
    assert_bits_equal(out, div32(want.o, want.l[:, None]))


def test_reference_is_attention() -> None:
    """The whole, over two spans, against softmax in float64 (bf16 P leaves three digits)."""
    rng = np.random.RandomState(11)
    count, dim = 300, 16
    k, v = rng.standard_normal((2, count, 1, dim)).astype(np.float32)
    q = rng.standard_normal((3, 2, dim)).astype(np.float32)
    positions = np.array([254, 255, 299], np.intp)
    rows = KVRows.store(k, v, KVFormat.BF16)
    got = reference.attention(q, rows, positions)
    wide_q = from_bf16(to_bf16(q)).astype(np.float64)
    for row, position in enumerate(positions):
        scores = wide_q[row] @ rows.k[: position + 1, 0].T.astype(np.float64) / np.sqrt(dim)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        want = p @ rows.v[: position + 1, 0].astype(np.float64) / p.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got[row], want, atol=5e-3)


@pytest.mark.parametrize("kv", list(KVFormat))
def test_pages_have_the_documented_size(kv: KVFormat) -> None:
    assert page_block_bytes(64, KVFormat.BF16) == 2 * 32 * 64 * 2
    assert page_block_bytes(64, KVFormat.INT8) == 2 * 32 * 64 + 2 * 32 * 4
    assert page_block_bytes(64, KVFormat.FP8) == page_block_bytes(64, KVFormat.INT8)
    assert page_block_bytes(64, KVFormat.INT4) == 32 * 64 + 2 * 32 * 4
    assert page_block_bytes(64, KVFormat.INT4_FIRST) == 32 * 64 + 2 * 32 * 4 + 2 * 64 * 2
    assert page_block_bytes(6, kv) % 64 == 0


def _extreme_rows() -> NDArray[np.float32]:
    """Rows of ordinary values, outliers, ties, zeros, tiny and huge values, infinities and NaN."""
    rng = np.random.RandomState(5)
    x = rng.standard_normal((16, 64)).astype(np.float32)
    x[1, 7], x[2, 9] = 50.0, -50.0
    x[3] = rng.randint(-900, 901, 64) / 2.0
    x[3, 0] = 448.0
    x[4] = rng.randint(-16, 17, 64) / 2.0
    x[4, :2] = -8.0, 8.0
    x[5] = 0.0
    x[6] = -0.0
    x[7] = x[0] * np.float32(1e-38)
    x[8] = x[0] * np.float32(1e37)
    x[9, 3], x[10, 3], x[11, 3], x[12, 3] = np.nan, np.inf, -np.inf, 1e-40
    x[13] = 448.0 * 2.0 ** -rng.uniform(0, 20, 64)
    x[14] = np.float32(2.0**-126)
    return x


@pytest.mark.parametrize("kv", [KVFormat.FP8, KVFormat.INT4])
def test_codes_of_pages_equal_the_reference(kv: KVFormat) -> None:
    x = _extreme_rows()
    codes, scales = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    _core.kernel_kv_codes(KV_VALUES[kv], x, codes, scales)
    want, want_scales = (quantize_fp8 if kv is KVFormat.FP8 else quantize_int4)(x)
    assert_bits_equal(scales, want_scales[:, 0])
    if kv is KVFormat.INT4:
        assert (codes.view(np.int8) == want).all()
        assert (want[3:5].min(axis=1) == -8).all()
    else:
        assert (codes & 0x7F < 127).all(), "no NaN code"
        got = np.where(codes >= 128, -E4M3[codes & 0x7F], E4M3[codes & 0x7F])
        assert_bits_equal(got.astype(np.float32), want)


def test_fp8_codes_are_the_nearest() -> None:
    x = np.random.RandomState(6).standard_normal((50, 64)).astype(np.float32)
    codes, scales = quantize_fp8(x)
    grid = np.concatenate([-E4M3[::-1], E4M3])
    wanted = x.astype(np.float64) / scales
    error = np.abs(codes - wanted)
    best = np.abs(wanted[..., None] - grid).min(axis=-1)
    np.testing.assert_allclose(error, best, atol=2e-4)  # the product with the inverse rounds too


def test_computed_fp8_scales_are_closer_than_none() -> None:
    """K with columns beyond 448, as some models have it: without a scale they are cut off."""
    rng = np.random.RandomState(14)
    x = rng.standard_normal((100, 64)).astype(np.float32)
    x[:, [3, 35]] *= np.float32(600.0)
    codes, scales = quantize_fp8(x)
    nearest = np.abs(np.minimum(np.abs(x), 448.0)[..., None] - E4M3).argmin(axis=-1)
    plain = np.copysign(E4M3[nearest], x)
    assert np.linalg.norm(codes * scales - x) < 0.25 * np.linalg.norm(plain - x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [2, 4, 6, 8, 20, 64, 128, 192])
def test_the_block_rotation_equals_the_reference(level: str, dim: int) -> None:
    x = np.random.RandomState(dim).standard_normal((5, dim)).astype(np.float32)
    width = hadamard_width(dim)
    got = np.empty_like(x)
    _core.kernel_rotate(level, x, width, got)
    assert_bits_equal(got, rotate32(x, width))
    again = np.empty_like(x)
    _core.kernel_rotate(level, got, width, again)
    np.testing.assert_allclose(again, x, atol=1e-6)


def test_rotation_keeps_scores_and_cuts_the_error_of_outliers() -> None:
    """K with a few large columns, as models have it: rotated, int4 is at least twice as close."""
    rng = np.random.RandomState(12)
    k = rng.standard_normal((200, 64)).astype(np.float32)
    k[:, [3, 35]] *= np.float32(12.0)
    q = rng.standard_normal((7, 64)).astype(np.float32)
    turned_k, turned_q = rotate32(k, 64), rotate32(q, 64)
    np.testing.assert_allclose(turned_q @ turned_k.T, q @ k.T, rtol=1e-3, atol=1e-3)

    def error(rows: NDArray[np.float32]) -> float:
        codes, scales = quantize_int4(rows)
        return float(np.linalg.norm(codes * scales - rows))

    assert error(turned_k) < 0.5 * error(k)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", [KVFormat.INT8_FIRST, KVFormat.FP8_FIRST, KVFormat.INT4_FIRST])
def test_only_the_first_span_has_a_first_token(level: str, kv: KVFormat) -> None:
    """In later spans what lies beside slot 0 means nothing."""
    dim, valid = 32, [40]
    keys = Keys.random(valid[-1], dim, KVFormat(kv.codes))
    wider = np.full((2, page_block_bytes(dim, kv)), 0xFF, np.uint8)
    wider[:, : keys.pages.shape[1]] = keys.pages
    q = np.random.RandomState(13).standard_normal((1, 2, dim)).astype(np.float32)
    want = _span(level, q, keys, valid, KVFormat(kv.codes))
    got = _span(level, q, Keys(wider, keys.rows), valid, kv, is_first=False)
    _assert_spans_equal(got, want)
