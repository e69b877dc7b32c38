"""Perplexity of every engine's own form on references A and B, against transformers in float32.

    python benchmarks/peers/quality.py -o benchmarks/results/peers_quality.json [--only 'llama.cpp *']
        [--models demo reference-b] [--settings FILE] [--corpus FILE]

Each engine scores the same windows as benchmarks/accuracy.py (wikitext, 4096 tokens, context and
stride 1024) with its own kernels, activations and KV, and the settings that its decode speed is
measured with. OpenVINO gives no logits of a prompt through GenAI, so its graph is run by the plain
runtime with the same properties. Baselines are the float32 perplexities in accuracy_demo.json (A) and
accuracy_reference_b.json (B).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
from engines import FORMS, HERE
from environments import ROOT, PeerUnavailableError
from prompts import text_ids
from protocol import EngineError

from trivet.bench.machine import describe_machine
from trivet.evaluate.scoring import make_windows
from trivet.files import write

RESULTS = ROOT / "benchmarks" / "results"
DATA = Path(os.environ.get("TRIVET_TEST_DATA", ROOT.parent / "shared" / "data"))
BASELINES = {"demo": "accuracy_demo.json", "reference-b": "accuracy_reference_b.json"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--only", nargs="*", help="patterns of form names")
    parser.add_argument("--settings", type=Path, default=RESULTS / "peers_settings.json")
    parser.add_argument("--corpus", type=Path, default=DATA / "corpora" / "wikitext2_valid.txt")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"models": {}}
    if arguments.output.exists():
        report = json.loads(arguments.output.read_text())
    report |= {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "machine": describe_machine(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        ).stdout.strip(),
    }
    text = arguments.corpus.read_text()
    for model in arguments.models:
        baseline = json.loads((RESULTS / BASELINES[model]).read_text())
        tokens, context = baseline["tokens"], baseline["context"]
        if arguments.corpus.name != baseline["corpus"] or baseline["stride"] != context:
            raise SystemExit(f"quality: {BASELINES[model]} was measured on other windows")
        ids = text_ids(text[: tokens * 16])[: tokens + 1]
        windows = make_windows(ids, context=context, stride=context)
        settings = engines.load_settings(arguments.settings, "demo")
        mine = report["models"].setdefault(model, {"forms": {}})
        mine |= {
            "corpus": baseline["corpus"],
            "tokens": tokens,
            "context": context,
            "stride": context,
            "reference": baseline["reference"],
            "reference_perplexity": baseline["reference_perplexity"],
        }
        for form in FORMS:
            if arguments.only and not any(
                fnmatch.fnmatchcase(form.name, p) for p in arguments.only
            ):
                continue
            own = settings.get(form.name, {}).get("decode", {})
            options = {"score_only": True} if form.peer == "openvino" else {}
            entry: dict[str, Any]
            try:
                child, answer = engines.start(form, model, arguments.threads, own, **options)
                try:
                    losses: list[float] = []
                    for window in windows:
                        whole = [*window.input_ids, window.target_ids[-1]]
                        losses += child.call(op="nll", ids=whole)["nll"]
                finally:
                    child.close()
            except (PeerUnavailableError, EngineError) as error:
                entry = {"not_run": str(error)}
            else:
                assert len(losses) == tokens, (form.name, len(losses))
                perplexity = math.exp(sum(losses) / len(losses))
                entry = {
                    "perplexity": perplexity,
                    "delta_ppl": perplexity - baseline["reference_perplexity"],
                    "settings": answer["settings"],
                    "version": answer["version"],
                }
            mine["forms"][form.name] = entry
            shown = entry.get("delta_ppl", entry.get("not_run"))
            print(f"quality: {model}: {form.name}: {shown}", file=sys.stderr, flush=True)
            write(arguments.output, json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
