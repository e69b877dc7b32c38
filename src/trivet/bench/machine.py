"""The machine and versions a number comes from: every report carries them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from trivet.sizing import available_threads, cpu_quota, machine_memory


def cpu_name() -> str:
    """The processor's name as the kernel gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float] | None:
    """Seconds that the CPUs of this process have worked for anybody, and have been there, since boot.

    Time that a hypervisor gave to others counts as work. None: the system does not say.
    """
    try:
        text = stat.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    ours = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    busy = there = 0
    for name, *words in map(str.split, filter(str.strip, text.splitlines())):
        if name in ours and len(words) >= 8 and all(map(str.isdigit, words[:8])):
            ticks = [int(word) for word in words[:8]]  # a guest's are within user's and nice's
            there += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle, and idle until a disk answers
    tick = os.sysconf("SC_CLK_TCK")
    return (busy / tick, there / tick) if there else None


def describe_machine() -> dict[str, Any]:
    """Processor, threads, memory, ISA level, and the versions of what ran."""
    import numpy

    from trivet import __version__, native

    memory = machine_memory()
    return {
        "cpu": cpu_name(),
        "threads": available_threads(),
        "cpu_quota": cpu_quota(),
        "memory_bytes": memory.total_bytes,
        "isa": native.isa_report().active,
        "kernel": f"{platform.system()} {platform.release()}",
        "trivet": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }
