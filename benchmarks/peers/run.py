"""Trivet beside llama.cpp, OpenVINO GenAI and vLLM: one machine, one run, interleaved rounds.

    python benchmarks/peers/run.py -o benchmarks/results [--model demo|shape-1b] [--group short]
        [--forms main|all] [--rounds 5] [--budget 2400] [--only PATTERN ...] [--quick]

Every round runs each case on every engine before the next round begins, so that a noisy minute hits
all of them, and each round begins with another engine. An engine is a child process (one for each of
the settings that settings.py found best for a kind of work) that is idle while another is measured.
Rates: prefill = prompt tokens / time to the first token; decode = (output - 1) / (total - time to the
first token); batch = all output tokens / wall time, prefill included.

Short runs, not counted, warm up and say how long each case will take; what would not end in time is
dropped, and listed with what else did not run and why. The report is written after every round, so a
run that is cut off has given what it had.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import engines
import environments
import table
from engines import FORMS, GROUPS, KINDS, Form, Run
from environments import ROOT, PeerUnavailableError
from prompts import text_ids, windows
from protocol import Child, EngineError

from trivet.bench.machine import describe_machine

SANITY_PROMPT = "The capital of France is"
MAX_GREEDY_NLL = 4.0  # nats a token; a broken engine's ids cost 8 and more
REFERENCE = "trivet bf16"
PROBE = Run(1, 128, 16)
QUICK = ("trivet w8a8", REFERENCE, "fake")
RESULTS = ROOT / "benchmarks" / "results"


class Engine:
    """One form with a child process for each distinct settings of its kinds of work."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.children: list[tuple[Child, frozenset[str]]] = []
        self.report: dict[str, Any] = {"peer": form.peer, "bits": form.bits}
        self.duration_s: dict[Run, float] = {}

    def start(self, model: str, threads: int, best: dict[str, dict[str, Any]]) -> None:
        """Start the children and check their greedy text. Raises PeerUnavailableError, EngineError."""
        by_settings: dict[str, tuple[dict[str, Any], set[str]]] = {}
        for kind in KINDS:
            settings = best.get(kind, {})
            key = json.dumps(settings, sort_keys=True)
            by_settings.setdefault(key, (settings, set()))[1].add(kind)
        self.report["settings"] = {}
        self.report["settings_searched"] = bool(best)
        for settings, kinds in by_settings.values():
            child, answer = engines.start(self.form, model, threads, settings)
            self.children.append((child, frozenset(kinds)))
            for kind in sorted(kinds):
                self.report["settings"][kind] = answer["settings"]
            for key in ("version", "form", "kv_bytes_per_token", "system", "capabilities"):
                if key in answer:
                    self.report[key] = answer[key]
            self.report["weight_bytes"] = engines.weight_bytes(self.form, model, answer)
            self._check_text(child, model)

    def _check_text(self, child: Child, model: str) -> None:
        prompt = text_ids(SANITY_PROMPT)
        answer = child.call(op="run", prompts=[prompt], output_tokens=24)
        [tokens] = answer["tokens"]
        text = child.call(op="text", ids=tokens)["text"]
        self.report["greedy_tokens"], self.report["greedy_text"] = tokens, text
        if model != "demo":
            return  # random weights say nothing sensible; see `Measurement._agreement`
        loss = greedy_nll(prompt, tokens)
        self.report["greedy_nll"] = loss
        if loss > MAX_GREEDY_NLL:
            raise EngineError(
                f"the greedy text is not sane: {loss:.1f} nats a token: {text[:80]!r}"
            )

    def measure(self, run: Run, model: str, seed: int, timeout_s: float) -> dict[str, float]:
        """Case -> rate of one run. Raises EngineError."""
        rates: dict[str, float] = {}
        for child, kinds in self.children:
            cases = {kind: case for kind, case in run.cases.items() if kind in kinds}
            if not cases:
                continue
            count = 2 if set(cases) == {"prefill"} else run.output_tokens
            ids = windows(model, run.batch, run.prompt_tokens, seed)
            answer = child.call(op="run", prompts=ids, output_tokens=count, timeout_s=timeout_s)
            lengths = {len(t) for t in answer["tokens"]}
            if lengths != {count}:
                raise EngineError(f"{count} tokens were asked for, {sorted(lengths)} came")
            first, total = answer["first_token_s"], answer["total_s"]
            for kind, case in cases.items():
                if kind == "batch":
                    rates[case] = run.batch * count / total
                elif kind == "prefill":
                    rates[case] = run.prompt_tokens / first
                else:
                    rates[case] = (count - 1) / (total - first)
        return rates

    def probe(self, runs: Iterable[Run], model: str, timeout_s: float) -> None:
        """Warm up with short runs and predict how long the others take. Raises EngineError."""
        single = self._timed(PROBE, model, timeout_s)
        batches = {run.batch for run in runs if run.batch > 1}
        rates = {
            size: self._timed(Run(size, 16, 8), model, timeout_s)[1] for size in sorted(batches)
        }
        prefill_rate, decode_rate = single
        for run in runs:
            prompt_s = run.batch * run.prompt_tokens / prefill_rate
            rate = rates.get(run.batch, decode_rate)
            self.duration_s[run] = prompt_s + run.batch * run.output_tokens / rate

    def _timed(self, run: Run, model: str, timeout_s: float) -> tuple[float, float]:
        """Prompt tokens a second and output tokens a second, of the slowest child."""
        slowest = (math.inf, math.inf)
        for child, kinds in self.children:
            if run.batch > 1 and "batch" not in kinds:
                continue
            start = time.perf_counter()
            ids = windows(model, run.batch, run.prompt_tokens, run.batch)
            answer = child.call(
                op="run", prompts=ids, output_tokens=run.output_tokens, timeout_s=timeout_s
            )
            total = time.perf_counter() - start
            first = answer["first_token_s"] or 0.0
            prompt_rate = run.prompt_tokens / first if first else math.inf
            slowest = (
                min(slowest[0], prompt_rate),
                min(
                    slowest[1],
                    run.batch * run.output_tokens / (total - (first if run.batch == 1 else 0)),
                ),
            )
        return slowest

    def close(self) -> None:
        for child, _ in self.children:
            child.close()
        self.children = []


