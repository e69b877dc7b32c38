"""Folders written from models read back as the same model; Reference B is the same function."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.numpy

from support.data import demo_file
from support.tiny_models import VARIANTS, build_folder, build_gguf
from trivet.checkpoint import Tokenizer, resolve_model
from trivet.errors import CheckpointError
from trivet.models import open_model
from trivet.models.export import hf_config, write_float_folder
from trivet.models.family import spec_from_hf
from trivet.models.reference import float_logits

TOKENS = [0, 17, 300, 45, 45, 2, 120, 77]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_reference.py"


@pytest.fixture
def make_reference() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_config_reads_back_as_the_same_spec(variant: str, tmp_path: Path) -> None:
    model = open_model(resolve_model(build_folder(tmp_path / "model", variant)))
    config = hf_config(model.spec, model.family.architectures[0])
    assert spec_from_hf(model.family, config, tmp_path) == model.spec


@pytest.mark.parametrize("variant", ["llama3", "smollm2", "qwen2", "biases"])
def test_gguf_becomes_a_folder_with_the_same_values(variant: str, tmp_path: Path) -> None:
    before = open_model(resolve_model(build_gguf(tmp_path / "m.gguf", variant, qtype="Q8_0")))
    write_float_folder(before, tmp_path / "out")
    after = open_model(resolve_model(tmp_path / "out"))
    np.testing.assert_array_equal(float_logits(before, TOKENS), float_logits(after, TOKENS))
    loaded = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(after.checkpoint.tensors)
    one, two = Tokenizer(before.tokenizer_data()), Tokenizer(after.tokenizer_data())
    assert one.encode("the quick fox") == two.encode("the quick fox")
    assert one.eos_ids == two.eos_ids
    assert one.chat_template == two.chat_template


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    model = open_model(resolve_model(build_folder(tmp_path / "model", "llama3")))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_float_folder(model, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("variant", ["llama3", "smollm2", "qwen2", "biases"])
def test_rescaling_keeps_the_function(
    variant: str, tmp_path: Path, make_reference: ModuleType
) -> None:
    before = open_model(resolve_model(build_folder(tmp_path / "model", variant)))
    change = make_reference.rescale(before.spec, 0)
    write_float_folder(before, tmp_path / "out", change)
    write_float_folder(before, tmp_path / "again", make_reference.rescale(before.spec, 0))
    after = open_model(resolve_model(tmp_path / "out"))
    assert make_reference.difference(before, after) < 1e-5
    for role in ("q", "k", "v", "o", "gate", "up", "down"):
        one, two = before.matrix(role), after.matrix(role)
        assert isinstance(one, np.ndarray)
        assert isinstance(two, np.ndarray)
        assert (one != two).mean() > 0.9
    first, second = (tmp_path / name / "model.safetensors" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.demo
@pytest.mark.slow
def test_reference_b_has_the_committed_hash(tmp_path: Path, make_reference: ModuleType) -> None:
    demo_file()
    model = open_model(resolve_model("demo"))
    write_float_folder(model, tmp_path / "b", make_reference.rescale(model.spec, 0))
    with (tmp_path / "b" / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == make_reference.HASH_FILE.read_text().split()[0]
