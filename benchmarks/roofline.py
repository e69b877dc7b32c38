"""This machine's ceilings as `trivet info --roofline --json` gives them, measured now, into a file.

    python benchmarks/roofline.py [-o out/roofline.json] [--model demo] [--threads 2]

With a model, also what the ceilings allow it. Prints the tables on standard error and, as the last
line, JSON. Exits with 1 when the machine was busy: `not_kept` under `roofline` then says why, and the
figures are no ceilings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from trivet.bench.machine import describe_machine
from trivet.cli.app import run


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    words = ["info", *([options.model] if options.model else []), "--roofline", "--fresh", "--json"]
    if options.threads is not None:
        words += ["--threads", str(options.threads)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run(words)
    if code != 0:
        return code
    result: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    result["machine"] = describe_machine() | result["machine"]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(result["roofline"]["not_kept"] is not None)


if __name__ == "__main__":
    sys.exit(main())
