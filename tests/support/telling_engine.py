"""A worker's engine that says what its process has imported. Imports nothing that a worker does not."""

from __future__ import annotations

import sys

from trivet.worker.frames import WorkerConfig
from trivet.worker.load import load_engine
from trivet.worker.process import LoadedEngine


def load_telling_engine(config: WorkerConfig) -> LoadedEngine:
    """The real engine; the notes of its Ready message are the names of all modules."""
    loaded = load_engine(config)
    loaded.ready.notes[:] = sorted(sys.modules)
    return loaded
