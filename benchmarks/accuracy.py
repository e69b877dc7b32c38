"""Trivet's logits against transformers' float32 forward of the same file, format by format.

    python benchmarks/accuracy.py -o benchmarks/results/accuracy.json [--model demo|FOLDER]
        [--corpus FILE] [--tokens 4096] [--context 1024] [--forms bf16/bf16 w8a8/bf16 bf16/int8 ...]

Needs torch and transformers (the test environment has them). A form is WEIGHTS/KV. Each window of
``context`` tokens is run alone and every row is scored, as in `trivet evaluate` with stride = context.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trivet.config import PAGE_TOKENS, KVFormat
from trivet.evaluate.scoring import CHUNK_ROWS, LogSoftmax, Scorer, Tally, make_windows
from trivet.native import Arena, isa_report, load_model
from trivet.quant import load_packed

DATA = Path(os.environ.get("TRIVET_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
DEFAULT_FORMS = ["bf16/bf16", "bf16/int8", "w8a8/bf16", "w8a8/int8", "auto/bf16", "auto/int8"]


class TransformersForward:
    """The reference: LlamaForCausalLM or its sibling in float32, logits of whole windows."""

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        torch.set_num_threads(2)
        self._torch = torch
        if path.is_file():
            options = {"gguf_file": path.name, "dtype": torch.float32}
            self._model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options)
        else:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32
            )
        self._model.eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def chunks(self, input_ids: list[int], num_scored: int) -> Iterator[np.ndarray]:
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([input_ids])).logits[0, -num_scored:].numpy()
        for start in range(0, num_scored, CHUNK_ROWS):
            yield logits[start : start + CHUNK_ROWS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--corpus", type=Path, default=DATA / "corpora" / "wikitext2_valid.txt")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--forms", nargs="+", default=DEFAULT_FORMS)
    arguments = parser.parse_args()

    from trivet.checkpoint import resolve_model

    source = resolve_model(arguments.model).path
    reference = TransformersForward(source)
    scorers, forms = {}, {}
    tokenizer = None
    for form in arguments.forms:
        weights, kv = form.split("/")
        packed = load_packed(arguments.model, weights)
        tokenizer = tokenizer or packed.tokenizer()
        model = load_model(packed, kv=KVFormat.parse(kv))
        pages = -(-arguments.context // PAGE_TOKENS)
        scorers[form] = Scorer(model, Arena(model.kv_geometry(), pages))
        forms[form] = packed.weights_form
    assert tokenizer is not None
    text = arguments.corpus.read_text()
    ids = tokenizer.encode(text[: arguments.tokens * 16], add_special_tokens=False)
    ids = ids[: arguments.tokens + 1]
    windows = make_windows(ids, context=arguments.context, stride=arguments.context)

    base, tallies = Tally(), {form: Tally() for form in scorers}
    for window in windows:
        count = len(window.target_ids)
        walks = {form: s.chunks(window.input_ids, count) for form, s in scorers.items()}
        for index, expected in enumerate(reference.chunks(window.input_ids, count)):
            start = index * CHUNK_ROWS
            targets = np.asarray(window.target_ids[start : start + CHUNK_ROWS], np.int64)
            ref = LogSoftmax.of(expected)
            base.add(Tally(len(targets), ref.nll(targets)))
            for form, walk in walks.items():
                own = LogSoftmax.of(next(walk))
                tallies[form].add(
                    Tally(len(targets), own.nll(targets), ref.kl_to(own), ref.agreement(own))
                )
    result: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "model": arguments.model if arguments.model == "demo" else source.name,
        "corpus": arguments.corpus.name,
        "context": arguments.context,
        "stride": arguments.context,
        "tokens": base.tokens,
        "reference": reference.version,
        "reference_perplexity": base.perplexity,
        "isa": isa_report().active,
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "forms": {},
    }
    for form, tally in tallies.items():
        result["forms"][form] = {
            "weights": forms[form],
            "kv": form.split("/")[1],
            "perplexity": tally.perplexity,
            "delta_ppl": (tally.perplexity or 0) - (base.perplexity or 0),
            "mean_kl": tally.kl_sum / tally.tokens,
            "top1_agreement": tally.agreed / tally.tokens,
        }
        print(form, json.dumps(result["forms"][form]))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
