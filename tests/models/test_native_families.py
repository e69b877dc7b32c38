"""Every family through the native core, against the float32 network.

bf16 weights lose nothing here, so only bf16 activations stand between the two; the other formats stay
within ceilings of the divergence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from support.tiny_models import VARIANTS, build_folder
from trivet import native
from trivet.checkpoint import resolve_model
from trivet.config import PAGE_TOKENS, KVFormat
from trivet.models import open_model
from trivet.models.reference import float_logits
from trivet.quant import PackedModel, load_packed

Float32 = NDArray[np.float32]
TOKENS = np.random.default_rng(3).integers(0, 330, 70).tolist()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))


def _native_logits(packed: PackedModel, kv: KVFormat = KVFormat.BF16) -> Float32:
    runner = native.load_model(packed, threads=1, kv=kv)
    num_pages = -(-len(TOKENS) // PAGE_TOKENS)
    arena = native.Arena(runner.kv_geometry(), num_pages)
    step = native.StepInput(
        tokens=np.asarray(TOKENS, np.int32),
        segments=np.asarray([[0, len(TOKENS), 0, 0]], np.int32),
        page_tables=np.arange(num_pages, dtype=np.int32)[None, :],
        logit_rows=np.arange(len(TOKENS), dtype=np.int32),
    )
    assert runner.forward(step, arena) is None
    return runner.logits()


def _kl(want: Float32, got: Float32) -> float:
    def log_softmax(logits: Float32) -> NDArray[np.float64]:
        wide = logits.astype(np.float64)
        wide = wide - wide.max(axis=1, keepdims=True)
        result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        return result

    p, q = log_softmax(want), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bf16_equals_the_float_network(variant: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", variant)
    packed = load_packed(folder, "bf16")
    assert all(report.exact for report in packed.report)
    want = float_logits(open_model(resolve_model(folder)), TOKENS)
    got = _native_logits(packed)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 0.016
    assert _kl(want, got) < 2e-3


@pytest.mark.parametrize("kv", list(KVFormat))
@pytest.mark.parametrize(
    ("weights", "ceiling"),
    [
        ("w8a8", 0.02),
        ("w8a8-g32", 0.02),
        ("w8a8-g64", 0.02),
        ("w4a8-g32", 0.2),
        ("w4a8-g32-zp", 0.2),
        ("w4a8-g64-min", 0.2),
    ],
)
def test_formats_stay_near_the_float_network(
    weights: str, ceiling: float, kv: KVFormat, tmp_path: Path
) -> None:
    folder = build_folder(tmp_path / "model", "qwen2")
    want = float_logits(open_model(resolve_model(folder)), TOKENS)
    got = _native_logits(load_packed(folder, weights), kv)
    assert np.isfinite(got).all()
    is_4_bits = kv in (KVFormat.INT4, KVFormat.INT4_FIRST)
    assert _kl(want, got) < ceiling + (0.06 if is_4_bits else 0.0)
