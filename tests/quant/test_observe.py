"""The streamed network is the network: its hidden states give the logits of the float reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.tiny_models import build_folder
from trivet.checkpoint import resolve_model
from trivet.models import Model, open_model
from trivet.models.reference import Float32, float_logits, to_float
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.methods.folds import fold, free_width
from trivet.quant.observe import POINTS, InputStats, LayerWeights, Stream, make_batches

VARIANTS = ["llama3", "llama31", "smollm2", "biases", "qwen25", "linear"]


def model_of(path: Path, variant: str) -> Model:
    return open_model(resolve_model(build_folder(path / variant, variant)))


def sequences(vocab: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def run_through(stream: Stream, layers: list[LayerWeights]) -> None:
    for weights in layers:
        stream.add_linear(stream.attention(weights), weights, "o")
        stream.add_linear(stream.gated(weights), weights, "down")


def logits_of(model: Model, hidden: Float32) -> Float32:
    spec = model.spec
    scale = 1 / np.sqrt(np.square(hidden).mean(axis=1, keepdims=True) + spec.norm_eps)
    normed = hidden * scale * model.norm("final_norm")
    table = to_float(model.matrix("embed" if spec.tied_embeddings else "head"))
    logits: Float32 = (normed @ table.T).astype(np.float32)
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stream_is_the_network(tmp_path: Path, variant: str) -> None:
    model = model_of(tmp_path, variant)
    texts = sequences(model.spec.vocab_size, (40, 9, 33))
    with single_threaded(), Workers(2) as workers:
        stream = Stream(model, texts[:2], texts[2:], workers)
        run_through(stream, [LayerWeights.read(model, i) for i in range(model.spec.num_layers)])
    rows = np.concatenate(stream.hidden)
    begin = 0
    for text in texts:
        want = float_logits(model, text)
        got = logits_of(model, rows[begin : begin + len(text)])
        begin += len(text)
        assert np.abs(got - want).max() <= 0.06 * np.abs(want).max()  # attention is bf16


@pytest.mark.parametrize("variant", ["smollm2", "biases", "qwen25"])
@pytest.mark.parametrize("point", POINTS)
def test_a_fold_keeps_the_function(tmp_path: Path, variant: str, point: str) -> None:
    """Before anything is rounded: what a forgotten fold or a wrong head would break."""
    model = model_of(tmp_path, variant)
    [text] = sequences(model.spec.vocab_size, (40,))
    rng = np.random.default_rng(1)
    ends = []
    for folded in (False, True):
        layers = [LayerWeights.read(model, i) for i in range(model.spec.num_layers)]
        if folded:
            for weights in layers:
                width = free_width(model.spec, point)
                factors = np.exp(rng.standard_normal(width) * 0.5).astype(np.float32)
                fold(weights, model.spec, point, factors)
        with single_threaded(), Workers(1) as workers:
            stream = Stream(model, [text], [text[:8]], workers)
            run_through(stream, layers)
        ends.append(stream.hidden[0])
    assert np.abs(ends[0] - ends[1]).max() <= 0.03 * np.abs(ends[0]).max()


def test_sums_do_not_depend_on_threads_and_padding_is_never_there(tmp_path: Path) -> None:
    model = model_of(tmp_path, "smollm2")
    lengths = tuple(range(20, 250, 3))
    texts = sequences(model.spec.vocab_size, lengths)
    weights = LayerWeights.read(model, 0)
    found = []
    for threads in (1, 3):
        with single_threaded(), Workers(threads) as workers:
            stream = Stream(model, texts, texts[:4], workers)
            seen, held, _ = stream.observe(stream.gated(weights), model.spec.ffn_size)
        assert seen.tokens == sum(lengths)
        assert held.tokens == sum(lengths[:4])
        found.append(seen)
    np.testing.assert_array_equal(found[0].gram, found[1].gram)
    np.testing.assert_array_equal(found[0].absmax, found[1].absmax)


def test_sums_are_the_sums() -> None:
    x = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)
    sums = InputStats.of(x[:10], sizes=True)
    sums.add(InputStats.of(x[10:], sizes=True))
    np.testing.assert_allclose(sums.gram, x.astype(float).T @ x.astype(float), rtol=1e-5)
    np.testing.assert_array_equal(sums.absmax, np.abs(x).max(axis=0))
    np.testing.assert_allclose(sums.abs_sum, np.abs(x).sum(axis=0), rtol=1e-5)


def test_batches_hold_whole_sequences() -> None:
    batches = make_batches([[0] * n for n in (1200, 1200, 200, 4000, 10)], False)
    assert [batch.lengths for batch in batches] == [(1200,), (1200, 200), (4000,), (10,)]
