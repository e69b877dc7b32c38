#!/usr/bin/env python3
"""Quantize a model by several methods and measure each against the model in bf16, side by side.

The baseline's logits are computed once for all candidates. The weights are read as bf16 (``weights``),
so that they alone are measured, and as the engine runs them (``served``), activations in 8 bits
included. Prints JSON as the last line.

    benchmarks/quantization.py build/reference_b  -o build/quantized
        --run rtn:4:64 --run gptq:4:64 --run awq:4:64 --traffic prompts.jsonl --corpus wikitext.txt
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from trivet import __version__, native, quantize
from trivet.config import ModelConfig
from trivet.errors import TrivetError
from trivet.evaluate import encode_corpora, load_corpora, measure_quality, new_scorer
from trivet.loader import load_model


def parse_run(text: str) -> dict[str, Any]:
    """``METHOD:BITS:GROUP[:zp][:KEY=VALUE]`` as arguments of `trivet.quantize`."""
    method, bits, group, *rest = text.split(":")
    arguments: dict[str, Any] = {
        "method": method,
        "bits": int(bits),
        "group_size": None if group == "row" else int(group),
        "sym": "zp" not in rest,
    }
    for item in rest:
        key, _, value = item.partition("=")
        if value:
            arguments[key] = float(value) if key == "damp" else value
    return arguments


def make(options: argparse.Namespace, text: str) -> dict[str, Any]:
    """Quantize once; a folder that is there already is taken as it is."""
    folder = options.output / text.replace(":", "-").replace("+", "-").replace("=", "-")
    entry: dict[str, Any] = {"run": text, "path": str(folder)}
    if not folder.exists():
        done = quantize(
            options.model,
            folder,
            traffic=options.traffic,
            samples=options.samples,
            seed=options.seed,
            gate="off",
            requantize=True,
            **parse_run(text),
        )
        entry |= {"seconds": done.seconds, "peak_rss_bytes": done.peak_rss_bytes}
    proof = json.loads((folder / "quantization.json").read_text())
    linears = proof["linears"]
    ratios = [p["error_after"] / p["error_before"] for p in linears if p["error_before"]]
    entry |= {
        "bytes": proof["bytes"],
        "tokens": max((p["tokens"] for p in linears), default=0),
        "output_error_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
        "output_error_ratio_max": max(ratios, default=None),
        "replaced": sum(bool(p["replaced"]) for p in linears),
        "warnings": proof["warnings"],
    }
    return entry


def measure(options: argparse.Namespace, entries: list[dict[str, Any]]) -> None:
    """Add perplexity, divergence and agreement of every candidate to its entry."""
    base = load_model(ModelConfig(model=options.model, weights="bf16"))
    texts = load_corpora(options.corpus)
    encoded = encode_corpora(base.tokenizer, texts, max_tokens=options.max_tokens)
    scorers = {}
    for entry in entries:
        for name, weights in (("weights", "bf16"), ("served", "auto")):
            if name in options.forms:
                model = load_model(ModelConfig(model=entry["path"], weights=weights))
                entry[f"{name}_form"] = model.weights_form
                scorers[f"{entry['path']} {name}"] = new_scorer(model, 1024)
    reports = measure_quality(scorers, encoded, new_scorer(base, 1024))
    for entry in entries:
        for name in options.forms:
            entry[name] = reports[f"{entry['path']} {name}"].as_json()


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--run", action="append", required=True)
    parser.add_argument("--traffic", type=Path)
    parser.add_argument("--corpus", action="append", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", nargs="+", default=["weights"], choices=["weights", "served"])
    options = parser.parse_args()
    started = time.monotonic()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        entries = [make(options, text) for text in options.run]
        measure(options, entries)
    except TrivetError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    result = {
        "model": options.model,
        "traffic": None if options.traffic is None else options.traffic.name,
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "version": __version__,
        "isa": native.isa_report().active,
        "seconds": time.monotonic() - started,
        "runs": entries,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
