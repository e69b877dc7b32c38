"""Does the gate catch damaged checkpoints, and pass good ones?

Every kind of damage is done to the demo model at its smallest extent (one group, one row, one tensor)
and drawn by a seed; good candidates are formats that are near lossless on it. Prints one JSON object:
per case the finding, the check that saw it and the seconds, and the two rates.

    python benchmarks/gate_corruptions.py [--seeds 5] [--good 10] [--gate fast] [-o FILE]

By default damage is judged by the checks of files (weights, identity) alone, which see a single
group; ``--gate fast`` runs the whole gate on good candidates.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from trivet.bench.machine import describe_machine
from trivet.config import KVFormat, ModelConfig
from trivet.evaluate import GateOptions, evaluate_model
from trivet.evaluate.checks import identity, weights
from trivet.evaluate.corruptions import CORRUPTIONS, corrupted
from trivet.evaluate.subject import LocalSubject
from trivet.loader import load_model

GOOD = (("auto", "bf16"), ("w8a8", "bf16"), ("w8a8-g32", "bf16"), ("w8a8-g64", "bf16"),
        ("bf16", "int8"), ("auto", "int8"), ("w8a8", "int8"), ("w8a8-g32", "int8"),
        ("w8a8-g128", "bf16"), ("bf16", "bf16"))  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. " * 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="w8a8-g32", help="form that is damaged")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--good", type=int, default=len(GOOD))
    parser.add_argument("--gate", choices=("off", "fast", "full"), default="off")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    base = load_model(ModelConfig(model=options.model, weights="bf16"))
    candidate = load_model(ModelConfig(model=options.model, weights=options.weights))
    ids = base.tokenizer.encode(TEXT)
    subject = LocalSubject(base, 512)
    cases: list[dict[str, Any]] = []
    for kind in CORRUPTIONS:
        for seed in range(options.seeds):
            begin = time.monotonic()
            broken = corrupted(candidate, kind, seed)
            found = [weights.check(broken, base, ids)]
            found.append(identity.check(LocalSubject(broken, 512), subject))
            caught = [check.check for check in found if check.finding.value == "reject"]
            cases.append(
                {
                    "kind": kind,
                    "seed": seed,
                    "caught_by": caught,
                    "reasons": [c.reason for c in found if c.check in caught],
                    "seconds": time.monotonic() - begin,
                }
            )
            print(f"{kind} {seed}: {caught or 'MISSED'}", flush=True)
    good: list[dict[str, Any]] = []
    for form, kv in GOOD[: options.good]:
        for seed in range(options.seeds):
            begin = time.monotonic()
            config = ModelConfig(model=options.model, weights=form, kv=KVFormat(kv))
            entry: dict[str, Any] = {"weights": form, "kv": kv, "seed": seed}
            if options.gate == "off":
                check = weights.check(load_model(config), base, ids)
                entry |= {"finding": check.finding.value, "reasons": [check.reason]}
            else:
                gate = GateOptions(size=options.gate, seed=seed)
                result = evaluate_model(config, base.config, gate=gate).gate
                assert result is not None
                entry |= {"finding": result.verdict.value, "reasons": result.reasons}
            entry["seconds"] = time.monotonic() - begin
            good.append(entry)
            print(f"{form} {kv} {seed}: {entry['finding']}", flush=True)
            if options.gate == "off":
                break  # the checks of files have no seed
    report = {
        "machine": describe_machine(),
        "model": options.model,
        "damaged_form": options.weights,
        "gate": options.gate,
        "catch_rate": sum(bool(case["caught_by"]) for case in cases) / max(1, len(cases)),
        "pass_rate": sum(case["finding"] == "pass" for case in good) / max(1, len(good)),
        "cases": cases,
        "good": good,
    }
    text = json.dumps(report, indent=1, default=str)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text if options.output is None else f"catch rate {report['catch_rate']:.1%},"
          f" pass rate {report['pass_rate']:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
