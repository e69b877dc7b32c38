"""Pytest plugin: the module named in TRIVET_EMULATED_CORE takes the place of trivet.native._core.

Loaded with ``-p native.emulated_core`` by test_emulation.py, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_path = os.environ["TRIVET_EMULATED_CORE"]
_spec = importlib.util.spec_from_file_location("trivet.native._core", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
# Before the package is imported, so that all of it sees this module.
sys.modules["trivet.native._core"] = _module
