"""Speed of folders and files in the formats of the field, served as stored, beside the native format.

    python benchmarks/served_formats.py -o benchmarks/results/served_formats.json [--only 'gptq*']
        [--rounds 7] [--work build/served] [--model demo]

Every case rounds the model to a format, writes it and runs it in the form that `trivet info` names;
beside it runs the engine's own format of that width, packed from the same floats. Both decode one row
at 256 tokens of context and read a prompt of 256, alternately; the figures are medians of the rounds
and their ratio; ``heads`` names the form of both heads. With ``--only`` the other cases of an output
file of the same model stay; each says its commit. Prints a table, and the result's JSON as the last
line.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet import files, quantize
from trivet.bench.machine import describe_machine
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats import CodeGrid, Fp8Weight, fp8, write
from trivet.config import PAGE_TOKENS
from trivet.models import open_model
from trivet.models.export import write_float_folder
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float
from trivet.native import Arena, NativeModel, StepInput, load_model
from trivet.quant import PackedModel, load_packed
from trivet.quant.methods.gptq import quantize_nearest
from trivet.quant.plan import Fp8, parse_target

ROOT = Path(__file__).resolve().parents[1]
CONTEXT, STEPS = 256, 16
PAGES = -(-(CONTEXT + STEPS) // PAGE_TOKENS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A format of the field and the engine's own of the same width.

    target  rounding of a folder's linears (`trivet.quant.plan.parse_target`); a GGUF type otherwise
    order   each linear's columns lie in groups at random, its own: act-order at its worst
    """

    format: str
    target: str
    native: str
    order: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_CT = "compressed-tensors"
CASES = {
    "gptq w4-g64": Case("gptq", "w4-g64", "w4a8-g64"),
    "gptq w4-g32 act-order": Case("gptq", "w4-g32", "w4a8-g32", order=True),
    "gptq w3-g64": Case("gptq", "w3-g64", "w4a8-g64"),
    "gptq w8-g64": Case("gptq", "w8-g64", "w8a8-g64"),
    "awq w4-g64-zp": Case("awq", "w4-g64-zp", "w4a8-g64-zp"),
    "compressed-tensors w4-g32": Case(_CT, "w4-g32", "w4a8-g32"),
    "compressed-tensors int8": Case(_CT, "w8-row", "w8a8-g128", options={"activations": True}),
    "compressed-tensors fp8-channel": Case(_CT, "fp8-channel", "w8a8-g128"),
    "fp8 block": Case("fp8", "fp8-block", "w8a8-g128"),
    "gguf Q4_0": Case("gguf", "Q4_0", "w4a8-g32"),
    "gguf Q4_1": Case("gguf", "Q4_1", "w4a8-g32-min"),
    "gguf Q8_0": Case("gguf", "Q8_0", "w8a8-g32"),
    "gguf Q5_0": Case("gguf", "Q5_0", "w8a8-g32"),
    "gguf Q2_K": Case("gguf", "Q2_K", "w4a8-g32-min"),
    "gguf Q3_K_M": Case("gguf", "Q3_K_M", "w4a8-g32"),
    "gguf Q4_K_M": Case("gguf", "Q4_K_M", "w4a8-g32-min"),
    "gguf Q5_K_M": Case("gguf", "Q5_K_M", "w8a8-g32-min"),
    "gguf Q6_K": Case("gguf", "Q6_K", "w8a8-g32"),
}


