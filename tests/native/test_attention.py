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
from trivet.native.reference_linear import div32, from_bf16, to_bf16

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
            if kv is KVFormat.BF16:
                raw = [to_bf16(x).view(np.uint8) for x in codes]
                scales = [0.0, 0.0]
            else:
                assert rows.k_scale is not None
                assert rows.v_scale is not None
                raw = [x.astype(np.int8).view(np.uint8) for x in codes]
                scales = [float(rows.k_scale[position, 0]), float(rows.v_scale[position, 0])]
            page, slot = divmod(position, PAGE)
            _core.kernel_store_token(
                KV_VALUES[kv], raw[0], scales[0], raw[1], scales[1], slot, pages[page]
            )
        return cls(pages, rows)


def _span(
    level: str, q: NDArray[np.float32], keys: Keys, valid: list[int], kv: KVFormat
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
def test_int8_and_bf16_pages_have_the_documented_size(kv: KVFormat) -> None:
    assert page_block_bytes(64, KVFormat.BF16) == 2 * 32 * 64 * 2
    assert page_block_bytes(64, KVFormat.INT8) == 2 * 32 * 64 + 2 * 32 * 4
    assert page_block_bytes(6, kv) % 64 == 0
