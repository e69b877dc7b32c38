"""Search each peer's settings on this machine; the best of each kind of work are kept.

    python benchmarks/peers/settings.py -o benchmarks/results/peers_settings.json [--model demo]
        [--only 'openvino *'] [--rounds 3]

From the defaults, one setting at a time; a value is kept for a kind of work (prefill, decode, batch)
when its median beats the default's by more than 3 %. Values that won alone are then run together
against the default and kept only if they win together. The default and a candidate are measured
alternately. The file lists every candidate with its samples; existing forms of other runs are kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engines
from engines import FORMS, KINDS, SEARCHED, Form, Run
from environments import PeerUnavailableError
from prompts import windows
from protocol import Child, EngineError

from trivet.bench.machine import describe_machine

PROBES = (Run(1, 512, 32), Run(8, 64, 24))
GAIN = 1.03


def probe(child: Child, model: str, seed: int, single_only: bool) -> dict[str, float]:
    """Rates of one round of all probes, by kind."""
    rates: dict[str, float] = {}
    for run in PROBES[:1] if single_only else PROBES:
        ids = windows(model, run.batch, run.prompt_tokens, seed)
        answer = child.call(op="run", prompts=ids, output_tokens=run.output_tokens)
        if run.batch > 1:
            rates["batch"] = run.batch * run.output_tokens / answer["total_s"]
        else:
            first = answer["first_token_s"]
            rates["prefill"] = run.prompt_tokens / first
            rates["decode"] = (run.output_tokens - 1) / (answer["total_s"] - first)
    return rates


class Search:
    """The search for one form. ``tried`` lists every candidate."""

    def __init__(self, form: Form, model: str, threads: int, rounds: int) -> None:
        self._form, self._model = form, model
        self._threads, self._rounds = threads, rounds
        self._base, answer = engines.start(form, model, threads, {})
        self.version = answer["version"]
        self.tried: list[dict[str, Any]] = []
        self._seed = 0

    def close(self) -> None:
        self._base.close()

    def gains(self, changed: Mapping[str, Any]) -> dict[str, float]:
        """Kind -> ratio to the default's median; empty when the candidate does not run."""
        entry: dict[str, Any] = {"settings": dict(changed)}
        self.tried.append(entry)
        single_only = changed.get("pipeline") == "plain"
        child = None
        samples: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        try:
            child, _ = engines.start(self._form, self._model, self._threads, changed)
            for index in range(self._rounds + 1):
                self._seed += 1
                for each, kept in zip((self._base, child), samples, strict=True):
                    rates = probe(each, self._model, self._seed, single_only)
                    if index:  # the first round warms up
                        for kind, rate in rates.items():
                            kept.setdefault(kind, []).append(rate)
        except EngineError as error:
            if not self._base.is_alive:
                raise
            entry["failed"] = str(error)
            return {}
        finally:
            if child is not None:
                child.close()
        base, own = samples
        entry |= {"default": base, "rates": own}
        entry["gain"] = {
            kind: statistics.median(own[kind]) / statistics.median(base[kind]) for kind in own
        }
        gains: dict[str, float] = entry["gain"]
        return gains

    def best(self) -> dict[str, dict[str, Any]]:
        """Kind -> settings that differ from the default."""
        won: dict[str, dict[str, tuple[float, Any]]] = {kind: {} for kind in KINDS}
        for key, values in SEARCHED[self._form.peer].items():
            if key in self._form.fixed:
                continue
            for value in values[1:]:  # the first is the default
                print(f"settings: {self._form.name}: {key}={value}", file=sys.stderr, flush=True)
                for kind, gain in self.gains({key: value}).items():
                    if gain > max(GAIN, won[kind].get(key, (0.0, None))[0]):
                        won[kind][key] = (gain, value)
        result: dict[str, dict[str, Any]] = {}
        together: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            alone = {key: value for key, (_, value) in won[kind].items()}
            if len(alone) > 1:
                name = json.dumps(alone, sort_keys=True)
                if name not in together:
                    together[name] = self.gains(alone)
                strongest = max(won[kind], key=lambda key: won[kind][key][0])
                if together[name].get(kind, 0.0) < won[kind][strongest][0]:
                    alone = {strongest: won[kind][strongest][1]}
            result[kind] = alone
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", choices=("demo", "shape-1b"), default="demo")
    parser.add_argument("--only", nargs="*", help="patterns of form names, like 'openvino *'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    report = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    mine = report.setdefault(arguments.model, {"forms": {}})
    for form in FORMS:
        if not SEARCHED[form.peer]:
            continue
        if arguments.only and not any(fnmatch.fnmatchcase(form.name, p) for p in arguments.only):
            continue
        try:
            search = Search(form, arguments.model, arguments.threads, arguments.rounds)
        except (PeerUnavailableError, EngineError) as error:
            print(f"settings: {form.name} not run: {error}", file=sys.stderr)
            continue
        try:
            best = search.best()
        except EngineError as error:
            print(f"settings: {form.name} not run: {error}", file=sys.stderr)
            continue
        finally:
            search.close()
        mine["forms"][form.name] = {
            "version": search.version,
            "machine": describe_machine(),
            "threads": arguments.threads,
            "best": best,
            "tried": search.tried,
        }
        temporary = arguments.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.rename(arguments.output)
        print(f"settings: {form.name}: {json.dumps(best)}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
