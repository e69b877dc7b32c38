"""Pytest plugin: the module named in TRIVET_TEST_CORE takes the place of trivet.native._core.

Loaded with ``-p native.replaced_core`` in a process of its own, by test_emulation.py and by
scripts/test-sanitize: a core of another build is tested while the ordinary one stays in place.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_path = os.environ["TRIVET_TEST_CORE"]
_spec = importlib.util.spec_from_file_location("trivet.native._core", _path)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
# Before the package is imported, so that all of it sees this module.
sys.modules["trivet.native._core"] = _module
