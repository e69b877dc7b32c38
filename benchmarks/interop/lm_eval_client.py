"""lm-eval's own client (local-completions), unmodified, against a running Trivet server.

    python benchmarks/interop/lm_eval_client.py --model demo -o lm_eval.json

Makes a virtual environment of its own under build/interop, installs lm-eval there, starts a server, and
has the client score a few continuations and generate a few texts. Checks that every loglikelihood is
within 1e-4 of `trivet.LLM.score` in this process, that the server's tokenizer is used, and that stop
strings end the generated texts. The last line of standard output is the result as JSON; the exit code
is 1 when something differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivet import LLM
from trivet.bench.machine import describe_machine
from trivet.config import KVFormat, ModelConfig, ServerConfig
from trivet.gateway import LocalServer

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "interop" / "lm_eval"
LM_EVAL = "lm-eval[api]==0.4.13"
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
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

job = json.load(sys.stdin)
lm = LocalCompletionsAPI(
    model=job["model"], base_url=job["url"] + "/v1/completions", max_length=job["max_length"],
    batch_size=job["batch_size"], num_concurrent=job["num_concurrent"], max_retries=1,
)
def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
scores = lm.loglikelihood(instances("loglikelihood", [tuple(p) for p in job["pairs"]]))
options = {"until": job["until"], "max_gen_toks": 24, "do_sample": False}
texts = lm.generate_until(instances("generate_until", [(t, dict(options)) for t in job["texts"]]))
print(json.dumps({"scores": [[float(v), bool(g)] for v, g in scores], "texts": texts,
                  "tokenizer": type(lm.tokenizer).__name__}))
"""


def environment() -> Path:
    """The python of lm-eval's environment; installed once."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / ".installed"
    if not stamp.exists() or stamp.read_text() != LM_EVAL:
        print(f"interop: installing {LM_EVAL} into {ENVIRONMENT}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", LM_EVAL], check=True)
        stamp.write_text(LM_EVAL)
    return python


def run_client(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval's client makes of the server."""
    done = subprocess.run(
        [str(python), "-c", _CLIENT],
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
    python = environment()
    expected = expected_scores(options.model, options.weights, options.kv)
    config = ServerConfig(
        model=ModelConfig(
            model=options.model,
            weights=options.weights,
            kv=KVFormat.parse(options.kv),
            max_model_len=MAX_MODEL_LEN,
        ),
        port=0,
        served_model_name="served",
    )
    faults, runs = [], []
    with LocalServer(config) as server:
        for batch_size, num_concurrent in ((1, 1), (4, 1), (1, 3)):
            job = {
                "url": server.url,
                "model": "served",
                "pairs": PAIRS,
                "texts": TEXTS,
                "until": UNTIL,
                "max_length": MAX_MODEL_LEN - 1,
                "batch_size": batch_size,
                "num_concurrent": num_concurrent,
            }
            result = run_client(python, job)
            runs.append({"batch_size": batch_size, "num_concurrent": num_concurrent, **result})
            faults += compare(result["scores"], expected, result["texts"])
    report = {
        "lm_eval": LM_EVAL,
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
