"""lm-eval's own client (local-completions), unmodified, against `trivet serve`.

    make interop
    python benchmarks/interop/lm_eval_client.py --model demo -o lm_eval.json

lm-eval has a virtual environment of its own under build/interop, which make sets up. Starts a
server and has the client score a few continuations and generate a few texts. Checks that every
loglikelihood is within 1e-4 of `trivet.LLM.score` in this process, that the server's tokenizer is
used, and that stop strings end the generated texts. The last line of standard output is the result
as JSON; the exit code is 1 when something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trivet import LLM
from trivet.bench.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "interop" / "lm_eval" / "bin" / "python"
TOLERANCE = 1e-4
MAX_MODEL_LEN = 1024

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a banana"),
    ("Two plus two equals", " four."),
    ("Water is made of hydrogen and", " oxygen, and it is wet."),
    ("def add(a, b):\n    return", " a + b\n"),
    ("Je m'appelle", " Andr\u00e9 \U0001f680"),
]
TEXTS = ["Question: What colour is the sky?\nAnswer:", "List three fruits:\n1."]
UNTIL = ["\n", "."]

# Runs in lm-eval's environment: reads the job on standard input, prints one JSON line.
_CLIENT = """
import json, sys
from importlib.metadata import version
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

job = json.load(sys.stdin)
lm = get_model("local-completions")(
    model=job["model"], base_url=job["url"] + "/v1/completions", max_length=job["max_length"],
    batch_size=job["batch_size"], num_concurrent=job["num_concurrent"], max_retries=1,
)
def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
scores = lm.loglikelihood(instances("loglikelihood", [tuple(p) for p in job["pairs"]]))
options = {"until": job["until"], "max_gen_toks": 24, "do_sample": False}
texts = lm.generate_until(instances("generate_until", [(t, dict(options)) for t in job["texts"]]))
print(json.dumps({"scores": [[float(v), bool(g)] for v, g in scores], "texts": texts,
                  "tokenizer": type(lm.tokenizer).__name__, "lm_eval": version("lm_eval")}))
"""


@contextlib.contextmanager
def served(model: str, *words: str) -> Iterator[str]:
    """`trivet serve` on a free port, from its ready line on; yields the address."""
    command = [sys.executable, "-m", "trivet", "serve", model, "--port", "0", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("ready "):
                    break
            else:
                raise SystemExit(f"the server did not start:\n{''.join(lines)}")
            yield line.split()[1]
        finally:
            process.send_signal(signal.SIGTERM)


def run_client(job: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval's client makes of the server."""
    done = subprocess.run(
        [str(PYTHON), "-c", _CLIENT],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"lm-eval's client failed:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def expected_scores(model: str, weights: str, kv: str) -> list[float]:
    """Sum of the continuation's log-probabilities, in this process.

    Tokens are divided as lm-eval does it: those of the whole text, less those of the context alone.
    """
    with LLM(model, weights=weights, kv=kv, max_model_len=MAX_MODEL_LEN) as llm:
        encode = llm.model.tokenizer.encode
        scores = []
        for context, continuation in PAIRS:
            ids = encode(context + continuation)
            [values] = llm.score([ids])
            scores.append(sum(value or 0.0 for value in values[len(encode(context)) :]))
    return scores


def compare(
    scores: Sequence[Sequence[Any]], expected: Sequence[float], texts: Sequence[str]
) -> list[str]:
    """What is wrong, one line each."""
    faults = []
    for (context, continuation), (value, _), wanted in zip(PAIRS, scores, expected, strict=True):
        if abs(value - wanted) > TOLERANCE:
            faults.append(f"{context!r}{continuation!r}: {value} through HTTP, {wanted} in process")
    faults += [f"{text!r} holds a stop string" for text in texts if any(s in text for s in UNTIL)]
    if len(set(texts)) < len(texts) or not all(text.strip() for text in texts):
        faults.append(f"texts look wrong: {texts!r}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    if not PYTHON.exists():
        raise SystemExit(f"{PYTHON} is missing: run make interop")
    expected = expected_scores(options.model, options.weights, options.kv)
    words = ["--weights", options.weights, "--kv", options.kv]
    words += ["--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "served"]
    faults, runs = [], []
    with served(options.model, *words) as url:
        for batch_size, num_concurrent in ((1, 1), (4, 1), (1, 3)):
            job = {
                "url": url,
                "model": "served",
                "pairs": PAIRS,
                "texts": TEXTS,
                "until": UNTIL,
                "max_length": MAX_MODEL_LEN - 1,
                "batch_size": batch_size,
                "num_concurrent": num_concurrent,
            }
            result = run_client(job)
            runs.append({"batch_size": batch_size, "num_concurrent": num_concurrent, **result})
            faults += compare(result["scores"], expected, result["texts"])
    [version] = {run.pop("lm_eval") for run in runs}
    report = {
        "lm_eval": version,
        "model": options.model,
        "machine": describe_machine(),
        "expected": expected,
        "runs": runs,
        "faults": faults,
    }
    text = json.dumps(report)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
