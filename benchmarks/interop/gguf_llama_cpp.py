"""Trivet's GGUF files in llama.cpp, and its quantizer beside llama.cpp's own.

    python benchmarks/interop/gguf_llama_cpp.py --model build/reference_b -o gguf.json

Writes the model as F32 and in every mix, with and without an importance matrix that Trivet computes
on the built-in prose; has llama.cpp's quantizer (llama_model_quantize) make the same mixes from the
same F32 file and the same matrix. All files are loaded in llama.cpp, which says how far each is
from the F32 file on the built-in code and prose (KL divergence, top-1 agreement). Checks: every
tensor has the type llama.cpp gives it; the files load; KL is not above llama.cpp's own by more than
the spread of the measurement; greedy text of llama.cpp and of Trivet's runtime agree on the same
file. With ``--resume`` rows of the output file stay. llama.cpp has a virtual environment of its own
under build/peers. The last line of standard output is the result as JSON; exit code 1 when a check
fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from trivet import LLM, SamplingParams, files
from trivet.bench.machine import describe_machine
from trivet.checkpoint import GGUFCheckpoint, Tokenizer
from trivet.checkpoint.ggml.imatrix import ImportanceMatrix
from trivet.checkpoint.ggml.mixes import MIXES
from trivet.evaluate.corpora import builtin_corpora
from trivet.models.gguf_export import write_gguf
from trivet.quant.imatrix import collect_imatrix
from trivet.quant.load import load_packed

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
CHILD = Path(__file__).with_name("gguf_llama_cpp_child.py")
CONTEXT = 512
MIX_NAMES = tuple(name for name in MIXES if name not in ("F32", "F16", "BF16"))
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics are",
    "Water boils at",
    "To make a good cup of tea, first",
)
# A KL within this share of llama.cpp's counts as equal: the spread over halves of the text.
TIE = 0.02


@functools.cache
def peer() -> Path:
    """The python of llama.cpp's environment, which is made when it is not there."""
    sys.path.insert(0, str(PEERS))
    import environments

    python: Path = environments.llama_cpp()
    return python


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in llama.cpp's environment."""
    done = subprocess.run(
        [str(peer()), str(CHILD)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise SystemExit(f"llama.cpp failed on {job['do']} {job.get('path')}: {tail}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def windows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """``count`` windows of CONTEXT tokens, alternating prose and code, away from the calibration."""
    found = []
    streams = [tokenizer.encode(c.text[-400_000:], False) for c in builtin_corpora()]
    for i in range(count):
        stream = streams[i % 2]
        at = len(stream) - (i // 2 + 1) * CONTEXT
        found.append(stream[at : at + CONTEXT])
    return found


def importance(model: str, tokenizer: Tokenizer, chunks: int) -> ImportanceMatrix:
    """Of the first chunks of both built-in corpora, by turns."""
    texts = builtin_corpora()
    streams = [tokenizer.encode(c.text[:400_000], False) for c in texts]
    sequences = [streams[i % 2][i // 2 * CONTEXT : (i // 2 + 1) * CONTEXT] for i in range(chunks)]
    return collect_imatrix(load_packed(model), sequences, datasets=[c.name for c in texts])


def types_of(path: Path) -> dict[str, str]:
    """Tensor name -> type."""
    return {name: info.dtype for name, info in GGUFCheckpoint(path).tensors.items()}


def measure(path: Path, base: Path, texts: list[list[int]]) -> dict[str, Any]:
    return child({"do": "divergence", "path": str(path), "base": str(base), "windows": texts})


def greedy(path: Path, tokenizer: Tokenizer, num_tokens: int) -> dict[str, Any]:
    """Greedy continuations of llama.cpp and Trivet on one file; shares of equal tokens."""
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    theirs = child({"do": "greedy", "path": str(path), "prompts": prompts, "tokens": num_tokens})
    with LLM(str(path)) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        )
    equal, prefix = 0, []
    for output, ids in zip(outputs, theirs["ids"], strict=True):
        ours = output.token_ids
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, ids, strict=False)) if a != b), len(ids)
        )
        prefix.append(same)
        equal += same == len(ids)
    return {"prompts": len(prompts), "tokens": num_tokens, "equal": equal, "prefix": prefix}


def label_of(row: dict[str, Any]) -> str:
    return f"{row['mix']}{' with importance' if row['importance'] else ''}"


def failures_of(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, a line each."""
    found = []
    if not row["same_types"]:
        found.append(f"{label_of(row)}: other tensor types than llama.cpp's")
    if row["kl_ratio"] > 1 + TIE:
        found.append(f"{label_of(row)}: KL {row['kl_ratio']:.3f} of llama.cpp's")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(ROOT / "build" / "reference_b"))
    parser.add_argument("--mixes", nargs="*", default=list(MIX_NAMES))
    parser.add_argument("--windows", type=int, default=8, help=f"of {CONTEXT} tokens")
    parser.add_argument("--chunks", type=int, default=64, help="of the importance matrix")
    parser.add_argument("--tokens", type=int, default=32, help="of each greedy text")
    parser.add_argument("--resume", action="store_true", help="keep the output file's rows")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "llama_cpp": child({"do": "version"})["version"],
        "model": Path(args.model).name,
        "context": CONTEXT,
        "tokens_scored": args.windows * (CONTEXT - 1),
        "importance_tokens": args.chunks * CONTEXT,
        "rows": [],
    }
    if args.resume and args.output and args.output.exists():
        known = json.loads(args.output.read_text())
        same = ("llama_cpp", "model", "context", "tokens_scored", "importance_tokens")
        if all(known[key] == result[key] for key in same):
            result["rows"] = known["rows"]
    rows: list[dict[str, Any]] = result["rows"]
    done = {(row["mix"], row["importance"]) for row in rows}
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        work = Path(folder)
        base = work / "base.F32.gguf"
        write_gguf(base, args.model, "F32", name="interop")
        tokenizer = Tokenizer(GGUFCheckpoint(base).tokenizer_data())
        texts = windows(tokenizer, args.windows)
        logits = work / "base.npy"
        child({"do": "logits", "path": str(base), "windows": texts, "out": str(logits)})
        matrix = importance(args.model, tokenizer, args.chunks)
        means = work / "importance.npz"
        np.savez(means, **{n: e.sums[0] / e.counts[0] for n, e in matrix.entries.items()})
        for mix in args.mixes:
            for weighted in (False, True):
                if (mix, weighted) in done:
                    continue
                ours, theirs = work / "ours.gguf", work / "theirs.gguf"
                start = time.perf_counter()
                written = write_gguf(ours, args.model, mix, matrix if weighted else None)
                seconds = time.perf_counter() - start
                child({
                    "do": "quantize", "source": str(base), "path": str(theirs),
                    "file_type": MIXES[mix][1], "importance": str(means) if weighted else None,
                })  # fmt: skip
                row: dict[str, Any] = {
                    "mix": mix,
                    "importance": weighted,
                    "bytes": written.num_bytes,
                    "seconds": round(seconds, 1),
                    "same_types": types_of(ours) == types_of(theirs),
                    "ours": measure(ours, logits, texts),
                    "llama_cpp": measure(theirs, logits, texts),
                }
                row["kl_ratio"] = row["ours"]["kl"] / row["llama_cpp"]["kl"]
                if not weighted:
                    row["greedy"] = greedy(ours, tokenizer, args.tokens)
                rows.append(row)
                print(label_of(row), json.dumps(row), file=sys.stderr, flush=True)
                ours.unlink()
                theirs.unlink()
                if args.output:
                    files.write(args.output, json.dumps(result, indent=1) + "\n")
    failures = result["failures"] = [text for row in rows for text in failures_of(row)]
    if args.output:
        files.write(args.output, json.dumps(result, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