def make(case: Case, source: Path, path: Path) -> Path:
    """Round and write the float folder. Returns what the engine is given."""
    if case.format == "gguf":
        quantize(
            str(source), path, method="rtn", format=f"gguf:{case.target}",
            gate="off", requantize=True,
        )  # fmt: skip
        return next(path.glob("*.gguf"))
    model, target = open_model(resolve_model(source)), parse_target(case.target)
    rng = np.random.default_rng(0)

    def rounded(values: NDArray[np.float32]) -> CodeGrid | Fp8Weight:
        if isinstance(target, Fp8):
            return fp8.quantize(values, target.block)
        assert target is not None
        grid = quantize_nearest(values, target)
        if not case.order:
            return grid
        assert target.group_size is not None
        index = rng.permutation(values.shape[1]) // target.group_size
        return dataclasses.replace(grid, group_index=index.astype(np.int32))

    weights = {
        model.file_name(role, layer): rounded(to_float(model.matrix(role, layer)))
        for layer in range(model.spec.num_layers)
        for role in matrix_shapes(model.spec)
    }
    write(path, source_folder=source, weights=weights, format=case.format, config=case.options)
    return path


class Runner:
    """One model; every call is one measurement."""

    def __init__(self, packed: PackedModel) -> None:
        self._model: NativeModel = load_model(packed)
        self._arena = Arena(self._model.kv_geometry(), PAGES)

    def _step(self, tokens: NDArray[np.int32], start: int) -> None:
        step = StepInput(
            tokens=tokens,
            segments=np.array([[0, len(tokens), start, 0]], np.int32),
            page_tables=np.arange(PAGES, dtype=np.int32)[None],
            logit_rows=np.array([len(tokens) - 1], np.int32),
        )
        self._model.forward(step, self._arena)

    def prefill(self) -> float:
        """Tokens a second."""
        begin = time.perf_counter()
        self._step(np.arange(CONTEXT, dtype=np.int32) % self._model.vocab_size, 0)
        return CONTEXT / (time.perf_counter() - begin)

    def decode(self) -> float:
        """Tokens a second."""
        begin = time.perf_counter()
        for index in range(STEPS):
            self._step(np.array([7], np.int32), CONTEXT + index)
        return STEPS / (time.perf_counter() - begin)


def measure(served: PackedModel, native: PackedModel, rounds: int) -> dict[str, Any]:
    """Rates of both, round by round, and the ratio of the medians."""
    runners = [Runner(served), Runner(native)]
    kinds: dict[str, Callable[[Runner], float]] = {
        "decode": Runner.decode,
        "prefill": Runner.prefill,
    }
    rates: dict[str, list[list[float]]] = {kind: [[], []] for kind in kinds}
    for index in range(rounds + 1):
        for who in (0, 1) if index % 2 else (1, 0):
            for kind in ("prefill", "decode"):
                rate = kinds[kind](runners[who])
                if index:  # the first round warms up
                    rates[kind][who].append(rate)
    return {
        kind: {
            "served": own,
            "native": other,
            "ratio": statistics.median(own) / statistics.median(other),
        }
        for kind, (own, other) in rates.items()
    }


def main() -> int:
    """Make, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/served"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", nargs="*", default=["*"], help="patterns of case names")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    source = options.work / "float"
    if not source.exists():
        write_float_folder(open_model(resolve_model(options.model)), source)
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "model": options.model,
        "context": CONTEXT,
        "machine": describe_machine(),
        "cases": {},
    }
    if options.only != ["*"] and options.output.exists():
        known = json.loads(options.output.read_text())
        if known["model"] == options.model:
            result["cases"] = known["cases"]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    for name, case in CASES.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only):
            continue
        folder = options.work / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        served = load_packed(make(case, source, folder))
        native = load_packed(source, case.native)
        entry = {
            "form": served.weights_form,
            "native": native.weights_form,
            "heads": [packed.tensors["head"].format for packed in (served, native)],
            "commit": commit,
            **measure(served, native, options.rounds),
        }
        result["cases"][name] = entry
        print(
            f"{name:32} {entry['form']:34} {entry['native']:14}"
            f" {'/'.join(entry['heads']):18} decode {entry['decode']['ratio']:.2f}"
            f"  prefill {entry['prefill']['ratio']:.2f}",
            file=sys.stderr,
        )
        shutil.rmtree(folder)
        files.write(options.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
