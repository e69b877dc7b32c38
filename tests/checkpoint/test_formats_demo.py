"""A layer of the demo model through each format: the engine runs the folder as its direct form.

The direct form is the float model packed into the same form by the same rounding. Both are packed with
the same tables, so that everything that fixes the logits must agree to the bit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from support.data import demo_file
from trivet import native
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats import write
from trivet.checkpoint.formats.fp8 import quantize
from trivet.config import PAGE_TOKENS, KVFormat, WeightFormat
from trivet.models import Model, open_model
from trivet.models.export import write_float_folder
from trivet.models.load import matrix_shapes
from trivet.models.reference import to_float
from trivet.native.weights import WeightTensor
from trivet.quant import PackedModel, load_packed
from trivet.quant.rtn import convert

VOCAB = 2048
pytestmark = [pytest.mark.demo, pytest.mark.slow]
Float32 = NDArray[np.float32]


def _to(name: str) -> Callable[[Float32], Any]:
    return lambda values: convert(values, WeightFormat.parse(name)).weight


# name -> format of the folder, rounding of a weight, form both sides are packed in
CASES: dict[str, tuple[str, Callable[[Float32], Any], str]] = {
    "gptq": ("gptq", _to("w4a8-g64"), "w4a8-g64"),
    "gptq_v2": ("gptq_v2", _to("w4a8-g32-zp"), "w4a8-g32-zp"),
    "awq": ("awq", _to("w4a8-g64-zp"), "w4a8-g64-zp"),
    "compressed-tensors": ("compressed-tensors", _to("w8a8-g32"), "w8a8-g32"),
    "float-quantized": ("compressed-tensors", lambda x: quantize(x, "channel"), "w8a8-g32"),
    "fp8": ("fp8", lambda x: quantize(x, (128, 128)), "w8a8-g32"),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = open_model(resolve_model(demo_file()))
    short = dataclasses.replace(model, spec=dataclasses.replace(model.spec, num_layers=1))
    path = tmp_path_factory.mktemp("demo") / "float"
    write_float_folder(short, path)
    # The tables are not quantized here and would take nearly all of the time.
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:VOCAB]
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    return path


def _names(model: Model) -> list[tuple[str, str, int]]:
    roles = matrix_shapes(model.spec)
    return [(model.file_name(r, i), r, i) for i in range(model.spec.num_layers) for r in roles]


def _logits(packed: PackedModel, tokens: list[int]) -> Float32:
    runner = native.load_model(packed, threads=1, kv=KVFormat.BF16)
    num_pages = -(-len(tokens) // PAGE_TOKENS)
    step = native.StepInput(
        tokens=np.asarray(tokens, np.int32),
        segments=np.asarray([[0, len(tokens), 0, 0]], np.int32),
        page_tables=np.arange(num_pages, dtype=np.int32)[None, :],
        logit_rows=np.arange(len(tokens), dtype=np.int32),
    )
    assert runner.forward(step, native.Arena(runner.kv_geometry(), num_pages)) is None
    return runner.logits()


@pytest.mark.parametrize("case", CASES)
def test_the_folder_runs_as_the_direct_form(
    case: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    format, make, form = CASES[case]
    source = open_model(resolve_model(demo))
    weights = {n: make(to_float(source.matrix(role, i))) for n, role, i in _names(source)}
    made = tmp_path / "made"
    write(made, source_folder=demo, weights=weights, format=format, config={"float_type": "F32"})
    written = open_model(resolve_model(made))
    for name, role, layer in _names(written):
        weight = weights[name]
        want = to_float(weight) if isinstance(weight, WeightTensor) else weight.values()
        np.testing.assert_array_equal(to_float(written.matrix(role, layer)), want)

    direct = demo
    if not isinstance(next(iter(weights.values())), WeightTensor):  # the rounded values as floats
        direct = tmp_path / "direct"
        shutil.copytree(demo, direct, ignore=shutil.ignore_patterns("*.safetensors"))
        tensors = safetensors.numpy.load_file(demo / "model.safetensors")
        tensors |= {name: weight.values() for name, weight in weights.items()}
        safetensors.numpy.save_file(tensors, direct / "model.safetensors")
    got, want_packed = load_packed(made, form), load_packed(direct, form)
    assert got.numerics_id == want_packed.numerics_id
    tokens = np.random.default_rng(5).integers(3, VOCAB, 40).tolist()
    np.testing.assert_array_equal(_logits(got, tokens), _logits(want_packed, tokens))
    auto = load_packed(made)
    assert auto.weights_form == {"float-quantized": "fp8-row", "fp8": "fp8-g128"}.get(case, form)
    assert all(report.exact for report in auto.report if report.name.startswith("layers."))
