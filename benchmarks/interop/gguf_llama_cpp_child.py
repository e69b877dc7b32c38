"""One job of gguf_llama_cpp.py inside llama.cpp's environment: JSON in, one JSON line out."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np

THREADS = 2


def opened(path: str, context: int, logits_all: bool) -> Any:
    return llama_cpp.Llama(
        path, verbose=False, n_ctx=context, n_batch=context, n_threads=THREADS,
        n_threads_batch=THREADS, logits_all=logits_all,
    )  # fmt: skip


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def window_logits(model: Any, window: list[int]) -> Any:
    model.reset()
    model.eval(window)
    return np.array(model.scores[: len(window)], np.float32)


def quantize(job: dict[str, Any]) -> dict[str, Any]:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = job["file_type"]
    params.nthread = THREADS
    if job["importance"]:
        means = np.load(job["importance"])
        table = (llama_cpp.llama_model_imatrix_data * (len(means.files) + 1))()
        kept = []
        for entry, name in zip(table, means.files, strict=False):
            values = np.ascontiguousarray(means[name], np.float32)
            kept.append(values)
            entry.name = name.encode()
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entry.size = values.size
        params.imatrix = ctypes.cast(table, type(params.imatrix))
    code = llama_cpp.llama_model_quantize(job["source"].encode(), job["path"].encode(), params)
    if code:
        raise SystemExit(f"llama_model_quantize: {code}")
    return {"ok": True}


def logits(job: dict[str, Any]) -> dict[str, Any]:
    model = opened(job["path"], len(job["windows"][0]), True)
    np.save(job["out"], np.stack([window_logits(model, w) for w in job["windows"]]))
    return {"ok": True}


def divergence(job: dict[str, Any]) -> dict[str, Any]:
    """Mean KL(base || file), top-1 agreement, and mean negative log-probability of both."""
    model = opened(job["path"], len(job["windows"][0]), True)
    base = np.load(job["base"], mmap_mode="r")
    kls, agreed, nll, base_nll = [], [], [], []
    for i, window in enumerate(job["windows"]):
        own, want = log_softmax(window_logits(model, window)), log_softmax(np.array(base[i]))
        kls.append((np.exp(want) * (want - own)).sum(axis=-1)[:-1])
        agreed.append((own.argmax(axis=-1) == want.argmax(axis=-1))[:-1])
        targets = np.array(window[1:])
        nll.append(-own[np.arange(len(targets)), targets])
        base_nll.append(-want[np.arange(len(targets)), targets])
    return {
        "kl": float(np.mean(kls)),
        "kl_windows": [round(float(np.mean(k)), 6) for k in kls],
        "top1": float(np.mean(agreed)),
        "perplexity": float(np.exp(np.mean(nll))),
        "base_perplexity": float(np.exp(np.mean(base_nll))),
    }


def greedy(job: dict[str, Any]) -> dict[str, Any]:
    longest = max(map(len, job["prompts"])) + job["tokens"]
    model = opened(job["path"], longest, False)
    found = []
    for prompt in job["prompts"]:
        model.reset()
        model.eval(prompt)
        ids: list[int] = []
        while len(ids) < job["tokens"]:
            pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            row = np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),))
            ids.append(int(np.argmax(row)))
            model.eval(ids[-1:])
        found.append(ids)
    return {"ids": found}


def version(job: dict[str, Any]) -> dict[str, Any]:
    return {"version": llama_cpp.__version__}


JOBS = {f.__name__: f for f in (quantize, logits, divergence, greedy, version)}

if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps(JOBS[task["do"]](task)))
