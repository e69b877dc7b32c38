#!/usr/bin/env python3
"""Quantize models by several methods and measure each result against the model in bf16.

Every run is quantized, measured and written to the result file before the next begins; a run that is
there already is left as it is, and one that was stopped goes on at the layer it had reached. So the
table can be made in pieces of any length. The weights are read as bf16 (``weights``), so that they
alone are measured, and as the engine runs them (``served``), activations in 8 bits included. A model
is NAME=PATH; its name stands in the table. Prints the result file's JSON as the last line; ``--into``
puts the table into a page, between the lines ``<!-- quantization -->`` and ``<!-- /quantization -->``.

    benchmarks/quantization.py a=demo b=build/reference_b -o build/quantized --traffic prompts.jsonl
        --corpus wikitext.txt --run rtn:4:64 --run gptq:4:64 --run kquant:Q4_K_M
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trivet import files, quantize
from trivet.bench.machine import describe_machine
from trivet.config import ModelConfig
from trivet.errors import TrivetError
from trivet.evaluate import encode_corpora, load_corpora, measure_quality, new_scorer
from trivet.loader import load_model

FORMS = {"weights": "bf16", "served": "auto"}
WHAT = (
    "Methods of quantization on the references: what each costs in quality against the model in bf16,"
    " and in bytes and seconds."
)


def parse_run(text: str) -> dict[str, Any]:
    """``METHOD:BITS:GROUP[:zp][:KEY=VALUE]`` as arguments of `trivet.quantize`.

    Of fp8 ``fp8:SCALE``, of k-quants ``kquant:TYPE``.
    """
    method, *rest = text.split(":")
    arguments: dict[str, Any] = {"method": method}
    if method == "fp8":
        arguments["fp8"] = rest.pop(0)
    elif method == "kquant":
        arguments["format"] = f"gguf:{rest.pop(0)}"
    else:
        arguments["bits"] = int(rest.pop(0))
        group = rest.pop(0)
        arguments["group_size"] = None if group == "row" else int(group)
        arguments["sym"] = "zp" not in rest
    for item in rest:
        key, _, value = item.partition("=")
        if value:
            number = {"damp": float, "max_bytes": int}.get(key)
            arguments[key] = number(value) if number else value
    return arguments


class _Clock:
    """Seconds and CPU seconds spent on one run, over all pieces of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.before = json.loads(path.read_text()) if path.exists() else [0.0, 0.0]
        self._start = time.monotonic(), time.process_time()

    def spent(self) -> list[float]:
        now = time.monotonic(), time.process_time()
        return [b + n - s for b, n, s in zip(self.before, now, self._start, strict=True)]

    def note(self, *_: object) -> None:
        """Called as the work goes on, so that a piece that is killed has counted."""
        files.write(self._path, json.dumps(self.spent()))


