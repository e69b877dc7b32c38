"""Does the gate catch damaged checkpoints, and pass good ones?

Every kind of damage is done to a model at its smallest extent (one group, one row, one tensor) and
drawn by a seed; good candidates are formats that are near lossless on the demo model, and files given
with ``--candidate``. The output file holds every case with the check that saw it and its seconds, and
the two rates; a run continues where the file ends.

    python benchmarks/gate_corruptions.py [--seeds 5] [--gate fast] [--minutes M] -o FILE
    python benchmarks/gate_corruptions.py --part good --gate full --seeds 5 --per-seed 1 -o FILE

Damage is judged by two checks of the gate, files of weights and identity: what either rejects, the gate
rejects. Good candidates go through the whole gate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trivet import files
from trivet.bench.machine import describe_machine
from trivet.config import KVFormat, ModelConfig
from trivet.evaluate import GateOptions, evaluate_model
from trivet.evaluate.checks import identity, weights
from trivet.evaluate.corruptions import CORRUPTIONS, corrupted
from trivet.evaluate.subject import LocalSubject
from trivet.loader import load_model

# Near lossless: 8 bits, or the file's own grid; not fp8, whose codes have three bits of mantissa.
GOOD = (
    ("auto", "bf16"), ("auto", "int8"), ("w8a8", "bf16"), ("w8a8", "int8"), ("bf16", "int8"),
    ("bf16", "int8+first"), ("w4a16-g32-min", "bf16"), ("w4a16-g32-min", "int8"),
    ("auto", "int8+first"), ("w8a8-g16", "bf16"), ("w8a8-g32", "bf16"), ("w8a8-g32", "int8"),
    ("w8a8-g64", "bf16"),
)  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. " * 20

Case = dict[str, Any]


def damaged_cases(options: argparse.Namespace, done: set[tuple[str, int]]) -> Iterator[Case]:
    """Every kind of damage with every seed, less those that are done."""
    base = load_model(ModelConfig(model=options.model, weights="bf16"))
    candidate = load_model(ModelConfig(model=options.model, weights=options.weights))
    ids = base.tokenizer.encode(TEXT)
    subject = LocalSubject(base, 512)
    for seed in range(options.seeds):
        for kind in CORRUPTIONS:
            if (kind, seed) in done:
                continue
            begin = time.monotonic()
            broken = corrupted(candidate, kind, seed)
            found = [identity.check(LocalSubject(broken, 512), subject)]
            if found[0].finding.value != "reject":
                found.append(weights.check(broken, base, ids))
            caught = [check for check in found if check.finding.value == "reject"]
            yield {
                "kind": kind,
                "seed": seed,
                "caught_by": [check.check for check in caught],
                "reasons": [check.reason for check in caught],
                "seconds": time.monotonic() - begin,
            }


def good_cases(options: argparse.Namespace, done: set[tuple[str, str, str, int]]) -> Iterator[Case]:
    """Every good candidate with every seed, less those that are done."""
    baseline = ModelConfig(model=options.model, weights="bf16")
    candidates = [(options.model, *form) for form in GOOD]
    candidates += [(path, "auto", "bf16") for path in options.candidate]
    turn = itertools.cycle(candidates)
    for seed in range(options.seeds):
        for model, form, kv in itertools.islice(turn, options.per_seed or len(candidates)):
            name = "the model" if model == options.model else Path(model).name
            if (name, form, kv, seed) in done:
                continue
            begin, cpu = time.monotonic(), time.process_time()
            config = ModelConfig(model=model, weights=form, kv=KVFormat(kv))
            gate = GateOptions(size=options.gate, seed=seed)
            evaluation = evaluate_model(config, baseline, gate=gate)
            assert evaluation.gate is not None
            assert evaluation.details is not None
            yield {
                "candidate": name,
                "weights": form,
                "kv": kv,
                "seed": seed,
                "verdict": evaluation.gate.verdict.value,
                "reasons": evaluation.gate.reasons,
                "votes": evaluation.gate.metrics["votes"],
                "mean_kl": evaluation.gate.metrics["mean_kl"],
                "check_seconds": {c.name: round(c.seconds, 2) for c in evaluation.details.checks},
                "seconds": time.monotonic() - begin,
                "cpu_seconds": time.process_time() - cpu,  # what a busy machine does not stretch
                "isa": describe_machine()["isa"],  # a file may be continued on another machine
            }


def summary(found: Case) -> Case:
    """The rates of what was run so far."""
    damaged, good = found["damaged"], found["good"]
    seconds = sorted(case["seconds"] for case in good)
    return {
        "damaged": len(damaged),
        "kinds": len({case["kind"] for case in damaged}),
        "caught": sum(bool(case["caught_by"]) for case in damaged),
        "good": len(good),
        "good_candidates": len({(c["candidate"], c["weights"], c["kv"]) for c in good}),
        "passed": sum(case["verdict"] == "pass" for case in good),
        "rejected": sum(case["verdict"] == "reject" for case in good),
        "median_seconds": seconds[len(seconds) // 2] if seconds else None,
        "most_seconds": seconds[-1] if seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="w8a8-g32", help="form that is damaged")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gate", choices=("fast", "full"), default="fast")
    parser.add_argument("--part", choices=("damaged", "good", "both"), default="both")
    parser.add_argument("--candidate", action="append", default=[], help="another good model")
    parser.add_argument(
        "--per-seed", type=int, metavar="N", help="good candidates of each seed, in turn; else all"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no case after these")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    found: Case = {
        "machine": describe_machine(),
        "model": options.model,
        "damaged_form": options.weights,
        "gate": options.gate,
        "damaged": [],
        "good": [],
    }
    if options.output.exists():
        found |= json.loads(options.output.read_text(encoding="utf-8"))
    done = {(case["kind"], case["seed"]) for case in found["damaged"]}
    passed = {(c["candidate"], c["weights"], c["kv"], c["seed"]) for c in found["good"]}
    parts = {"damaged": damaged_cases(options, done), "good": good_cases(options, passed)}
    for part, cases in parts.items():
        if options.part not in (part, "both"):
            continue
        while time.monotonic() < until and (case := next(cases, None)) is not None:
            found[part].append(case)
            found["summary"] = summary(found)
            text = json.dumps(found, indent=1, default=str, allow_nan=False)
            files.write(options.output, text + "\n")
            print(part, {name: case[name] for name in list(case)[:6]}, flush=True)
    print(json.dumps(found.get("summary")))


if __name__ == "__main__":
    main()
