"""Speed, memory and quality of each format on this machine, as one JSON file and one table.

    python benchmarks/engine.py -o out/engine.json [--model demo] [--repeat 5] [--batches 1,32]

Each configuration runs `bench engine` in a process of its own, alone on the machine, and is compared
with bf16 on the built-in corpora. Ratios between engines come from `benchmarks/peers`, not from here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trivet.bench import EngineBench, bench_engine
from trivet.bench.machine import describe_machine
from trivet.config import KVFormat, ModelConfig
from trivet.errors import TrivetError
from trivet.evaluate import evaluate_model
from trivet.json_values import plain

CONFIGURATIONS = (
    ("bf16", "bf16"),
    ("w8a8", "bf16"),
    ("w8a8", "int8"),
    ("auto", "bf16"),
    ("auto", "int8"),
    ("w4a8-g32", "bf16"),
)


def measure(options: argparse.Namespace, weights: str, kv: str) -> dict[str, Any]:
    """Quality and the speeds of each batch size of one configuration."""
    config = ModelConfig(model=options.model, weights=weights, kv=KVFormat.parse(kv))
    baseline = ModelConfig(model=options.model, weights="bf16")
    evaluation = evaluate_model(config, baseline, max_tokens=options.max_tokens)
    batches = {}
    for batch in options.batches:
        bench = EngineBench(
            batch=batch,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            repeat=options.repeat,
        )
        batches[str(batch)] = bench_engine(config, bench)
    return {
        "weights": evaluation.weights,
        "kv": kv,
        "quality": evaluation.report.as_json(),
        "batches": batches,
    }


def main() -> int:
    """Measure everything; write the file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=2048, help="scored of each corpus")
    parser.set_defaults(batches=[1, 32])
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "model": options.model}
    result |= {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    result["configurations"] = []
    heads = ("weights", "kv", "batch", "decode tok/s", "prefill tok/s", "out tok/s", "MiB")
    print(f"{heads[0]:<18}{heads[1]:<6}" + "".join(f"{head:>14}" for head in heads[2:]), end="")
    print(f"{'delta ppl':>11}{'mean KL':>10}")
    for weights, kv in CONFIGURATIONS:
        one = measure(options, weights, kv)
        result["configurations"].append(one)
        worst = max(row["delta_ppl"] or 0.0 for row in one["quality"]["corpora"])
        for batch, speeds in one["batches"].items():
            figures = [
                speeds[name] or 0.0 for name in ("decode_tok_s", "prefill_tok_s", "out_tok_s")
            ]
            mebibytes = speeds["peak_rss_bytes"] / 2**20
            print(
                f"{one['weights']:<18}{kv:<6}{batch:>14}"
                + "".join(f"{figure:>14.1f}" for figure in [*figures, mebibytes])
                + f"{worst:>+11.3f}{one['quality']['overall']['mean_kl']:>10.4f}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(plain(result), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrivetError as error:
        sys.exit(f"engine.py: {error}")
