"""What steps must read and multiply, and the shares of the ceilings they reach."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench.conftest import SHAPE
from support.tiny_models import build_folder
from trivet.bench.ceiling import (
    CEILING_TOO_LOW,
    Ceilings,
    StepCosts,
    nominal_mfu,
    note_of_shares,
    phase_figures,
    step_costs,
)
from trivet.bench.matrix_rate import ARITHMETICS, matrix_rate
from trivet.bench.profile import PARTS, Phase
from trivet.cli.bench import _phase_table
from trivet.cli.output import Output
from trivet.config import KVFormat, ModelConfig
from trivet.loader import load_model
from trivet.native import isa_report

COSTS = StepCosts(
    layer_bytes=1000,
    head_bytes=200,
    kv_bytes=10,
    layer_macs=2000,
    head_macs=400,
    attention_macs=6,
    num_layers=2,
    arithmetic="int8",
)
CEILINGS = Ceilings(bytes_s=1e4, best_bytes_s=2e4, int8_macs_s=1e5, bf16_macs_s=5e4)
PREFILL = Phase(steps=2, logit_steps=1, rows=30, logit_rows=1, context=50, pairs=465, wall_s=4.0)


def _decode(wall_s: float) -> Phase:
    parts = {part: wall_s / len(PARTS) for part in PARTS}
    return Phase(5, 5, 5, 5, 160, 160, wall_s, parts)


@pytest.mark.parametrize(("weights", "arithmetic"), [("w8a8", "int8"), ("bf16", "bf16")])
def test_costs_of_a_model_follow_from_its_shape(
    tiny_model: Path, weights: str, arithmetic: str
) -> None:
    model = load_model(ModelConfig(model=str(tiny_model), weights=weights, kv=KVFormat.INT8))
    costs = step_costs(model)
    hidden, heads, kv_heads, dim, ffn = 96, 3, 1, 32, 160
    qkv, gate_up = (heads + 2 * kv_heads) * dim * hidden, 2 * ffn * hidden
    assert costs.layer_macs == SHAPE.layers * (qkv + hidden * heads * dim + gate_up + ffn * hidden)
    assert costs.head_macs == SHAPE.vocab * hidden
    assert costs.attention_macs == 2 * SHAPE.layers * heads * dim
    assert costs.kv_bytes == SHAPE.layers * kv_heads * 2 * (dim + 4)
    assert costs.arithmetic == arithmetic
    assert costs.step_bytes == model.packed.weight_bytes  # tied: the embedding is the head
    assert costs.head_bytes == model.packed.tensors["head"].num_bytes


def test_an_embedding_of_its_own_is_not_read(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "untied", dataclasses.replace(SHAPE, tied=False))
    model = load_model(ModelConfig(model=str(folder), weights="bf16"))
    embed = model.packed.tensors["embed"].num_bytes
    assert step_costs(model).step_bytes == model.packed.weight_bytes - embed


def test_work_is_counted_in_bytes_and_multiply_adds() -> None:
    assert COSTS.bytes_of(PREFILL) == 2 * 1000 + 200 + 50 * 10
    assert COSTS.macs_of(PREFILL) == (30 * 2000 + 400, 465 * 6)
    reading, multiplying = CEILINGS.seconds_of(COSTS, PREFILL)
    assert reading == 2700 / 1e4
    assert multiplying == pytest.approx(60400 / 1e5 + 2790 / 5e4)
    middle = CEILINGS.between(Ceilings(3e4, 4e4, 3e5, 15e4))
    assert middle == Ceilings(2e4, 3e4, 2e5, 1e5)


def test_figures_are_medians_of_shares_and_means_of_seconds() -> None:
    runs = [{"prefill": PREFILL, "decode": _decode(wall)} for wall in (1.0, 2.0, 6.0)]
    figures = phase_figures(COSTS, runs, [CEILINGS] * 3)
    decode = figures["decode"]
    assert decode is not None
    moved = 5 * 1200 + 160 * 10
    assert (decode["steps"], decode["rows"], decode["moved_bytes"]) == (5, 5, moved)
    assert decode["wall_s"] == 3.0
    assert sum(decode["parts_s"].values()) == pytest.approx(decode["wall_s"])
    assert sum(decode["shares"].values()) == pytest.approx(1.0)
    assert decode["mbu"] == pytest.approx(moved / (2.0 * 1e4))
    low, high = decode["spread"]["mbu"]
    assert (low, high) == (pytest.approx(moved / 6e4), pytest.approx(moved / 1e4))
    assert figures["prefill"] is not None
    assert figures["prefill"]["mfu"] == pytest.approx((0.604 + 0.0558) / 4.0)
    assert nominal_mfu(figures["prefill"], 1e5) == pytest.approx(2 * 63190 / 4.0 / 1e5)
    assert nominal_mfu(figures["prefill"], None) is None


def test_shares_above_the_ceiling_are_marked() -> None:
    figures = phase_figures(COSTS, [{"prefill": PREFILL, "decode": _decode(0.3)}], [CEILINGS])
    prefill, decode = figures["prefill"], figures["decode"]
    assert prefill is not None
    assert decode is not None
    assert prefill["mfu"] < 1
    assert prefill["note"] is None
    assert decode["mbu"] > 1
    assert decode["mfu"] < 1
    assert decode["note"] == f"mbu: {CEILING_TOO_LOW}"
    assert note_of_shares({"mbu": 1.01, "mfu": 2.0}) == f"mbu, mfu: {CEILING_TOO_LOW}"
    assert note_of_shares({"mbu": None, "mfu": 1.0}) is None


def test_the_table_marks_shares_above_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    figures = phase_figures(COSTS, [{"prefill": PREFILL, "decode": _decode(0.3)}], [CEILINGS])
    decode = figures["decode"]
    assert decode is not None
    _phase_table(Output(False), figures)
    shown = capsys.readouterr()
    assert f"{decode['mbu']:.1%}*" in shown.out
    assert f"* {CEILING_TOO_LOW}" in shown.err
    assert shown.out.count("*") == 1


def test_a_phase_without_steps_has_no_figures() -> None:
    runs = [{"prefill": PREFILL, "decode": Phase()}]
    assert phase_figures(COSTS, runs, [CEILINGS])["decode"] is None


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_higher_level_multiplies_faster(arithmetic: str) -> None:
    """No level that a model would be given is slower than the plain loops."""
    usable = isa_report().usable
    rates = {level: matrix_rate(level, arithmetic, 1, 0.02) for level in usable}
    assert min(rates.values()) > 0
    assert rates[usable[-1]] >= rates["generic"]


def test_two_threads_are_both_counted() -> None:
    level = isa_report().usable[-1]
    assert matrix_rate(level, "int8", 2, 0.02) > 0