def greedy_nll(prompt: list[int], tokens: list[int]) -> float:
    """What a text costs under Trivet's bf16 of the demo model, in nats a token: is it language?"""
    from trivet import LLM, SamplingParams

    with LLM("demo", "bf16", max_model_len=64, kv_bytes=1 << 22) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([*prompt, *tokens], params)
    assert output.prompt_logprobs is not None
    costs = [-entry.logprob for entry in output.prompt_logprobs[len(prompt) :] if entry]
    return statistics.fmean(costs)


def summary(samples: list[float]) -> dict[str, Any]:
    """Median, extremes and every sample of one case on one engine."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": samples,
    }


def ratios(cases: dict[str, dict[str, list[float]]], forms: Iterable[Form]) -> dict[str, Any]:
    """Case -> Trivet's form -> ratios to every peer, round by round, and to the best peers.

    best_peer and best_same_width name the peer with the highest median, of all and of those whose
    weights have as many bits.
    """
    bits = {form.name: form.bits for form in forms}
    result: dict[str, Any] = {}
    for case, samples in cases.items():
        own = [name for name in samples if name.startswith("trivet ")]
        peers = [name for name in samples if name not in own]
        result[case] = {}
        for name in own:
            entry: dict[str, Any] = {"to": {}}
            for peer in peers:
                quotients = [a / b for a, b in zip(samples[name], samples[peer], strict=True)]
                entry["to"][peer] = summary(quotients)
            for key, among in (
                ("best_peer", peers),
                ("best_same_width", [p for p in peers if bits[p] == bits[name]]),
            ):
                if among:
                    entry[key] = max(among, key=lambda p: statistics.median(samples[p]))
            result[case][name] = entry
    return result


def quality(path: Path) -> dict[str, dict[str, float]]:
    """Form name -> delta_ppl on references A and B, from the file that quality.py writes."""
    if not path.exists():
        return {}
    result: dict[str, dict[str, float]] = {}
    for model, label in (("demo", "A"), ("reference-b", "B")):
        measured = json.loads(path.read_text())["models"].get(model, {"forms": {}})["forms"]
        for name, entry in measured.items():
            if "delta_ppl" in entry:
                result.setdefault(name, {})[label] = entry["delta_ppl"]
    return result


class Measurement:
    """All engines and cases of one run of this script; ``report`` is what it writes."""

    def __init__(self, arguments: argparse.Namespace, forms: list[Form], runs: list[Run]) -> None:
        self._arguments = arguments
        self._forms, self._runs = forms, runs
        self._samples: dict[str, dict[str, list[float]]] = {
            case: {} for run in runs for case in run.cases.values()
        }
        self._dropped: set[tuple[str, Run]] = set()
        self._live: list[Engine] = []
        self._seed = 0
        self._started = time.monotonic()
        self.not_run: list[dict[str, Any]] = []
        self.engines: dict[str, Any] = {}

    def drop(self, name: str, reason: str, run: Run | None = None) -> None:
        """Say that a form, or a form's run, gives no number and why."""
        cases = sorted((run.cases if run else {}).values()) if run else "all"
        self.not_run.append({"engine": name, "cases": cases, "reason": reason})
        print(f"peers: {name}: {cases} not run: {reason}", file=sys.stderr, flush=True)
        if run is not None:
            self._dropped.add((name, run))
            for case in run.cases.values():
                self._samples[case].pop(name, None)

    def _fail(self, engine: Engine, reason: str) -> None:
        """An engine that broke on the way loses its numbers: they would not be of the same rounds."""
        engine.close()
        self._live.remove(engine)
        for by_engine in self._samples.values():
            by_engine.pop(engine.form.name, None)
        self.drop(engine.form.name, reason)

    def execute(self, save: Callable[[dict[str, Any]], None]) -> None:
        """Start, warm up, measure, end. ``save`` is given the report after every round."""
        best = engines.load_settings(self._arguments.settings, self._arguments.model)
        deltas = quality(self._arguments.quality)
        try:
            for form in self._forms:
                engine = Engine(form)
                self._live.append(engine)
                try:
                    engine.start(
                        self._arguments.model, self._arguments.threads, best.get(form.name, {})
                    )
                except (PeerUnavailableError, EngineError) as error:
                    self._fail(engine, str(error))
                    continue
                print(f"peers: {form.name}: {engine.report['greedy_text'][:60]!r}", file=sys.stderr)
                engine.report["delta_ppl"] = deltas.get(form.name, {})
                self.engines[form.name] = engine.report
            self._warm_up()
            for index in range(self._arguments.rounds):
                self._round(index)
                for engine in self._live:
                    sizes = [child.memory_bytes() or 0 for child, _ in engine.children]
                    # The children of one form are settings of one engine: the largest counts.
                    engine.report["memory_bytes"] = max(sizes, default=0) or None
                save(self.report(index + 1))
        finally:
            for engine in self._live:
                engine.close()

    def _pairs(self, turn: int = 0) -> Iterator[tuple[Run, Engine]]:
        for run in self._runs:
            order = self._live[:]
            turn %= max(len(order), 1)
            for engine in order[turn:] + order[:turn]:
                if engine in self._live and (engine.form.name, run) not in self._dropped:
                    yield run, engine

    def _measure(self, run: Run, engine: Engine) -> dict[str, float] | None:
        # No prompt begins like another: an engine that kept a prefix would gain nothing from it.
        try:
            return engine.measure(
                run, self._arguments.model, self._seed, 10 * self._arguments.max_run_s + 60
            )
        except EngineError as error:
            self._fail(engine, f"{'/'.join(run.cases.values())}: {error}")
            return None

    def _warm_up(self) -> None:
        limit = self._arguments.max_run_s
        costs: dict[tuple[Engine, Run], float] = {}
        for engine in self._live[:]:
            try:
                engine.probe(self._runs, self._arguments.model, 2 * limit + 60)
            except EngineError as error:
                self._fail(engine, f"warm-up: {error}")
                continue
            for run, seconds in engine.duration_s.items():
                if seconds > limit and engine.form.peer != "trivet":
                    self.drop(engine.form.name, f"one run would take about {seconds:.0f} s", run)
                else:
                    costs[engine, run] = seconds
        rounds = self._arguments.rounds
        budget = self._arguments.budget
        left = budget - (time.monotonic() - self._started)
        total = sum(costs.values()) * rounds
        while budget and total > left:
            peers = {pair: s for pair, s in costs.items() if pair[0].form.peer != "trivet"}
            if not peers:
                break
            engine, run = max(peers, key=lambda pair: peers[pair])
            seconds = costs.pop((engine, run))
            total -= seconds * rounds
            reason = f"{seconds:.0f} s a round are over the budget of {budget:.0f} s"
            self.drop(engine.form.name, reason, run)
        print(f"peers: {rounds} rounds take about {total:.0f} s", file=sys.stderr, flush=True)

    def _round(self, index: int) -> None:
        seed = self._seed
        for run, engine in self._pairs(index):
            self._seed = seed + 1 + self._runs.index(run)  # all engines read the same prompts
            rates = self._measure(run, engine)
            for case, rate in (rates or {}).items():
                self._samples[case].setdefault(engine.form.name, []).append(rate)
        self._seed = seed + len(self._runs)
        print(
            f"peers: round {index + 1} of {self._arguments.rounds} done",
            file=sys.stderr,
            flush=True,
        )

    def report(self, rounds: int) -> dict[str, Any]:
        """The JSON report after so many rounds."""
        arguments = self._arguments
        flags = environments.cpu_flags()
        return {
            "what": __doc__.splitlines()[0] if __doc__ else "",
            "model": arguments.model,
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine()
            | {"flags": sorted(f for f in flags if f.startswith(("avx", "amx", "fma", "f16c")))},
            "threads": arguments.threads,
            "commit": _git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "native")),
            "group": arguments.group,
            "rounds": rounds,
            "engines": self.engines,
            "cases": {
                case: {name: summary(values) for name, values in by_engine.items()}
                for case, by_engine in self._samples.items()
            },
            "ratios": ratios(self._samples, self._forms),
            "agreement": self._agreement(),
            "not_run": self.not_run,
        }

    def _agreement(self) -> dict[str, int]:
        """Leading greedy tokens of the sanity prompt that equal those of Trivet's bf16."""
        if REFERENCE not in self.engines:
            return {}
        want = self.engines[REFERENCE]["greedy_tokens"]
        result = {}
        for name, entry in self.engines.items():
            pairs = zip(entry["greedy_tokens"], want, strict=True)
            equal = [a == b for a, b in pairs]
            result[name] = equal.index(False) if False in equal else len(equal)
        return result


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _is_chosen(form: Form, arguments: argparse.Namespace) -> bool:
    if arguments.only is not None:
        return any(fnmatch.fnmatchcase(form.name, pattern) for pattern in arguments.only)
    return form.main or arguments.forms == "all"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    parser.add_argument("--model", choices=("demo", "shape-1b"), default="demo")
    parser.add_argument("--group", choices=sorted(GROUPS), default="short", help="cases to run")
    parser.add_argument("--cases", nargs="*", help="only the runs of these cases of the group")
    parser.add_argument("--forms", choices=("main", "all"), default="main")
    parser.add_argument("--only", nargs="*", help="patterns of form names, like 'trivet *'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=2400.0, help="seconds in all; 0: none")
    parser.add_argument("--max-run-s", type=float, default=60.0, help="longest run of a peer")
    parser.add_argument("--settings", type=Path, default=RESULTS / "peers_settings.json")
    parser.add_argument("--quality", type=Path, default=RESULTS / "peers_quality.json")
    parser.add_argument("--name", help="of the files; default: peers, or peers_MODEL")
    parser.add_argument("--quick", action="store_true", help="seconds: to test this script")
    arguments = parser.parse_args()
    forms = [form for form in FORMS if form.peer != "fake" and _is_chosen(form, arguments)]
    if arguments.quick:
        arguments.group, arguments.rounds = "quick", 2
        forms = [form for form in FORMS if form.name in QUICK]
    runs = [
        run
        for run in GROUPS[arguments.group]
        if not arguments.cases or set(arguments.cases) & set(run.cases.values())
    ]
    if not runs or not forms:
        parser.error("nothing to run: no form or no case of the group matches")
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = arguments.name or ("peers" if arguments.model == "demo" else f"peers_{arguments.model}")

    def save(report: dict[str, Any]) -> None:
        for suffix, content in (
            (".json", json.dumps(report, indent=1)),
            (".md", table.markdown([report])),
        ):
            temporary = arguments.output / f"{name}{suffix}.tmp"
            temporary.write_text(content + "\n")
            temporary.rename(arguments.output / f"{name}{suffix}")

    Measurement(arguments, forms, runs).execute(save)
    print((arguments.output / f"{name}.md").read_text(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
