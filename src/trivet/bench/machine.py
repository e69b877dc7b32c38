"""The machine and versions a number comes from: every report carries them."""

from __future__ import annotations

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
