"""Quantize a whole model layer by layer: streaming, and the same bytes however often it is stopped.

One layer's weights are in memory at a time, beside the hidden states of the calibration tokens. Every
finished layer is a file; a run that was killed reads what is there, sends the tokens through it and
goes on. Nothing here judges the result: the gate is `trivet.quantization`'s.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from trivet.checkpoint import ModelSource, Tokenizer
from trivet.errors import CheckpointError, QuantError
from trivet.models import Model, open_model
from trivet.native.weights import WeightTensor
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.calibrate import CalibrationConfig, CalibrationSet
from trivet.quant.finished import VERSION, read_finished, write_durably
from trivet.quant.folder import Outcome, Progress, write_folder
from trivet.quant.grid import Float32
from trivet.quant.observe import LayerWeights, Stream
from trivet.quant.plan import Plan, module_name, target_name
from trivet.quant.recipe import Recipe
from trivet.quant.solve import quantize_layer


def require_unquantized(model: Model) -> None:
    """Raise QuantError when the source is quantized, by its types or because its values lie on a grid.

    The grid test reads two weights: groups of 32 that hold at most 16 distinct values are 4-bit codes.
    """
    source = model.matrix("q", 0)
    again = "pass --requantize to do it all the same: errors add up, and the report says so"
    if isinstance(source, WeightTensor) and source.format.bits != 16:
        raise QuantError(f"{model.checkpoint.path} is quantized already ({source.source}); {again}")
    if getattr(model.checkpoint, "quantized_types", ()):
        raise QuantError(f"{model.checkpoint.path} is quantized already; {again}")
    for role in ("q", "down"):
        values = LayerWeights.read(model, 0).matrices[role]
        if grid_share(values) > 0.9:
            raise QuantError(
                f"{model.checkpoint.path}: the values of {module_name(0, role)} lie on a grid of few"
                f" levels, as if widened from 4 bits or less; {again}"
            )


def grid_share(values: Float32) -> float:
    """The share of groups of 32 with at most 16 distinct values, of up to 256 rows."""
    rows = values[:256]
    columns = rows.shape[1] // 32 * 32
    if columns == 0:
        return 0.0
    groups = np.sort(rows[:, :columns].reshape(-1, 32), axis=1)
    distinct = 1 + (np.diff(groups, axis=1) != 0).sum(axis=1)
    return float((distinct <= 16).mean())


def quantize_model(
    source: ModelSource,
    plan: Plan,
    recipe: Recipe,
    target: Path,
    *,
    calibrate: CalibrationConfig,
    threads: int = 1,
    progress: Progress | None = None,
) -> Outcome:
    """Quantize a model into ``target``, which must not exist; work in progress lies in TARGET.partial.

    Raises CheckpointError, ConfigError, QuantError; the folder appears only when its proof is sound.
    """
    if target.exists():
        raise CheckpointError(target, "exists; a model is never overwritten")
    model = open_model(source)
    report = progress or (lambda what, done, total: None)
    calibration = None
    if recipe.needs_calibration:
        report("reading calibration texts", 0, 1)
        tokenizer = Tokenizer(model.tokenizer_data(), source.path)
        calibration = calibrate.build(tokenizer, model.spec.max_positions)
    work = target.with_name(target.name + ".partial")
    key = _fingerprint(source, plan, recipe, calibration)
    _open_work(work, key)
    resumed = 0
    layers: list[Path] = []
    with single_threaded() as is_single, Workers(threads) as workers:
        stream = None
        if calibration is not None:
            stream = Stream(model, calibration.train, calibration.held_out, workers)
        for layer in range(model.spec.num_layers):
            report("quantizing", layer, model.spec.num_layers)
            path = work / f"layer-{layer:04d}.npz"
            finished = read_finished(path)
            if finished is None:
                finished = quantize_layer(model, layer, plan, recipe, stream, workers)
                write_durably(path, finished.to_bytes())
            else:
                resumed += 1
                if stream is not None:
                    stream.advance(finished.weights())
            layers.append(path)
        report("quantizing", model.spec.num_layers, model.spec.num_layers)
    return write_folder(
        model, source, plan, recipe, calibration, layers, work, target, resumed, is_single, report
    )


def _fingerprint(
    source: ModelSource, plan: Plan, recipe: Recipe, calibration: CalibrationSet | None
) -> str:
    """What must be equal for the layers of an earlier run to be those of this one."""
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source.files]
    targets = [(*key, target_name(target)) for key, target in plan.targets.items()]
    texts = calibration.sha256 if calibration is not None else None
    facts = [VERSION, stamps, targets, recipe.as_json(), texts, np.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _open_work(work: Path, key: str) -> None:
    """Make the folder of unfinished work; one that belongs to another run is emptied."""
    mark = work / "run.json"
    try:
        known = json.loads(mark.read_text())["key"] == key
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if known:
        return
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(work, f"cannot be written: {error.strerror or error}") from None
    write_durably(mark, json.dumps({"key": key}))
