"""The machine's roofline: measured once, kept, measured again when something it depends on changed."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet.bench import roofline
from trivet.bench.ceiling import StepCosts
from trivet.bench.machine import busy_seconds
from trivet.bench.matrix_rate import ARITHMETICS, matrix_rate
from trivet.bench.roofline import measure, thread_counts
from trivet.errors import ConfigError
from trivet.native import isa_report

BYTES = 4 << 20


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and measurements no longer than a test needs."""
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    quick = functools.partial(matrix_rate, budget_s=0.005)
    monkeypatch.setattr(roofline, "matrix_rate", quick)
    monkeypatch.setattr(roofline, "_ROUNDS", 1)
    monkeypatch.setattr(roofline, "_RUNNING_LOOPS", 20)
    monkeypatch.setattr(roofline, "_ASLEEP_LOOPS", 5)
    monkeypatch.setattr(roofline, "busy_seconds", lambda: None)  # other tests run beside this one


def test_everything_is_measured(tmp_path: Path) -> None:
    shares: list[float] = []
    measured = measure(BYTES, 2, progress=shares.append)
    line, report = measured.roofline, isa_report()
    assert not measured.is_cached
    assert measured.path is not None
    assert measured.path.parent == tmp_path / "cache"
    assert sum(shares) == pytest.approx(1.0)
    assert (line.threads, line.isa) == (2, report.active)
    assert {(s.num_bytes, s.threads) for s in line.streams} == {(BYTES, 1), (BYTES, 2)}
    wanted = {(lv, a, t) for lv in report.usable for a in ARITHMETICS for t in (1, 2)}
    assert {(m.level, m.arithmetic, m.threads) for m in line.matrices} == wanted
    assert [one.threads for one in line.handovers] == [1, 2]
    assert min(stream.bytes_s for stream in line.streams) > 0
    assert min(rate.macs_s for rate in line.matrices) > 0
    assert min(min(one.running_s, one.asleep_s) for one in line.handovers) > 0


def test_it_is_measured_once() -> None:
    first = measure(BYTES, 1)
    again = measure(BYTES, 1)
    assert again.is_cached
    assert again.roofline == first.roofline
    fresh = measure(BYTES, 1, fresh=True)
    assert not fresh.is_cached
    assert measure(BYTES, 1).roofline == fresh.roofline


def test_another_size_is_added() -> None:
    first = measure(BYTES, 1).roofline
    both = measure(2 * BYTES, 1)
    assert not both.is_cached
    assert both.roofline.matrices == first.matrices
    assert both.roofline.streams[:1] == first.streams
    assert both.roofline.bytes_s(2 * BYTES) > 0
    assert both.roofline.bytes_s(BYTES) == first.bytes_s(BYTES)
    assert measure(BYTES, 1).is_cached
    assert measure(2 * BYTES, 1).is_cached


def test_other_threads_and_levels_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(BYTES, 1)
    assert not measure(BYTES, 2).is_cached
    monkeypatch.setenv("TRIVET_ISA", "generic")
    forced = measure(BYTES, 1)
    assert not forced.is_cached or isa_report().usable == ("generic",)
    assert forced.roofline.isa == "generic"


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": 1}', b"[]"])
def test_a_damaged_file_is_measured_again(content: bytes) -> None:
    path = measure(BYTES, 1).path
    assert path is not None
    path.write_bytes(content)
    assert not measure(BYTES, 1).is_cached
    assert measure(BYTES, 1).is_cached
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_place_it_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "file" / "below"))
    measured = measure(BYTES, 1)
    assert measured.path is None
    assert measured.roofline.bytes_s(BYTES) > 0
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TRIVET_CACHE"):
        measure(BYTES, 1)


def _busy(share: float) -> Iterator[tuple[float, float]]:
    """What CPUs have done when others use so much of them: a call after every 1000 seconds."""
    return ((1000 * share * call, 1000.0 * call) for call in itertools.count())


def test_what_a_busy_machine_gives_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(roofline, "busy_seconds", _busy(0.4).__next__)
    measured = measure(BYTES, 1)
    assert measured.path is None
    assert measured.not_kept is not None
    assert "other processes used 40% of the CPUs" in measured.not_kept
    assert measured.roofline.conditions.load == pytest.approx(0.4, abs=0.01)
    assert not list((tmp_path / "cache").glob("*"))
    monkeypatch.setattr(roofline, "busy_seconds", _busy(0.05).__next__)
    again = measure(BYTES, 1)
    assert (again.is_cached, again.not_kept) == (False, None)
    assert measure(BYTES, 1).is_cached


def test_rounds_that_disagree_are_not_kept_and_the_best_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = len(isa_report().usable) * len(ARITHMETICS)
    rates = iter([50.0] * figures + [100.0] * figures)
    monkeypatch.setattr(roofline, "_ROUNDS", 2)
    monkeypatch.setattr(roofline, "matrix_rate", lambda *_: next(rates))
    measured = measure(BYTES, 1)
    assert measured.path is None
    assert measured.not_kept is not None
    assert "rounds differ by 50%" in measured.not_kept
    assert {rate.macs_s for rate in measured.roofline.matrices} == {100.0}
    monkeypatch.setattr(roofline, "_ROUNDS", 1)
    monkeypatch.setattr(roofline, "matrix_rate", lambda *_: 100.0)
    assert not measure(BYTES, 1).is_cached
    assert measure(BYTES, 1).is_cached


def test_a_size_measured_busy_does_not_touch_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(BYTES, 1)
    monkeypatch.setattr(roofline, "busy_seconds", _busy(0.9).__next__)
    other = measure(2 * BYTES, 1)
    assert other.path is None
    assert other.not_kept is not None
    assert other.roofline.bytes_s(2 * BYTES) > 0
    assert measure(BYTES, 1, fresh=True).path is None
    assert measure(BYTES, 1).roofline == first.roofline
    assert not measure(2 * BYTES, 1).is_cached


def test_date_and_load_are_kept_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "busy_seconds", _busy(0.05).__next__)
    measure(BYTES, 1)
    kept = measure(BYTES, 1)
    assert kept.is_cached
    for conditions in (kept.roofline.conditions, kept.roofline.streams[0].conditions):
        assert conditions.load == pytest.approx(0.05, abs=0.01)
        assert conditions.spread == 0
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(conditions.date)
        assert abs(age) < datetime.timedelta(minutes=10)


def test_busy_seconds_are_those_of_our_cpus(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\n"
        f"cpu{first} 100 50 20 700 30 1 2 97 40 0\n"
        "cpu9999 1 1 1 1 1 1 1 1 0 0\nintr 1 2 3\n\n"
    )
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(stat) == (270 / tick, 1000 / tick)
    stat.write_text("cpu 1\n")
    assert busy_seconds(stat) is None
    assert busy_seconds(tmp_path / "none") is None


def test_limits_of_a_model() -> None:
    line = measure(BYTES, 1).roofline
    costs = StepCosts(BYTES - 100, 100, 10, 1000, 400, 6, 3, "int8")
    limits = line.limits(costs)
    assert limits["decode_tok_s"] == line.bytes_s(BYTES) / BYTES
    assert limits["prefill_tok_s"] == line.macs_s(line.isa, "int8") / 1000
    assert limits["handover_s"] == 5 * 3 * line.handovers[0].running_s
    assert limits["step_bytes"] == BYTES


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
