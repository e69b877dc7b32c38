"""What is said of other programs before a run, put to the test in those that are installed here."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.models import open_model
from trivet.models.reference import float_logits
from trivet.quantization import Quantized, quantize

Float32 = NDArray[np.float32]
# All multiples of 128, and of the 256 values that k-quants take at once but one.
SHAPE = Variant(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=384, layers=2, tied=True)
TOKENS = np.random.default_rng(5).integers(3, SHAPE.vocab, 48).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("loaders") / "model", SHAPE, dtype="F32")


def quantized(source: Path, path: Path, **settings: Any) -> Quantized:
    return quantize(source, path, gate="off", threads=2, **settings)


def transformers_logits(folder: Path, **options: Any) -> Float32:
    """Logits of TOKENS, as transformers makes them of a folder in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder)
    model = load(dtype=torch.float32, attn_implementation="eager", **options).eval()
    with torch.inference_mode():
        result: Float32 = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return result


def difference(logits: Float32, path: Path) -> float:
    """Relative to what Trivet reads from a folder or file."""
    own = float_logits(open_model(resolve_model(path)), TOKENS)
    return float(np.linalg.norm(logits - own) / np.linalg.norm(own))


def test_transformers_reads_fp8_blocks(source: Path, tmp_path: Path) -> None:
    settings = {"method": "fp8", "format": "fp8", "fp8": "block"}
    done = quantized(source, tmp_path / "out", **settings)
    assert done.prediction.loaders["transformers"]["loads"]
    assert difference(transformers_logits(tmp_path / "out"), tmp_path / "out") < 1e-4


@pytest.mark.parametrize("scale", ["tensor", "channel"])
def test_transformers_passes_over_other_scales_of_fp8(
    source: Path, tmp_path: Path, scale: str
) -> None:
    """It loads without an error and answers nonsense; once it does not, the table is to be changed."""
    settings = {"method": "fp8", "format": "fp8", "fp8": scale}
    done = quantized(source, tmp_path / "out", **settings)
    assert not done.prediction.loaders["transformers"]["loads"]
    assert difference(transformers_logits(tmp_path / "out"), tmp_path / "out") > 0.1


@pytest.mark.parametrize("mix", ["Q4_0", "Q4_K_M"])
def test_transformers_reads_gguf(source: Path, tmp_path: Path, mix: str) -> None:
    done = quantized(source, tmp_path / "out", method="rtn", format=f"gguf:{mix}")
    assert done.path is not None
    assert done.prediction.loaders["transformers"]["loads"]
    logits = transformers_logits(tmp_path / "out", gguf_file=done.path.name)
    assert difference(logits, done.path) < 1e-4
