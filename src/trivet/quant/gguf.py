"""GGUF files with their proof, and conversion between GGUF and the Hugging Face layout.

The encoders and the mixes are `trivet.models.gguf_export`'s. A calibrated run collects an importance
matrix (mean squares of the inputs of every linear) on the same texts as the other methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.checkpoint import ModelSource, Tokenizer
from trivet.errors import ConfigError, QuantError
from trivet.files import new_folder
from trivet.models import Model, open_model
from trivet.models.gguf_export import OWN, GGUFPlan, WrittenGGUF, plan_gguf, write_gguf
from trivet.models.gguf_import import gguf_to_folder
from trivet.quant.calibrate import CalibrationConfig, CalibrationSet
from trivet.quant.finished import VERSION
from trivet.quant.folder import PROOF_FILE, Outcome, tokenizer_warnings
from trivet.quant.imatrix import collect_imatrix
from trivet.quant.load import load_packed
from trivet.quant.plan import answer

PREFIX = "gguf:"
FILE_NAME = "model.gguf"
Progress = Callable[[str, float, float], None]


def gguf_type(format: str) -> str:
    """The type or mix after ``gguf:``. Raises ConfigError: there is none."""
    name = format.removeprefix(PREFIX)
    if not format.startswith(PREFIX) or not name:
        raise ConfigError("format", format, "gguf:TYPE, for instance gguf:Q4_K_M")
    return name


def parse_keep(keep: Sequence[str]) -> list[tuple[str, str]]:
    """``REGEX=TYPE`` entries as pairs; the last entry decides, as in the other formats."""
    pairs = []
    for entry in keep:
        pattern, _, kind = entry.rpartition("=")
        if not pattern:
            raise ConfigError("keep", entry, "REGEX=TYPE")
        pairs.append((pattern, kind.upper()))
    return pairs[::-1]


def gguf_loaders(plan: GGUFPlan) -> dict[str, Any]:
    """Who loads the file, as `trivet.quant.plan.loaders` says it of folders."""
    return {
        "trivet": answer("", "it reads every type it writes", is_tried=True),
        "vllm-gpu": answer("GGUF needs the package vllm-gguf-plugin and CUDA"),
        "vllm-cpu": answer("it does not read GGUF"),
        "transformers": answer("", "widened to float, with the package gguf", is_tried=True),
        "llama.cpp": answer("", f"{plan.mix} is its own"),
        "max_tensor_parallel": 1,
    }


def quantize_gguf(
    source: ModelSource,
    target: Path,
    mix: str,
    *,
    method: str,
    keep: Sequence[str] = (),
    calibrate: CalibrationConfig | None = None,
    threads: int = 1,
    requantized: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Write a folder with one GGUF file and its proof.

    method     ``kquant`` collects an importance matrix first; ``rtn`` and ``none`` do not
    calibrate  the texts of ``kquant``; None: the default ones
    Raises CheckpointError, ConfigError, QuantError; the folder appears whole or not at all.
    """
    model = open_model(source)
    report = progress or (lambda what, done, total: None)
    calibration = imatrix = None
    if method == "kquant":
        report("reading calibration texts", 0, 1)
        tokenizer = Tokenizer(model.tokenizer_data(), source.path)
        texts = calibrate or CalibrationConfig()
        calibration = texts.build(tokenizer, model.spec.max_positions)
        packed = load_packed(str(source.path), "bf16")
        names = sorted(calibration.report["train"]["tokens_by_domain"])
        imatrix = collect_imatrix(
            packed, calibration.train, datasets=names, threads=threads, progress=report
        )
    plan = plan_gguf(model, mix, imatrix, parse_keep(keep))
    with new_folder(target) as work:
        written = write_gguf(
            work / FILE_NAME, model, mix, imatrix, report, keep=parse_keep(keep), threads=threads
        )
        notes = tokenizer_warnings(model) if calibration is None else calibration.warnings
        proof = _proof(source, plan, written, method, calibration, requantized, notes)
        text = json.dumps(proof, indent=1, allow_nan=False) + "\n"
        (work / PROOF_FILE).write_text(text, "utf-8")
    return Outcome(target, written.num_bytes, plan.num_bytes, proof, list(proof["warnings"]), 0)


def _proof(
    source: ModelSource,
    plan: GGUFPlan,
    written: WrittenGGUF,
    method: str,
    calibration: CalibrationSet | None,
    requantized: bool,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """What was done to every tensor. Raises QuantError: one is missing or the size is another."""
    missing = {t.name for t in plan.tensors} - {t.name for t in written.tensors}
    if missing:
        raise QuantError(f"{len(missing)} tensors were left out, first {min(missing)}")
    if written.num_bytes != plan.num_bytes:
        raise QuantError(f"{written.num_bytes} bytes were written, {plan.num_bytes} were predicted")
    wanted = {t.name: t.wanted for t in plan.tensors}
    tokens = 0 if calibration is None else calibration.num_tokens
    return {
        "version": VERSION,
        "method": method,
        "format": PREFIX + written.mix,
        "source": source.name,
        "requantized": requantized,
        "bytes": written.num_bytes,
        "predicted_bytes": plan.num_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "calibration": None if calibration is None else calibration.report,
        "warnings": [*written.notes, *warnings],
        "linears": [
            {
                "name": t.name,
                "target": t.kind,
                "wanted": wanted[t.name],
                "source": t.source_kind,
                "method": "kept" if t.kind == t.source_kind else method,
                "tokens": tokens if t.has_importance else 0,
                "damp": None,
                "error_before": None,
                "error_after": t.rel_error,
                "bytes": t.num_bytes,
                "replaced": "",
            }
            for t in written.tensors
        ],
    }


def convert(
    source: ModelSource,
    model: Model,
    target: Path,
    format: str,
    progress: Progress | None = None,
    keep: Sequence[str] = (),
) -> Outcome:
    """From GGUF to a Hugging Face folder (``native``), or to GGUF (``gguf:own``): nothing is quantized.

    Raises ConfigError: the source has that layout already.
    """
    if format.startswith(PREFIX):
        mix = gguf_type(format)
        return quantize_gguf(source, target, mix, method="none", keep=keep, progress=progress)
    if model.checkpoint.kind != "gguf":
        raise ConfigError(
            "format", format, f"gguf:{OWN} or gguf:TYPE: the model is a folder already"
        )
    gguf_to_folder(source.path, target, progress)
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    proof: dict[str, Any] = {"method": "none", "format": "float", "linears": [], "warnings": []}
    return Outcome(target, size, size, proof, [], 0)
