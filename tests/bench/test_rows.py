"""`--rows`: step time of n rows over the smaller of one row's and the time to read its bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from trivet.bench.ceiling import StepCosts
from trivet.bench.process import EngineProcess
from trivet.bench.rows import step_time_ratios

COSTS = StepCosts(
    layer_bytes=900, head_bytes=100, kv_bytes=10, layer_macs=1, head_macs=1, attention_macs=1,
    num_layers=1, arithmetic="int8",
)  # fmt: skip
FACTS = {"step_bytes": COSTS.step_bytes, "threads": 1, "costs": dataclasses.asdict(COSTS)}
MOVED = 1000 + 129 * 10


class FakeProcess:
    """Answers `step_rows` with 1 s + 0.1 s a row; the first of a round takes thrice as long."""

    def __init__(self) -> None:
        self.orders: list[list[int]] = []

    def call(self, name: str, *, rows: list[int], rounds: int) -> list[list[float]]:
        assert name == "step_rows"
        self.orders.append(rows)
        return [[n, (1 + 0.1 * n) * (3 if index == 0 else 1)] for index, n in enumerate(rows)]


def _measure(
    monkeypatch: pytest.MonkeyPatch, bandwidth: float, counts: tuple[int, ...]
) -> tuple[dict[str, Any], FakeProcess]:
    process = FakeProcess()
    monkeypatch.setattr("trivet.native.stream_rates", lambda num_bytes, threads: [bandwidth] * 3)
    return step_time_ratios(cast("EngineProcess", process), counts, FACTS), process


def test_ratios_to_the_one_row_step(monkeypatch: pytest.MonkeyPatch) -> None:
    result, process = _measure(monkeypatch, MOVED / 5.0, (1, 4, 16))
    assert result["row_times"]["floor"] == "one row"
    assert result["step_time_ratio"] == pytest.approx({"1": 1.0, "4": 1.4 / 1.1, "16": 2.6 / 1.1})
    assert result["row_times"]["rounds"] == len(process.orders) >= 5
    assert {order[0] for order in process.orders} == {1, 4, 16}  # no count is always the first
    assert all(sorted(order) == [1, 4, 16] for order in process.orders)


def test_ratios_to_reading_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-row step slower than the memory does not make many rows look cheap."""
    result, _ = _measure(monkeypatch, MOVED / 0.5, (4,))
    assert result["row_times"]["floor"] == "stream bandwidth"
    assert result["row_times"]["floor_s"] == pytest.approx(0.5)
    assert result["row_times"]["moved_bytes"] == MOVED
    assert result["step_time_ratio"] == pytest.approx({"4": 1.4 / 0.5})
    assert set(result["row_times"]["seconds"]) == {"1", "4"}
    assert result["row_times"]["seconds"]["1"]["high"] == pytest.approx(3.3)
