"""The files a gate leaves: `gate.json` for machines, `gate.html` for people."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trivet.errors import CheckpointError
from trivet.evaluate.run import Evaluation
from trivet.json_values import plain

GATE_FILE = "gate.json"


def write_gate(evaluation: Evaluation, folder: Path) -> Path:
    """Write the gate file of an evaluation into a folder, which is made if needed.

    Raises CheckpointError when it cannot be written.
    """
    text = json.dumps(plain(evaluation.gate_json()), indent=2, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / GATE_FILE, text)
    except OSError as error:
        raise CheckpointError(folder, f"cannot be written: {error.strerror}") from None
    return folder / GATE_FILE


def _write(path: Path, text: str) -> None:
    """Write under another name, flush to the disk, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
