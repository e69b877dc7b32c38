"""The packed weights are mapped in huge pages where the kernel has them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.tiny_models import Variant, build_folder
from trivet.quant import load_packed

SHAPE = Variant(
    hidden=96, heads=3, kv_heads=1, head_dim=32, ffn=160, theta=1e5, tied=True, positions=64
)
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.skipif(not _THP.exists(), reason="this kernel has no huge pages")
def test_weights_are_asked_for_in_huge_pages(tmp_path: Path) -> None:
    packed = load_packed(build_folder(tmp_path / "model", SHAPE)).file
    buffer = np.frombuffer(packed.buffer, np.uint8)
    assert "hg" in _flags_at(buffer.ctypes.data)
