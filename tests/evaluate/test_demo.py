"""The formats on the demo model stay within the gate."""

from __future__ import annotations

import dataclasses
import json

import pytest

from support.data import demo_file
from trivet.checkpoint import Tokenizer
from trivet.config import KVFormat, ModelConfig
from trivet.evaluate import (
    Verdict,
    encode_corpora,
    judge_corpora,
    load_corpora,
    measure_quality,
    new_scorer,
)
from trivet.evaluate.checks import identity
from trivet.evaluate.results import Finding
from trivet.evaluate.subject import LocalSubject
from trivet.loader import load_model

pytestmark = [pytest.mark.demo, pytest.mark.slow]


def test_formats_pass_the_gate_on_the_demo_model() -> None:
    demo_file()
    settings = {
        "w8a8": ("w8a8", KVFormat.BF16),
        "int8 KV": ("bf16", KVFormat.INT8),
        "w8a8, int8 KV": ("w8a8", KVFormat.INT8),
        "own grid, int8 KV": ("auto", KVFormat.INT8),
    }
    base = load_model(ModelConfig(model="demo", weights="bf16"))
    scorers = {
        name: new_scorer(load_model(ModelConfig(model="demo", weights=weights, kv=kv)), 256)
        for name, (weights, kv) in settings.items()
    }
    corpora = encode_corpora(
        base.tokenizer, load_corpora(None), max_tokens=256, context=256, stride=256
    )
    reports = measure_quality(scorers, corpora, new_scorer(base, 256))
    for name, report in reports.items():
        result = judge_corpora(report)
        assert result.verdict is Verdict.PASS, (name, result)
        assert report.overall.mean_kl is not None
        limit = 0.002 if name == "int8 KV" else 0.01
        assert report.overall.mean_kl < limit, (name, report.overall)


def test_a_few_lost_merges_are_another_tokenizer() -> None:
    """Of 48,900 merges the last 500: no short probe text has one of them."""
    demo_file()
    whole = load_model(ModelConfig(model="demo"))
    data = whole.tokenizer.data
    content = json.loads(data.json)
    content["model"]["merges"] = content["model"]["merges"][:-500]
    cut = Tokenizer(dataclasses.replace(data, json=json.dumps(content)))
    packed = dataclasses.replace(whole.packed, _tokenizers=[cut])
    broken = dataclasses.replace(whole, packed=packed)
    found = identity.check(LocalSubject(broken, 64), LocalSubject(whole, 64))
    assert found.finding is Finding.REJECT
    assert found.metrics["differ"] == ["token ids of texts"]
    same = identity.check(LocalSubject(whole, 64), LocalSubject(whole, 64))
    assert same.finding is Finding.PASS
