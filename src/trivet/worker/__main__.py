"""``python -m trivet.worker --fd N --parent PID --factory F``: the gateway starts it, nobody else."""

from __future__ import annotations

import argparse
import sys

from trivet.worker.process import main


def _parse(arguments: list[str]) -> tuple[int, int, str]:
    parser = argparse.ArgumentParser(prog="python -m trivet.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket of the gateway")
    parser.add_argument("--parent", type=int, required=True, help="process id of the gateway")
    parser.add_argument("--factory", required=True, help="module:function that builds the engine")
    options = parser.parse_args(arguments)
    return options.fd, options.parent, options.factory


if __name__ == "__main__":
    sys.exit(main(*_parse(sys.argv[1:])))
