"""The folder of a quantized model, written from the files of its layers, with the coverage proof."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trivet import files
from trivet.checkpoint import ModelSource
from trivet.checkpoint.formats import CodeGrid
from trivet.checkpoint.formats import write as write_format
from trivet.checkpoint.huggingface import read_safetensors_header
from trivet.config import RowRule
from trivet.errors import CheckpointError
from trivet.models import Model
from trivet.models.export import write_float_folder
from trivet.models.gguf_import import gguf_to_folder
from trivet.models.load import has_bias
from trivet.quant.calibrate import CalibrationSet
from trivet.quant.finished import VERSION, FinishedLayer, values_of, write_durably
from trivet.quant.plan import Plan, module_name
from trivet.quant.proof import check_proof
from trivet.quant.recipe import Recipe

PROOF_FILE = "quantization.json"
Progress = Callable[[str, float, float], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A written folder and what is known about it; ``resumed`` layers were found finished."""

    path: Path
    bytes: int
    predicted_bytes: int
    proof: dict[str, Any]
    warnings: list[str]
    resumed: int


class _Weights(Mapping[str, Any]):
    """Name -> tensor of all finished layers, one layer's file open at a time."""

    def __init__(self, model: Model, layers: list[Path]) -> None:
        self._model = model
        self._layers = layers
        self._cached: tuple[int, FinishedLayer] | None = None
        self._places: dict[str, tuple[int, str, str]] = {}
        names = model.family.hf_names
        for layer in range(len(layers)):
            for role in ("q", "k", "v", "o", "gate", "up", "down"):
                name = names[role].format(i=layer)
                self._places[name] = (layer, "result", role)
                if has_bias(model.spec, role):
                    self._places[name.removesuffix("weight") + "bias"] = (layer, "bias", role)
            for role in ("attn_norm", "mlp_norm"):
                self._places[names[role].format(i=layer)] = (layer, "norm", role)

    def layer(self, index: int) -> FinishedLayer:
        if self._cached is None or self._cached[0] != index:
            self._cached = (index, FinishedLayer.from_file(self._layers[index]))
        return self._cached[1]

    def __getitem__(self, name: str) -> Any:
        layer, kind, role = self._places[name]
        finished = self.layer(layer)
        if kind == "norm":
            return finished.norms[role]
        if kind == "bias":
            return finished.biases[role]
        result = finished.results[role]
        return values_of(result) if isinstance(result, np.ndarray) else result

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def tokenizer_warnings(model: Model) -> list[str]:
    """What is said of a result whose source has no tokenizer that can be read; else nothing."""
    try:
        model.tokenizer_data()
    except CheckpointError as error:
        reason = f"{Path(error.path).name} {error.reason}"
        return [f"the result cannot be served as text, for want of a tokenizer: {reason}"]
    return []


def is_float_folder(source: ModelSource, model: Model) -> bool:
    """Whether a source is a Hugging Face folder in floats, whose files are taken as they are."""
    return source.kind == "hf" and not getattr(model.checkpoint, "quantized_types", ())


@contextlib.contextmanager
def float_folder(source: ModelSource, model: Model, work: Path) -> Iterator[Path]:
    """The source in Hugging Face layout in floats: itself, or written for the moment (from GGUF)."""
    if is_float_folder(source, model):
        yield source.path
        return
    folder = work / "source"
    shutil.rmtree(folder, ignore_errors=True)
    if source.kind == "gguf":
        gguf_to_folder(source.path, folder)
    else:
        write_float_folder(model, folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_folder(
    model: Model,
    source: ModelSource,
    plan: Plan,
    recipe: Recipe,
    calibration: CalibrationSet | None,
    layers: list[Path],
    work: Path,
    target: Path,
    resumed: int,
    is_single: bool,
    report: Progress,
) -> Outcome:
    """Write the folder of all finished layers with its proof; it appears whole or not at all.

    layers   files of the finished layers, in order; ``resumed`` of them were found
    work     folder of unfinished work, on the disk of ``target``
    Raises CheckpointError: it cannot be written; QuantError: the proof is not sound.
    """
    weights = _Weights(model, layers)
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    options: dict[str, Any] = {}
    if recipe.format != "fp8":
        options["float_type"] = "BF16" if recipe.format == "compressed-tensors" else "F16"
    if recipe.format in ("gptq", "gptq_v2"):
        options |= {
            "damp_percent": recipe.gptq.damp,
            "true_sequential": True,
            "static_groups": recipe.gptq.act_order != "desc_act",
        }
    if recipe.activations is not None or (
        recipe.method == "smoothquant" and recipe.format == "compressed-tensors"
    ):
        options |= {"activations": True, **_activation_options(recipe, weights, len(layers))}
    report("writing", 0, 1)
    with float_folder(source, model, work) as folder:
        write_format(
            result, source_folder=folder, weights=weights, format=recipe.format, config=options
        )
    proofs = [proof for index in range(len(layers)) for proof in weights.layer(index).proofs]
    expected = [module_name(layer, role) for layer, role in plan.targets]
    written = _tensor_bytes(result, weights)
    warnings = check_proof(proofs, expected, predicted_bytes=plan.bytes, written_bytes=written)
    warnings += tokenizer_warnings(model) if calibration is None else calibration.warnings
    if not is_single:
        warnings.append("the BLAS in use could not be told to run on one thread")
    proof = {
        "version": VERSION,
        "method": recipe.method,
        "format": recipe.format,
        "source": source.name,
        "requantized": recipe.requantized,
        "recipe": recipe.as_json(),
        "bytes": written,
        "predicted_bytes": plan.bytes,
        "targets": plan.names(),
        "sensitivity": plan.sensitivity,
        "calibration": None if calibration is None else calibration.report,
        "warnings": warnings,
        "folds": {
            str(index): weights.layer(index).notes["folds"]
            for index in range(len(layers))
            if "folds" in weights.layer(index).notes
        },
        "linears": [p.as_json() for p in proofs],
    }
    text = json.dumps(proof, indent=1, allow_nan=False) + "\n"
    write_durably(result / PROOF_FILE, text)
    files.settle(result, target)
    return Outcome(target, written, plan.bytes, proof, warnings, resumed)


def _activation_options(recipe: Recipe, weights: _Weights, num_layers: int) -> dict[str, Any]:
    """What the writer is told of activations: static scales, or a rule with its outlier columns."""
    form = recipe.activation_form
    if form is None:
        return {}
    facts = {
        proof.name: proof.activations
        for index in range(num_layers)
        for proof in weights.layer(index).proofs
        if proof.activations is not None
    }
    if form.rule is RowRule.STATIC:
        return {"input_scales": {name: fact["input_scale"] for name, fact in facts.items()}}
    rules: dict[str, Any] = {"form": form.full_form}
    if form.outliers:
        rules["outlier_columns"] = {name: fact["outlier_columns"] for name, fact in facts.items()}
    return {"activation_rules": rules}


def _tensor_bytes(folder: Path, weights: Mapping[str, Any]) -> int:
    """Bytes of the tensors in the safetensors files of a folder, headers left out.

    Index tensors that a format adds for its readers (``g_idx``, ``weight_shape``) and zero points of
    symmetric weights are not counted: no number of the model is in them.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        for name, info in read_safetensors_header(path).items():
            module, _, part = name.rpartition(".")
            given = weights.get(f"{module}.weight") if part in ("g_idx", "qzeros") else None
            if part == "weight_shape" or part == "g_idx" or part == "weight_g_idx":
                continue
            if part == "qzeros" and isinstance(given, CodeGrid) and given.zeros is None:
                continue
            total += info.num_bytes
    return total
