"""Search each peer's settings on this machine; the best of each kind of work are kept.

    python benchmarks/peers/settings.py -o benchmarks/results/peers_settings.json [--model demo]
        [--only 'openvino *'] [--rounds 3] [--again]

From the defaults, one setting at a time; a value is kept for a kind of work (prefill, decode, batch)
when its median beats the default's by more than 3 %. Values that won alone are then run together
against the default and kept only if they win together. The default and a candidate are measured
alternately. The file lists every candidate with its samples and is written after each one; what it
already holds is not measured again (--again: it is), so that a search may be cut off and go on.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import engines
from engines import FORMS, KINDS, SEARCHED, Form, Run
from environments import PeerUnavailableError
from prompts import windows
from protocol import Child, EngineError

from trivet.bench.machine import describe_machine
from trivet.files import write

PROBES = (Run(1, 256, 20), Run(8, 24, 16))
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
    """The search for one form. ``tried`` lists every candidate; ``save`` is called after each."""

    def __init__(
        self,
        form: Form,
        model: str,
        threads: int,
        rounds: int,
        tried: list[dict[str, Any]],
        save: Callable[[], None],
    ) -> None:
        self._form, self._model = form, model
        self._threads, self._rounds = threads, rounds
        self.tried, self._save = tried, save
        self._base: Child | None = None
        self.version: str | None = None
        self._seed = 0

    def close(self) -> None:
        if self._base is not None:
            self._base.close()

    def gains(self, changed: Mapping[str, Any]) -> dict[str, float]:
        """Kind -> ratio to the default's median; empty when the candidate does not run."""
        for known in self.tried:
            if known["settings"] == changed:
                return dict(known.get("gain", {}))
        if self._base is None:
            self._base, answer = engines.start(self._form, self._model, self._threads, {})
            self.version = answer["version"]
        print(f"settings: {self._form.name}: {dict(changed)}", file=sys.stderr, flush=True)
        entry: dict[str, Any] = {"settings": dict(changed)}
        single_only = changed.get("pipeline") == "plain"
        child = None
        base: dict[str, list[float]] = {}
        own: dict[str, list[float]] = {}
        try:
            child, _ = engines.start(self._form, self._model, self._threads, changed)
            for index in range(self._rounds + 1):
                self._seed += 1
                for each, kept in ((self._base, base), (child, own)):
                    rates = probe(each, self._model, self._seed, single_only)
                    if index:  # the first round warms up
                        for kind, rate in rates.items():
                            kept.setdefault(kind, []).append(rate)
        except EngineError as error:
            if not self._base.is_alive:
                raise
            entry["failed"] = str(error)
        else:
            entry |= {"default": base, "rates": own}
            entry["gain"] = {
                kind: statistics.median(own[kind]) / statistics.median(base[kind]) for kind in own
            }
        finally:
            if child is not None:
                child.close()
        self.tried.append(entry)
        self._save()
        return dict(entry.get("gain", {}))

    def best(self) -> dict[str, dict[str, Any]]:
        """Kind -> settings that differ from the default."""
        won: dict[str, dict[str, tuple[float, Any]]] = {kind: {} for kind in KINDS}
        for key, values in SEARCHED[self._form.peer].items():
            if key in self._form.fixed:
                continue
            for value in values[1:]:  # the first is the default
                for kind, gain in self.gains({key: value}).items():
                    if gain > max(GAIN, won[kind].get(key, (0.0, None))[0]):
                        won[kind][key] = (gain, value)
        result: dict[str, dict[str, Any]] = {}
        for kind in KINDS:
            alone = {key: value for key, (_, value) in won[kind].items()}
            if len(alone) > 1:
                strongest = max(won[kind], key=lambda key: won[kind][key][0])
                if self.gains(alone).get(kind, 0.0) < won[kind][strongest][0]:
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
    parser.add_argument("--again", action="store_true", help="measure what the file holds again")
    arguments = parser.parse_args()
    report = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    mine = report.setdefault(arguments.model, {"forms": {}})
    for form in FORMS:
        if not SEARCHED[form.peer]:
            continue
        if arguments.only and not any(fnmatch.fnmatchcase(form.name, p) for p in arguments.only):
            continue
        entry = mine["forms"].setdefault(form.name, {"best": {}, "tried": []})
        if arguments.again:
            entry["tried"] = []

        def save() -> None:
            write(arguments.output, json.dumps(report, indent=1) + "\n")

        search = Search(
            form, arguments.model, arguments.threads, arguments.rounds, entry["tried"], save
        )
        try:
            entry["best"] = search.best()
        except (PeerUnavailableError, EngineError) as error:
            print(f"settings: {form.name} not run: {error}", file=sys.stderr)
            entry["not_run"] = str(error)
        else:
            entry.pop("not_run", None)
            entry |= {"machine": describe_machine(), "threads": arguments.threads}
            if search.version is not None:
                entry["version"] = search.version
            print(f"settings: {form.name}: {json.dumps(entry['best'])}", file=sys.stderr)
        finally:
            search.close()
        save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
