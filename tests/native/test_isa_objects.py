"""Files of one instruction-set level define nothing that another file could pick up.

An inline function with external linkage, compiled with a level's flags, may be the copy the linker
keeps for everybody: an illegal instruction on a lower CPU. So those objects may have no weak symbols
and export nothing but their kernel tables.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVEL_FILES = {"avx2.cpp.o", "avx512.cpp.o", "amx.cpp.o"}


def _objects() -> list[Path]:
    """Objects of the newest ordinary build of the core that was made in this tree."""
    builds = [
        folder
        for folder in ROOT.glob("build/*/CMakeFiles/_core.dir/native/kernels")
        if not {"emulated", "sanitize"} & set(folder.parts)
    ]
    if not builds:
        return []
    newest = max(builds, key=lambda folder: max(p.stat().st_mtime for p in folder.rglob("*.o")))
    return sorted(path for path in newest.rglob("*.o") if path.name in LEVEL_FILES)


def test_level_objects_export_only_their_tables() -> None:
    objects = _objects()
    if not objects or shutil.which("nm") is None:
        pytest.skip("ISA OBJECTS NOT CHECKED: no build of the core in this tree, or no nm")
    for path in objects:
        listed = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            kind, name = line[17:18], line[19:]
            where = f"{path.relative_to(ROOT)}: {name}"
            assert kind not in "VvWwu", f"weak symbol in {where}"
            if kind.isupper() and kind != "U":
                assert name.endswith("_kernels"), f"exported symbol in {where}"