def make(model: str, folder: Path, options: argparse.Namespace, text: str) -> dict[str, Any]:
    """Quantize once; a folder that is there already is taken as it is."""
    clock = _Clock(folder.with_name(folder.name + ".seconds"))
    peak = None
    if not folder.exists():
        done = quantize(
            model,
            folder,
            traffic=options.traffic,
            samples=options.samples,
            seed=options.seed,
            gate="off",
            requantize=True,
            progress=clock.note,
            **parse_run(text),
        )
        clock.note()
        peak = done.peak_rss_bytes
    seconds, cpu_seconds = clock.before if peak is None else clock.spent()
    proof = json.loads((folder / "quantization.json").read_text())
    linears = proof.get("linears", [])
    ratios = [p["error_after"] / p["error_before"] for p in linears if p.get("error_before")]
    return {
        "path": folder.name,
        "bytes": proof["bytes"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_rss_bytes": peak,
        "tokens": max((p.get("tokens", 0) for p in linears), default=0),
        "output_error_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
        "output_error_ratio_max": max(ratios, default=None),
        "replaced": sum(bool(p.get("replaced")) for p in linears),
        "warnings": proof.get("warnings", []),
    }


def measure(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity, divergence and agreement of one result, form by form."""
    base = load_model(ModelConfig(model=model, weights="bf16"))
    encoded = encode_corpora(
        base.tokenizer, load_corpora(options.corpus),
        max_tokens=options.max_tokens, context=options.context, stride=options.context,
    )  # fmt: skip
    path = str(next(folder.glob("*.gguf"), folder))
    scorers, names = {}, {}
    for form in options.forms:
        candidate = load_model(ModelConfig(model=path, weights=FORMS[form]))
        names[form] = candidate.weights_form
        scorers[form] = new_scorer(candidate, options.context)
    reports = measure_quality(scorers, encoded, new_scorer(base, options.context))
    return {form: {"form": names[form], **reports[form].as_json()} for form in options.forms}


def run_all(options: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every run on every model that the result file does not have yet."""
    result: dict[str, Any] = {}
    if options.result.exists():
        result = json.loads(options.result.read_text())
    settings = {
        "traffic": None if options.traffic is None else options.traffic.name,
        "samples": options.samples,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "context": options.context,
    }
    known = {key: result.get(key) for key in settings}
    if result and known != settings:
        raise TrivetError(f"{options.result}: was made with other settings: {known}")
    result |= {"what": WHAT, **settings}
    runs: list[dict[str, Any]] = result.setdefault("runs", [])
    for given in options.models:
        name, _, model = given.partition("=")
        for text in options.run:
            if any((entry["model"], entry["run"]) == (name, text) for entry in runs):
                continue
            plain = "-".join([name, *text.replace("+", "-").replace("=", "-").split(":")])
            folder = options.output / plain
            entry = {"model": name, "run": text, "machine": describe_machine()}
            entry |= make(model, folder, options, text)
            runs.append(entry | measure(model, folder, options))
            save(result)
    return result


def markdown(result: dict[str, Any]) -> str:
    """All rows as a table, models in order, the least divergence first."""
    lines = [
        "| model | run | bytes | perplexity | mean KL | same top token | as served: form, mean KL |"
        " output error of rounding to nearest's: mean, largest | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    runs = sorted(
        result["runs"], key=lambda run: (run["model"], run["weights"]["overall"]["mean_kl"])
    )
    for run in runs:
        found, served = run["weights"]["overall"], run["served"]
        mean, largest = run["output_error_ratio_mean"], run["output_error_ratio_max"]
        error = f"{mean:.2f}, {largest:.2f}" if run["tokens"] and mean is not None else ""
        lines.append(
            f"| {run['model'].upper()} | `{run['run']}` | {run['bytes']:,} |"
            f" {found['delta_ppl']:+.2f} | {found['mean_kl']:.4f} |"
            f" {100 * found['top1_agreement']:.1f} % |"
            f" `{served['form']}` {served['overall']['mean_kl']:.4f} | {error} |"
            f" {run['seconds']:.0f} |"
        )
    bases = {run["model"].upper(): run["weights"]["overall"] for run in runs}
    told = ", ".join(f"{name} {base['baseline_perplexity']:.2f}" for name, base in bases.items())
    return "\n".join([*lines, "", f"Perplexity in bf16: {told}."])


def insert(text: str, content: str) -> str:
    """``text`` with ``content`` between the markers. Raises ValueError without them."""
    begin, end = "<!-- quantization -->", "<!-- /quantization -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{begin} and {end} are not both there")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def main() -> int:
    """Run, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where results are made")
    parser.add_argument("--run", action="append", default=[])
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/quantization.json"))
    parser.add_argument("--traffic", type=Path)
    parser.add_argument("--corpus", action="append", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table into this page")
    options = parser.parse_args()
    if any("=" not in given for given in options.models):
        parser.error("each model is NAME=MODEL")

    def save(result: dict[str, Any]) -> None:
        options.result.parent.mkdir(parents=True, exist_ok=True)
        files.write(options.result, json.dumps(result, indent=1) + "\n")

    try:
        options.output.mkdir(parents=True, exist_ok=True)
        result = run_all(options, save)
        if options.into is not None:
            page = options.into.read_text(encoding="utf-8")
            files.write(options.into, insert(page, markdown(result)))
    except (TrivetError, ValueError) as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
