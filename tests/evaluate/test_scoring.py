"""Windows score every token once; perplexity, KL and agreement equal a float64 recomputation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.toy_model import make_toy_model
from support.toy_runner import ToyArena, ToyRunner
from trivet.errors import ConfigError
from trivet.evaluate import (
    Corpus,
    Scorer,
    encode_corpora,
    make_windows,
    measure_quality,
    score_windows,
)
from trivet.evaluate.scoring import CHUNK_ROWS, LogSoftmax


@given(
    length=st.integers(1, 60),
    context=st.integers(1, 20),
    stride=st.integers(1, 20),
    bos=st.booleans(),
)
def test_every_token_is_scored_once_in_order(
    length: int, context: int, stride: int, bos: bool
) -> None:
    stride = min(stride, context)
    ids = list(range(length))
    windows = make_windows(ids, context=context, stride=stride, bos_id=99 if bos else None)
    assert [t for w in windows for t in w.target_ids] == (ids if bos else ids[1:])
    for window in windows:
        assert 1 <= len(window.target_ids) <= len(window.input_ids) <= context
        text = [*window.input_ids, window.target_ids[-1]]
        assert text[-len(window.target_ids) :] == window.target_ids
        if bos and context > 1:
            assert window.input_ids[0] == 99


def test_windows_do_not_overlap_when_stride_is_context() -> None:
    windows = make_windows(range(10), context=4, stride=4)
    assert [w.input_ids for w in windows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [w.target_ids for w in windows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(exact / exact.sum(axis=1, keepdims=True))


def _whole_logits(seed: int, ids: list[int]) -> NDArray[np.float32]:
    """Logits of all rows of a text in one chunk, as the scorer would get them in many."""
    scorer = Scorer(ToyRunner(seed=seed), ToyArena(-(-len(ids) // 32)))
    return np.concatenate(list(scorer.chunks(ids, len(ids))))


def test_sums_equal_a_float64_recomputation() -> None:
    ids = [(7 * i * i + 3 * i) % 64 for i in range(2 * CHUNK_ROWS + 30)]
    windows = make_windows(ids, context=100, stride=60)
    base, one = ToyRunner(seed=0), ToyRunner(seed=1)
    base_tally, tallies = score_windows(
        Scorer(base, ToyArena(4)), {"one": Scorer(one, ToyArena(4))}, windows
    )
    nll = base_nll = kl = 0.0
    agreed = count = 0
    for window in windows:
        targets = window.target_ids
        rows = np.arange(len(targets))
        p = _softmax(_whole_logits(0, window.input_ids)[-len(targets) :])
        q = _softmax(_whole_logits(1, window.input_ids)[-len(targets) :])
        base_nll -= float(np.log(p[rows, targets]).sum())
        nll -= float(np.log(q[rows, targets]).sum())
        kl += float((p * (np.log(p) - np.log(q))).sum())
        agreed += int((p.argmax(1) == q.argmax(1)).sum())
        count += len(targets)
    tally = tallies["one"]
    assert tally.tokens == base_tally.tokens == count == len(ids) - 1
    assert tally.nll_sum == pytest.approx(nll, rel=1e-6)
    assert base_tally.nll_sum == pytest.approx(base_nll, rel=1e-6)
    assert tally.kl_sum == pytest.approx(kl, rel=1e-5)
    assert tally.agreed == agreed
    assert tally.perplexity == pytest.approx(math.exp(nll / count), rel=1e-6)


def test_a_small_divergence_is_not_lost_in_float32() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 5000)).astype(np.float32) * 3
    moved = logits + rng.standard_normal(logits.shape).astype(np.float32) * np.float32(0.01)
    p, q = _softmax(logits), _softmax(moved)
    exact = float((p * (np.log(p) - np.log(q))).sum())
    assert LogSoftmax.of(logits).kl_to(LogSoftmax.of(moved)) == pytest.approx(exact, rel=1e-2)
    assert exact < 1e-3


def test_a_model_against_itself_has_no_divergence() -> None:
    model = make_toy_model()
    [encoded] = encode_corpora(
        model.tokenizer, [Corpus("c", "to be or not to be " * 20, "here")], max_tokens=200
    )
    scorer = Scorer(model.runner, model.new_arena(32))
    other = Scorer(make_toy_model().runner, model.new_arena(32))
    quality = measure_quality({"m": scorer}, [encoded], other)["m"].overall
    assert (quality.delta_ppl, quality.mean_kl, quality.top1_agreement) == (0.0, 0.0, 1.0)


def test_max_tokens_counts_scored_tokens_with_and_without_bos() -> None:
    corpus = Corpus("c", "the quick brown fox jumps over the lazy dog " * 10, "here")
    for bos in (None, 5):
        model = make_toy_model(bos=bos)
        [encoded] = encode_corpora(model.tokenizer, [corpus], max_tokens=50, context=16, stride=16)
        assert encoded.num_tokens == 50
        starts = {window.input_ids[0] for window in encoded.windows}
        assert starts == {5} if bos is not None else len(starts) > 1


def test_a_corpus_with_words_longer_than_expected_is_encoded_whole() -> None:
    class Wide:
        """Forty characters to a token."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * (len(text) // 40)

    [encoded] = encode_corpora(Wide(), [Corpus("c", "x" * 40_000, "here")], max_tokens=900)
    assert encoded.num_tokens == 900


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("context", {"context": 0}),
        ("stride", {"context": 8, "stride": 9}),
        ("stride", {"stride": 0}),
    ],
)
def test_settings_out_of_range_are_refused(field: str, settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=field):
        encode_corpora(make_toy_model().tokenizer, [Corpus("c", "abcd", "here")], **settings)


def test_a_corpus_without_two_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        encode_corpora(make_toy_model().tokenizer, [Corpus("tiny", "a", "here")])
