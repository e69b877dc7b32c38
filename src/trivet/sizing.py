"""Will it fit? Memory and threads of this process, and the KV pages a model can have.

Reads cgroup v2 and v1 limits, /proc/meminfo and the affinity mask, and works out before start how many
requests of which length fit. Serve, LLM and bench share it. It imports neither the native core nor a
checkpoint: sizes come in as numbers.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Protocol

from trivet.config import MemoryConfig
from trivet.errors import ConfigError

CGROUP_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "no limit"
_PROCESS_BYTES = 160 << 20  # interpreter, libraries and tokenizer of one worker and its gateway


class PagedGeometry(Protocol):
    """The two sizes needed of `trivet.native.api.KVGeometry`."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``; binary units, three significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders whose limits apply to this process, innermost first; the root is always last.

    In a container the path in /proc/self/cgroup often does not exist under the mount; then only the
    mount itself counts.
    """
    folders: list[Path] = []
    lines = (_read(Path("/proc/self/cgroup")) or "").splitlines()
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            if folder.is_dir():
                folders.append(folder)
            folder = folder.parent
    folders += [root, root / controller]
    return list(dict.fromkeys(folders))


def cpu_quota(root: Path = CGROUP_ROOT) -> float | None:
    """CPUs that the cgroup's quota allows, e.g. 1.5; None without a quota."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        v2 = (_read(folder / "cpu.max") or "").split()
        if len(v2) == 2 and v2[0].isdigit() and v2[1].isdigit() and int(v2[1]) > 0:
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


@dataclasses.dataclass(frozen=True)
class CpuLimit:
    """CPUs this process may use at once, and what allows no more."""

    cpus: int
    source: str


def cpu_limit(root: Path = CGROUP_ROOT) -> CpuLimit:
    """The affinity mask, cut by the cgroup's quota rounded up."""
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    if quota is None or math.ceil(quota) >= affinity:
        return CpuLimit(affinity, "its affinity")
    return CpuLimit(max(1, math.ceil(quota)), f"the cgroup's quota of {quota:g}")


def available_threads(root: Path = CGROUP_ROOT) -> int:
    """Threads worth starting: as many as there are CPUs to run them."""
    return cpu_limit(root).cpus


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """Memory this process may use. ``source`` says what set the limit: ``cgroup`` or ``machine``."""

    total_bytes: int
    available_bytes: int
    source: str


