"""The forward of whole tiny models: equal to the numpy reference bit for bit, on every level, for every
format; layer ranges, taps and refused steps.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from native.bits import assert_bits_equal
from native.linear_cases import LEVELS
from native.tiny_model import (
    ALL,
    Runs,
    TinyPacked,
    logits_of,
    make_model,
    random_tokens,
    small_spec,
)
from trivet.config import KVFormat
from trivet.models import ModelSpec
from trivet.native import Arena, StepInput, load_model
from trivet.native.reference import ReferenceModel

SPECS = {
    "grouped": small_spec(),
    "biases": small_spec(qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=False),
    "one-kv-head": small_spec(num_heads=3, num_kv_heads=1, head_dim=32, hidden_size=64),
    "many-per-group": small_spec(num_heads=18, num_kv_heads=1, head_dim=8, num_layers=1),
    "no-groups": small_spec(num_heads=2, num_kv_heads=2, head_dim=64, num_layers=1),
}


@functools.cache
def _model(format: str, spec: str = "grouped") -> tuple[TinyPacked, ReferenceModel]:
    return make_model(format, SPECS[spec])


@functools.cache
def _reference_logits(format: str, spec: str, kv: KVFormat, count: int) -> NDArray[np.float32]:
    return _model(format, spec)[1].forward(random_tokens(count), kv)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("format", "kv"),
    [
        *((format, kv) for format in ALL for kv in (KVFormat.BF16, KVFormat.INT8)),
        *(("w4a8-g32", kv) for kv in KVFormat if kv not in (KVFormat.BF16, KVFormat.INT8)),
    ],
)
def test_every_format_equals_the_reference(format: str, kv: KVFormat, level: str) -> None:
    got = logits_of(_model(format)[0], random_tokens(37), kv=kv, isa=level, threads=2)
    assert_bits_equal(got, _reference_logits(format, "grouped", kv, 37))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spec", sorted(SPECS))
def test_every_shape_equals_the_reference(spec: str, level: str) -> None:
    got = logits_of(_model("bf16", spec)[0], random_tokens(19), isa=level, threads=2)
    assert_bits_equal(got, _reference_logits("bf16", spec, KVFormat.BF16, 19))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kv", [KVFormat.INT8, KVFormat.INT4_FIRST])
def test_several_spans_equal_the_reference(kv: KVFormat, level: str) -> None:
    spec, count = "one-kv-head", 270
    want = _reference_logits("w8a8-g32", spec, kv, count)
    packed = _model("w8a8-g32", spec)[0]
    tokens = random_tokens(count)
    whole = logits_of(packed, tokens, kv=kv, isa=level, threads=2)
    assert_bits_equal(whole, want)
    # One row at the end of two spans: its spans are split among the threads.
    runs = Runs(packed, max_tokens=count, kv=kv, isa=level, threads=2)
    runs.step([(0, tokens[:-1])])
    assert_bits_equal(runs.step([(0, tokens[-1:])]), want[-1:])


def test_an_empty_step_and_no_logits_are_fine() -> None:
    runs = Runs(_model("bf16")[0])
    empty = np.empty(0, np.int32)
    step = StepInput(empty, np.empty((0, 4), np.int32), runs.tables, empty)
    assert runs.model.forward(step, runs.arena) is None
    assert runs.model.logits().shape == (0, 53)
    tokens = random_tokens(3)
    segments = np.array([[0, 3, 0, 0]], np.int32)
    runs.model.forward(StepInput(tokens, segments, runs.tables, empty), runs.arena)
    assert runs.model.logits().shape == (0, 53)


def test_logit_rows_select_rows() -> None:
    packed = _model("w4a8-g32")[0]
    tokens = random_tokens(21)
    whole = logits_of(packed, tokens)
    runs = Runs(packed)
    rows = np.array([0, 7, 20], np.int32)
    segments = np.array([[0, 21, 0, 0]], np.int32)
    runs.model.forward(StepInput(tokens, segments, runs.tables, rows), runs.arena)
    assert_bits_equal(runs.model.logits(), whole[rows])


def test_layer_ranges_compose_to_the_whole() -> None:
    packed = _model("w8a8")[0]
    tokens = random_tokens(9)
    runs = Runs(packed)
    base = StepInput(
        tokens, np.array([[0, 9, 0, 0]], np.int32), runs.tables, np.arange(9, dtype=np.int32)
    )
    hidden = runs.model.forward(dataclasses.replace(base, layers=(0, 1)), runs.arena)
    assert hidden is not None
    assert hidden.shape == (9, 96)
    last = dataclasses.replace(base, layers=(1, 2), hidden=hidden)
    assert runs.model.forward(last, runs.arena) is None
    assert_bits_equal(runs.model.logits(), logits_of(packed, tokens))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("format", ["bf16", "w8a8", "w4a8-g32"])
def test_rows_that_overflow_are_named(format: str, value: float) -> None:
    """Rows before a broken one are sound and keep their bits."""
    packed = _model(format)[0]
    tokens = random_tokens(9)
    runs = Runs(packed)
    base = StepInput(
        tokens, np.array([[0, 9, 0, 0]], np.int32), runs.tables, np.array([0, 3, 4], np.int32)
    )
    hidden = runs.model.forward(dataclasses.replace(base, layers=(0, 1)), runs.arena)
    assert hidden is not None
    last = dataclasses.replace(base, layers=(1, 2), hidden=hidden)
    runs.model.forward(last, runs.arena)
    assert runs.model.nonfinite_logits() == []
    sound = runs.model.logits()
    hidden[4, 17] = value
    runs.model.forward(last, runs.arena)
    assert runs.model.nonfinite_logits() == [2]
    assert_bits_equal(runs.model.logits()[:2], sound[:2])


def test_progress_is_visible_in_the_arena() -> None:
    runs = Runs(_model("bf16")[0])
    assert runs.arena.progress(0) == (0, 0)
    runs.step([(0, random_tokens(3))])
    runs.step([(0, random_tokens(1))])
    assert runs.arena.progress(0) == (2, 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_taps_see_the_inputs_of_the_linears(threads: int) -> None:
    packed, model = _model("bf16")
    runs = Runs(packed, threads=threads)
    taps = runs.model.new_taps()
    points = {"layer.0.attn_in": 96, "layer.1.o_in": 120, "layer.0.ffn_in": 96}
    points |= {"layer.1.down_in": 136, "final": 96}
    for point in points:
        for sink in ("copy", "absmax", "sum_squares", "gram"):
            taps.add(point, sink)
    tokens = random_tokens(13)
    for part in (tokens[:5], tokens[5:]):
        segments = np.array([[0, len(part), runs.lengths[0], 0]], np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        runs.model.forward(StepInput(part, segments, runs.tables, rows), runs.arena, taps)
        runs.lengths[0] += len(part)
    for point, width in points.items():
        copies = taps.copies(point)
        assert [c.shape for c in copies] == [(5, width), (8, width)]
        x = np.concatenate(copies).astype(np.float64)
        np.testing.assert_array_equal(taps.array(point, "absmax"), np.abs(x).max(axis=0))
        np.testing.assert_allclose(taps.array(point, "sum_squares"), (x**2).sum(axis=0), 1e-12)
        np.testing.assert_allclose(taps.array(point, "gram"), x.T @ x, rtol=1e-9, atol=1e-9)
    first = model.layers[0].attn_norm
    assert np.isfinite(first).all()
    assert_bits_equal(runs.model.logits(), logits_of(packed, tokens, threads=threads)[5:])


@pytest.mark.parametrize("point", ["layer.2.o_in", "layer.-1.o_in", "layer.0.final", "o_in", ""])
def test_unknown_tap_points_are_refused(point: str) -> None:
    taps = load_model(_model("bf16")[0], threads=1).new_taps()
    with pytest.raises(ValueError, match="tap point"):
        taps.add(point, "copy")


def _step(**changes: object) -> StepInput:
    base = StepInput(
        tokens=np.array([1, 2, 3], np.int32),
        segments=np.array([[0, 3, 0, 0]], np.int32),
        page_tables=np.array([[1, -1]], np.int32),
        logit_rows=np.array([2], np.int32),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _int(values: list[object]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


BAD_STEPS = {
    "token 53": _step(tokens=_int([1, 53, 3])),
    "token -1": _step(tokens=_int([1, -1, 3])),
    "passes position 600": _step(segments=_int([[0, 3, 598, 0]])),
    "does not follow": _step(segments=_int([[1, 2, 0, 0]])),
    "do not cover": _step(segments=_int([[0, 2, 0, 0]])),
    "page table 1": _step(segments=_int([[0, 3, 0, 1]])),
    "page -1": _step(segments=_int([[0, 3, 31, 0]])),
    "longer page table": _step(segments=_int([[0, 3, 64, 0]])),
    "page 99": _step(page_tables=_int([[99, -1]])),
    "logit rows": _step(logit_rows=_int([2, 2])),
    "layers must lie": _step(layers=(0, 3)),
    "needs hidden": _step(layers=(1, 2)),
    "hidden must be": _step(hidden=np.zeros((3, 95), np.float32)),
    r"\[S, 4\]": _step(segments=_int([[0, 3, 0]])),
}


@pytest.mark.parametrize("message", sorted(BAD_STEPS))
def test_steps_that_do_not_fit_are_refused(message: str) -> None:
    runs = Runs(_model("bf16")[0])
    before = runs.arena.block(0, 0, 1).copy()
    with pytest.raises(ValueError, match=message):
        runs.model.forward(BAD_STEPS[message], runs.arena)
    np.testing.assert_array_equal(runs.arena.block(0, 0, 1), before)


def test_an_arena_of_another_shape_is_refused() -> None:
    model = load_model(_model("bf16")[0], threads=1)
    other = load_model(_model("bf16")[0], threads=1, kv=KVFormat.INT8)
    with pytest.raises(ValueError, match="another model or KV format"):
        model.forward(_step(), Arena(other.kv_geometry(), 2))


def test_weights_outside_the_buffer_are_refused() -> None:
    packed = make_model("bf16")[0]
    tensor = packed.tensors["layers.1.down"]
    packed.tensors["layers.1.down"] = dataclasses.replace(tensor, codes=len(packed.buffer))
    with pytest.raises(ValueError, match="outside the packed weights"):
        load_model(packed, threads=1)
    packed.tensors["layers.1.down"] = dataclasses.replace(tensor, n=95)
    with pytest.raises(ValueError, match="linear_down"):
        load_model(packed, threads=1)


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1, 95], [0, 1, -1]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    packed = make_model("act-order")[0]
    whole = np.array([*order, *range(3, 96)], np.int32)
    assert packed.tensors["layers.0.q"].order is not None
    tensor = dataclasses.replace(packed.tensors["layers.0.q"], order=packed.append(whole))
    packed.tensors["layers.0.q"] = tensor
    with pytest.raises(ValueError, match="name each column once"):
        load_model(packed, threads=1)
    packed = make_model("act-order")[0]
    packed.tensors["head"] = dataclasses.replace(
        packed.tensors["head"], order=packed.append(np.arange(96, dtype=np.int32))
    )
    with pytest.raises(ValueError, match="embedding's columns"):
        load_model(packed, threads=1)


def test_rows_whose_rule_is_not_sound_are_refused() -> None:
    packed = make_model("w8a8+outliers7")[0]
    name = "layers.1.down"
    tensor = packed.tensors[name]
    assert tensor.outliers is not None
    packed.tensors[name] = dataclasses.replace(tensor, hadamard=16)  # K is 136
    with pytest.raises(ValueError, match="hadamard is a power of two"):
        load_model(packed, threads=1)
    for columns in ([0, 1, 2, 3, 4, 5, 136], [0, 1, 2, 2, 4, 5, 6], [-1, 1, 2, 3, 4, 5, 6]):
        other = packed.append(np.array(columns, np.int32))
        packed.tensors[name] = dataclasses.replace(tensor, outliers=other)
        with pytest.raises(ValueError, match="outliers must be columns, ascending"):
            load_model(packed, threads=1)
    for amax in (0.0, -1.0, np.inf, np.nan, 1e-40):
        other = packed.append(np.array([amax], np.float32))
        packed.tensors[name] = dataclasses.replace(tensor, amax=other)
        with pytest.raises(ValueError, match="amax must be a finite number above zero"):
            load_model(packed, threads=1)


def test_numerics_id_differs_by_kv_format() -> None:
    packed = _model("bf16")[0]
    ids = {load_model(packed, threads=1, kv=kv).numerics_id for kv in KVFormat}
    assert len(ids) == len(KVFormat)


def test_times_are_counted_by_class() -> None:
    runs = Runs(_model("bf16")[0])
    runs.step([(0, random_tokens(5))])
    times = runs.model.times_s()
    assert {"linear_qkv", "attention", "head", "wait", "prepare"} <= set(times)
    assert times["linear_gate_up"] > 0.0
    runs.model.reset_times()
    assert set(runs.model.times_s().values()) == {0.0}


@pytest.mark.parametrize("rows", [1, 40])
def test_times_do_not_overlap(rows: int) -> None:
    """Waiting belongs to no class, and the whole is not more than the calls took."""
    runs = Runs(_model("bf16")[0], threads=2, max_tokens=320)
    begin = time.perf_counter()
    for _ in range(8):
        runs.step([(0, random_tokens(rows))])
    seconds = time.perf_counter() - begin
    times = runs.model.times_s()
    assert min(times.values()) >= 0.0
    assert 0.0 < sum(times.values()) <= seconds


def test_times_are_the_clock_s_seconds() -> None:
    """The counter behind them runs at the rate it was found to run at."""
    runs = Runs(_model("bf16")[0], max_tokens=600)
    shares = []
    for _ in range(6):
        runs.model.reset_times()
        tokens = random_tokens(90)
        begin = time.perf_counter()
        runs.step([(0, tokens)])
        seconds = time.perf_counter() - begin
        shares.append(sum(runs.model.times_s().values()) / seconds)
    assert max(shares) < 1.001
    assert max(shares) > 0.8  # the rest of a call is small beside 90 rows


def test_timers_can_be_switched_off() -> None:
    runs = Runs(_model("bf16")[0], threads=2)
    runs.model.set_timers(False)
    off = runs.step([(0, random_tokens(5))])
    assert set(runs.model.times_s().values()) == {0.0}
    on = Runs(_model("bf16")[0], threads=2).step([(0, random_tokens(5))])
    np.testing.assert_array_equal(off, on)
    runs.model.set_timers(True)
    runs.step([(0, random_tokens(1))])
    assert runs.model.times_s()["linear_down"] > 0.0


def test_a_spec_is_described_by_its_numbers() -> None:
    spec: ModelSpec = small_spec()
    model = load_model(_model("bf16")[0], threads=1)
    assert (model.vocab_size, model.num_layers, model.hidden_size) == (53, 2, 96)
    assert model.max_positions == spec.max_positions
    assert model.eos_ids == frozenset({2})
    geometry = model.kv_geometry()
    assert geometry.page_bytes == 2 * 2 * (2 * 32 * 20 * 2)
