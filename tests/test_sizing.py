"""Limits are read from cgroup and machine; what does not fit is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trivet.config import MemoryConfig
from trivet.errors import ConfigError
from trivet.native import KVGeometry
from trivet.sizing import (
    CpuLimit,
    MachineMemory,
    MemoryPlan,
    available_threads,
    cpu_limit,
    cpu_quota,
    format_bytes,
    machine_memory,
    plan_memory,
    render_plan,
)

GIB = 1 << 30
GEOMETRY = KVGeometry(2, 1, 64, "bf16", 32, 32 * 1024)


def _plan(memory: MemoryConfig | None = None, available: int = GIB, **changes: int) -> MemoryPlan:
    settings: dict[str, int | None] = {
        "weight_bytes": 100 << 20,
        "max_positions": 4096,
        "max_model_len": None,
        "max_num_seqs": 8,
        "max_step_tokens": 512,
        "hidden_size": 64,
        "vocab_size": 1000,
    }
    return plan_memory(
        geometry=GEOMETRY,
        memory=memory or MemoryConfig(),
        machine=MachineMemory(2 * GIB, available, "machine"),
        **{**settings, **changes},  # type: ignore[arg-type]
    )


def test_enough_memory_gives_every_request_its_full_length() -> None:
    plan = _plan()
    assert plan.num_pages == 8 * 128
    assert plan.kv_bytes_per_token == 1024
    assert plan.fits[-1] == (4096, 8)
    assert plan.fits[0] == (256, 128)
    total = plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes + plan.margin_bytes
    assert total == plan.available_bytes


def test_less_memory_gives_fewer_pages_and_stays_below_the_share() -> None:
    plan = _plan(available=300 << 20)
    assert 128 <= plan.num_pages < 8 * 128
    used = plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes
    assert used <= 0.9 * (300 << 20)


def test_kv_bytes_are_taken_as_given() -> None:
    plan = _plan(MemoryConfig(kv_bytes=200 * GEOMETRY.page_bytes))
    assert plan.num_pages == 200


def test_weights_count_once_and_kv_for_every_worker() -> None:
    one, two = _plan(), _plan(num_workers=2)
    assert two.weight_bytes == one.weight_bytes
    assert two.kv_bytes == 2 * one.kv_bytes
    assert two.fits[-1] == (4096, 16)


@pytest.mark.parametrize(
    ("memory", "available", "changes", "field"),
    [
        (None, 200 << 20, {}, "max_model_len"),
        (None, GIB, {"max_model_len": 5000}, "max_model_len"),
        (MemoryConfig(kv_bytes=1), GIB, {}, "kv_bytes"),
        (MemoryConfig(kv_bytes=2 * GIB), GIB, {}, "kv_bytes"),
        (None, GIB, {"weight_bytes": 4 * GIB}, "max_model_len"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    memory: MemoryConfig | None, available: int, changes: dict[str, int], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _plan(memory, available, **changes)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_the_table_names_every_part() -> None:
    text = render_plan(_plan())
    for part in ("weights", "KV", "scratch", "margin", "fits", "8 of 4096 tokens"):
        assert part in text


def _cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_cgroup_quota_limits_the_threads(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert available_threads(_cgroup(tmp_path / "a", cpu__max="max 100000")) == affinity
    half = _cgroup(tmp_path / "b", cpu__max="50000 100000")
    assert cpu_quota(half) == 0.5
    assert available_threads(half) == 1
    expected = "its affinity" if affinity == 1 else "the cgroup's quota of 0.5"
    assert cpu_limit(half) == CpuLimit(1, expected)
    assert cpu_limit(tmp_path / "a") == CpuLimit(affinity, "its affinity")
    v1 = tmp_path / "c"
    _cgroup(v1 / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cpu_quota(v1) == 1.5
    unlimited = tmp_path / "d"
    _cgroup(unlimited / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(unlimited) is None


def test_a_cgroup_limit_leaves_what_is_not_used_or_cached(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    root = _cgroup(
        tmp_path / "v2",
        memory__max=str(2 * GIB),
        memory__current=str(GIB),
        memory__stat=f"anon 5\ninactive_file {GIB // 2}\n",
    )
    memory = machine_memory(root, meminfo)
    assert (memory.total_bytes, memory.available_bytes) == (2 * GIB, GIB + GIB // 2)
    assert memory.source == "cgroup"


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    root = _cgroup(tmp_path / "v2", memory__max="max", memory__current="5")
    assert machine_memory(root, meminfo) == MachineMemory(8 * GIB, 4 * GIB, "machine")


def test_this_machine_has_memory_and_threads() -> None:
    assert machine_memory().available_bytes > 0
    assert available_threads() >= 1


def test_bytes_are_shown_in_binary_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * GIB)] == [
        "0 B", "1023 B", "1.5 KiB", "5 GiB",
    ]  # fmt: skip
