"""``python -m trivet``: the same as the ``trivet`` command."""

from __future__ import annotations

import sys

from trivet.cli import main

if __name__ == "__main__":
    sys.exit(main())