def machine_memory(
    root: Path = CGROUP_ROOT, meminfo: Path = Path("/proc/meminfo")
) -> MachineMemory:
    """The tighter of the machine's available memory and what the cgroup's limit leaves.

    Page cache counts as available, as the kernel's own MemAvailable does.
    """
    fields: dict[str, int] = {}
    for line in (_read(meminfo) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    total = fields.get("MemTotal", 0)
    best = MachineMemory(total, fields.get("MemAvailable", fields.get("MemFree", 0)), "machine")
    for folder in _cgroup_folders(root, "memory"):
        left = _cgroup_left(folder)
        if left is not None and left[1] < best.available_bytes:
            best = MachineMemory(min(left[0], total or left[0]), left[1], "cgroup")
    return best


def _cgroup_left(folder: Path) -> tuple[int, int] | None:
    """(limit, bytes left) of one cgroup folder; None when it sets no limit."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit_text, usage_text = _read(folder / limit_name), _read(folder / usage_name)
        if not limit_text or not limit_text.isdigit() or int(limit_text) >= _NO_LIMIT:
            continue
        usage = int(usage_text) if usage_text and usage_text.isdigit() else 0
        stat = dict(
            line.split()[:2]
            for line in (_read(folder / "memory.stat") or "").splitlines()
            if len(line.split()) == 2
        )
        cache = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
        usage -= min(usage, int(cache) if cache.isdigit() else 0)
        return int(limit_text), max(0, int(limit_text) - usage)
    return None


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one machine goes, in bytes; all workers together.

    num_pages           pages of each worker's engine
    max_model_len       tokens of one request, after cutting to the model's positions
    margin_bytes        left free for everything else on the machine
    fits                (tokens, requests): how many requests of that length run at the same time
    """

    num_pages: int
    num_workers: int
    max_model_len: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    scratch_bytes: int
    margin_bytes: int
    available_bytes: int
    total_bytes: int
    source: str
    fits: tuple[tuple[int, int], ...]

    def as_json(self) -> dict[str, object]:
        fields = dataclasses.asdict(self)
        fields["fits"] = [{"tokens": tokens, "requests": n} for tokens, n in self.fits]
        return fields


def scratch_bytes(
    *, max_step_tokens: int, max_num_seqs: int, hidden_size: int, vocab_size: int, draft_tokens: int
) -> int:
    """Activations and logits of the largest step, an upper estimate.

    A row needs about 32 vectors of the hidden width in fp32 (residual, norm output in two formats,
    queries, keys, values, both halves of the MLP); logits exist for at most one row of each draft
    position of each request.
    """
    logit_rows = min(max_step_tokens, max_num_seqs * (1 + draft_tokens))
    return max_step_tokens * hidden_size * 4 * 32 + logit_rows * vocab_size * 4


def plan_memory(
    *,
    geometry: PagedGeometry,
    weight_bytes: int,
    max_positions: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_step_tokens: int,
    memory: MemoryConfig,
    hidden_size: int,
    vocab_size: int,
    num_workers: int = 1,
    draft_tokens: int = 0,
    machine: MachineMemory | None = None,
) -> MemoryPlan:
    """Decide the number of KV pages, or say in one line why the model does not fit.

    Without ``memory.kv_bytes`` KV takes what it can use, max_num_seqs requests of the full length,
    up to ``memory_utilization`` of what the machine leaves after weights and scratch. Weights are
    one read-only mapping and counted once; scratch and KV are counted for every worker.

    Raises ConfigError: max_model_len above the model's positions; less memory than one request of
    max_model_len needs.
    """
    if max_model_len is not None and max_model_len > max_positions:
        raise ConfigError("max_model_len", max_model_len, f"up to {max_positions}, the model's own")
    length = max_model_len or max_positions
    machine = machine or machine_memory()
    pages_per_request = -(-length // geometry.page_tokens)
    scratch = num_workers * (
        scratch_bytes(
            max_step_tokens=max_step_tokens,
            max_num_seqs=max_num_seqs,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            draft_tokens=draft_tokens,
        )
        + _PROCESS_BYTES
    )
    usable = int(machine.available_bytes * memory.memory_utilization)
    for_kv = usable - weight_bytes - scratch
    least = pages_per_request * geometry.page_bytes * num_workers
    if memory.kv_bytes is not None:
        if memory.kv_bytes > for_kv:
            raise ConfigError(
                "kv_bytes",
                memory.kv_bytes,
                f"up to {max(0, for_kv)} ({format_bytes(usable)} usable by this {machine.source} "
                f"- {format_bytes(weight_bytes)} weights - {format_bytes(scratch)} scratch)",
            )
        for_kv, field, value = memory.kv_bytes, "kv_bytes", memory.kv_bytes
    else:
        field, value = "max_model_len", length
    if for_kv < least:
        room = max(0, for_kv) // (geometry.page_bytes * num_workers) * geometry.page_tokens
        allowed = (
            f">= {least} (one request of max_model_len {length})"
            if field == "kv_bytes"
            else f"up to {room} ({format_bytes(usable)} usable by this {machine.source} "
            f"- {format_bytes(weight_bytes)} weights - {format_bytes(scratch)} scratch "
            f"leave {format_bytes(max(0, for_kv))} for KV)"
        )
        raise ConfigError(field, value, allowed)
    pages = for_kv // (geometry.page_bytes * num_workers)
    if memory.kv_bytes is None:
        pages = min(pages, pages_per_request * max_num_seqs)
    kv = pages * geometry.page_bytes * num_workers
    return MemoryPlan(
        num_pages=pages,
        num_workers=num_workers,
        max_model_len=length,
        weight_bytes=weight_bytes,
        kv_bytes=kv,
        kv_bytes_per_token=geometry.page_bytes // geometry.page_tokens,
        scratch_bytes=scratch,
        margin_bytes=machine.available_bytes - weight_bytes - kv - scratch,
        available_bytes=machine.available_bytes,
        total_bytes=machine.total_bytes,
        source=machine.source,
        fits=_fits(pages * num_workers, geometry.page_tokens, length),
    )


def _fits(pages: int, page_tokens: int, longest: int) -> tuple[tuple[int, int], ...]:
    lengths = [n for n in (256, 1024, 4096, 16384, 65536) if n < longest] + [longest]
    return tuple((n, pages // -(-n // page_tokens)) for n in lengths)


def render_plan(plan: MemoryPlan) -> str:
    """The fit table as plain text lines, for standard error before start."""
    workers = "" if plan.num_workers == 1 else f", {plan.num_workers} workers"
    rows = [
        ("weights", format_bytes(plan.weight_bytes), ""),
        (
            "KV",
            format_bytes(plan.kv_bytes),
            f"{format_bytes(plan.kv_bytes_per_token)} per token, {plan.num_pages} pages{workers}",
        ),
        ("scratch", format_bytes(plan.scratch_bytes), ""),
        (
            "margin",
            format_bytes(plan.margin_bytes),
            f"of {format_bytes(plan.available_bytes)} this {plan.source} leaves",
        ),
    ]
    lines = [f"  {name:<8} {size:>10}  {note}".rstrip() for name, size, note in rows]
    fits = ", ".join(f"{n} of {tokens} tokens" for tokens, n in plan.fits)
    return "\n".join(["memory", *lines, f"  fits     {fits}"])
