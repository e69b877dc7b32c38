"""The machine's roofline: measured once, kept, measured again when something it depends on changed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from trivet.bench import roofline
from trivet.bench.ceiling import StepCosts
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
