"""Quantize a whole model layer by layer: streaming, and the same bytes however often it is stopped.

One layer's weights are in memory at a time, beside the hidden states of the calibration tokens. Every
finished layer is a file; a run that was killed reads what is there, sends the tokens through it and
goes on. Nothing here judges the result: the gate is `trivet.quantization`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet import files
from trivet.checkpoint import ModelSource, Tokenizer
from trivet.checkpoint.formats import CodeGrid, Fp8Weight
from trivet.checkpoint.formats import fp8 as fp8_format
from trivet.checkpoint.formats import write as write_format
from trivet.checkpoint.huggingface import read_safetensors_header
from trivet.checkpoint.source import bf16_to_float, float_to_bf16
from trivet.config import RowRule, WeightFormat
from trivet.errors import CheckpointError, QuantError
from trivet.models import Model, open_model
from trivet.models.export import write_float_folder
from trivet.models.gguf_import import gguf_to_folder
from trivet.models.load import has_bias
from trivet.native.weights import WeightTensor
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.calibrate import CalibrationConfig, CalibrationSet
from trivet.quant.grid import Float32, Grid, dequantize
from trivet.quant.methods.activations import ROW, InputRule
from trivet.quant.methods.awq import quantize_clipped, search_factors
from trivet.quant.methods.folds import fold, free_width
from trivet.quant.methods.gptq import (
    GptqConfig,
    Hessian,
    output_error,
    quantize_gptq,
    quantize_nearest,
)
from trivet.quant.methods.rtn import quantize_rtn
from trivet.quant.methods.smoothquant import ALPHA, smoothing_factors
from trivet.quant.methods.smoothquant import POINTS as SMOOTH_POINTS
from trivet.quant.observe import POINTS, Inputs, InputStats, LayerWeights, Stream
from trivet.quant.plan import INT8_ROWS, Fp8, Plan, Target, module_name, target_name
from trivet.quant.proof import LinearProof, check_proof

VERSION = 4  # of what a layer file holds and of the numbers that make it
Result = CodeGrid | Fp8Weight | NDArray[np.uint16]  # uint16: bf16 bits of a linear that is kept
Progress = Callable[[str, float, float], None]
CALIBRATED = ("gptq", "awq", "awq+gptq", "smoothquant")
_RETRY_DAMPS = (0.05, 0.2)  # tried where a linear's held-out error is above round to nearest's
PROOF_FILE = "quantization.json"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to quantize: everything that fixes the bytes but the model, the plan and the texts."""

    method: str = "gptq"
    format: str = "compressed-tensors"
    gptq: GptqConfig = dataclasses.field(default_factory=GptqConfig)
    smooth_alpha: float = ALPHA
    clip: bool = True
    requantized: bool = False
    activations: str | None = None  # rule of 8-bit rows' activations: `parse_activations`

    @property
    def activation_form(self) -> WeightFormat | None:
        """The engine's form of 8-bit rows with the rule; None: no rule was asked for."""
        return None if self.activations is None else WeightFormat.parse(f"w8a8+{self.activations}")

    @property
    def needs_calibration(self) -> bool:
        return self.method in CALIBRATED or self.activations is not None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class _Layer:
    """One finished layer: linears by role, folded norms and biases, one proof per linear."""

    results: dict[str, Result]
    norms: dict[str, Float32]
    biases: dict[str, Float32]
    proofs: list[LinearProof]
    notes: dict[str, Any]

    def weights(self) -> LayerWeights:
        """The layer as it will be read, in float32."""
        matrices = {role: values_of(result) for role, result in self.results.items()}
        return LayerWeights(
            matrices, dict(self.biases), self.norms["attn_norm"], self.norms["mlp_norm"]
        )

    def to_bytes(self) -> bytes:
        arrays: dict[str, NDArray[Any]] = {f"norm.{n}": v for n, v in self.norms.items()}
        arrays |= {f"bias.{n}": v for n, v in self.biases.items()}
        kinds: dict[str, Any] = {}
        for role, result in self.results.items():
            if isinstance(result, CodeGrid):
                kinds[role] = ["grid", result.bits, result.group_size]
                for part in ("codes", "scales", "zeros", "group_index"):
                    if getattr(result, part) is not None:
                        arrays[f"{role}.{part}"] = getattr(result, part)
            elif isinstance(result, Fp8Weight):
                kinds[role] = ["fp8", list(result.block), result.granularity]
                arrays |= {f"{role}.codes": result.codes, f"{role}.scales": result.scales}
            else:
                kinds[role] = ["bf16"]
                arrays[f"{role}.codes"] = result
        text = json.dumps(
            {"kinds": kinds, "proofs": [p.as_json() for p in self.proofs], "notes": self.notes}
        )
        arrays["json"] = np.frombuffer(text.encode(), np.uint8)
        buffer = io.BytesIO()
        save: Callable[..., None] = np.savez  # its type takes no mapping of arrays
        save(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> _Layer:
        """Raises ValueError, KeyError or OSError: the file is not one of ours, whole."""
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("json").tobytes())
        results: dict[str, Result] = {}
        for role, kind in facts["kinds"].items():
            codes, scales = arrays[f"{role}.codes"], arrays.get(f"{role}.scales")
            if kind[0] == "grid":
                assert scales is not None
                zeros, index = arrays.get(f"{role}.zeros"), arrays.get(f"{role}.group_index")
                results[role] = CodeGrid(kind[1], kind[2], codes, scales, zeros, index)
            elif kind[0] == "fp8":
                assert scales is not None
                results[role] = Fp8Weight(codes, scales, (kind[1][0], kind[1][1]), kind[2])
            else:
                results[role] = codes
        parts = {
            prefix: {n.partition(".")[2]: v for n, v in arrays.items() if n.startswith(prefix)}
            for prefix in ("norm.", "bias.")
        }
        proofs = [LinearProof.from_json(p) for p in facts["proofs"]]
        return cls(results, parts["norm."], parts["bias."], proofs, facts["notes"])


def values_of(result: Result) -> Float32:
    """The float32 values that a result will be read as."""
    if isinstance(result, CodeGrid):
        return dequantize(result)
    if isinstance(result, Fp8Weight):
        return result.values()
    return bf16_to_float(result)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A written folder and what is known about it; ``resumed`` layers were found finished."""

    path: Path
    bytes: int
    predicted_bytes: int
    proof: dict[str, Any]
    warnings: list[str]
    resumed: int


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
            finished = _finished(path)
            if finished is None:
                finished = _quantize_layer(model, layer, plan, recipe, stream, workers)
                _write_durably(path, finished.to_bytes())
            else:
                resumed += 1
                if stream is not None:
                    stream.advance(finished.weights())
            layers.append(path)
        report("quantizing", model.spec.num_layers, model.spec.num_layers)
    return _write(
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
    _write_durably(mark, json.dumps({"key": key}))


def _finished(path: Path) -> _Layer | None:
    if not path.exists():
        return None
    try:
        return _Layer.from_file(path)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, EOFError, zipfile.BadZipFile):
        return None


def _write_durably(path: Path, data: str | bytes) -> None:
    try:
        files.write(path, data)
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None


def _quantize_layer(
    model: Model,
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream | None,
    workers: Workers,
) -> _Layer:
    weights = LayerWeights.read(model, layer)
    done = _Layer({}, {}, {}, [], {})
    if stream is None:
        for role in weights.matrices:
            name = module_name(layer, role)
            target = plan.targets[layer, role]
            result = _uncalibrated(weights.matrices[role], target)
            done.results[role] = result
            done.proofs.append(
                _weight_proof(name, target, recipe.method, result, weights.matrices[role])
            )
    else:
        _calibrated_layer(layer, plan, recipe, stream, weights, done, workers)
    done.norms = {"attn_norm": weights.attn_norm, "mlp_norm": weights.mlp_norm}
    done.biases = weights.biases
    return done


def _uncalibrated(weight: Float32, target: Target) -> Result:
    if target is None:
        return float_to_bf16(weight)
    if isinstance(target, Fp8):
        return fp8_format.quantize(weight, target.block)
    return quantize_rtn(weight, target)


def _weight_proof(
    name: str, target: Target, method: str, result: Result, weight: Float32
) -> LinearProof:
    norm = float(np.linalg.norm(weight)) or 1.0
    before = 0.0
    if isinstance(target, Grid):
        before = float(np.linalg.norm(dequantize(quantize_nearest(weight, target)) - weight)) / norm
    after = float(np.linalg.norm(values_of(result) - weight)) / norm
    if not isinstance(target, Grid):
        before = after
    how = "kept" if target is None else "fp8" if isinstance(target, Fp8) else method
    size = _bytes_of(result)
    return LinearProof(name, target_name(target), how, 0, None, 0, before, after, size)


def _bytes_of(result: Result) -> int:
    rows, columns = int(result.shape[0]), int(result.shape[1])
    if isinstance(result, CodeGrid):
        return Grid(result.bits, result.group_size, result.zeros is None).num_bytes(rows, columns)
    if isinstance(result, Fp8Weight):
        return rows * columns + 4 * result.scales.size
    return 2 * rows * columns


def _calibrated_layer(
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream,
    weights: LayerWeights,
    done: _Layer,
    workers: Workers,
) -> None:
    """All linears of a layer, each seeing inputs that the ones before it already shaped."""
    if recipe.method in ("awq", "awq+gptq", "smoothquant"):
        done.notes["folds"] = _fold_layer(layer, plan, recipe, stream, weights, workers)
    source = weights.copy()

    def solve(point: str, width: int, inputs: Inputs, *, keep: bool = False) -> list[Float32]:
        stats, held_out, kept = stream.observe(inputs, width, keep=keep)
        seen = _Seen(stats, held_out)
        rules = _input_rules(recipe, stats)
        changes = _rounding(stream, kept or inputs, width, rules)
        for role in POINTS[point]:
            target = plan.targets[layer, role]
            result, proof = _solve(
                source.matrices[role], target, recipe, seen, workers,
                module_name(layer, role), clip=recipe.clip and role not in ("q", "k"),
            )  # fmt: skip
            if rules and target == INT8_ROWS:
                facts = _activation_facts(source.matrices[role], seen.held_out, rules, changes)
                proof = dataclasses.replace(proof, activations=facts)
            done.results[role] = result
            done.proofs.append(proof)
            weights.matrices[role] = values_of(result)
        return kept

    spec = stream.spec
    solve("attn_in", spec.hidden_size, stream.normed(weights.attn_norm))
    mixed = stream.attention(weights)
    solve("o_in", spec.q_size, mixed)
    stream.add_linear(mixed, weights, "o")
    del mixed
    solve("ffn_in", spec.hidden_size, stream.normed(weights.mlp_norm))
    gated = solve("down_in", spec.ffn_size, stream.gated(weights), keep=True)
    stream.add_linear(gated, weights, "down")


def _input_rules(recipe: Recipe, stats: InputStats) -> list[InputRule]:
    """The rule that was asked for at a point, then plain rows to compare it with; empty: none was."""
    form = recipe.activation_form
    if form is None:
        return []
    forms = (form,) if form == ROW else (form, ROW)
    return [InputRule.of(form, stats) for form in forms]


def _rounding(stream: Stream, inputs: Inputs, width: int, rules: list[InputRule]) -> list[Float32]:
    """Of each rule the sum of d dᵀ over held-out rows [K, K]; d is what rounding changes in a row."""
    held_out = [index for index, batch in enumerate(stream.batches) if batch.is_held_out]

    def change(index: int) -> list[Float32]:
        x = inputs(index) if callable(inputs) else inputs[index]
        changes = [rule.rounded(x) - x for rule in rules]
        return [d.T @ d for d in changes]

    sums = [np.zeros((width, width)) for _ in rules]
    if rules:
        for parts in stream.workers.map(change, held_out):
            for total, part in zip(sums, parts, strict=True):
                total += part
    return [total.astype(np.float32) for total in sums]


def _activation_facts(
    weight: Float32, held_out: Float32, rules: list[InputRule], changes: list[Float32]
) -> dict[str, Any]:
    """`LinearProof.activations` of one linear."""
    norm = output_error(weight, held_out) or 1.0
    errors = {
        rule.form.full_form.removeprefix("w8a8+"): math.sqrt(output_error(weight, change) / norm)
        for rule, change in zip(rules, changes, strict=True)
    }
    return {**rules[0].as_json(), "error": errors}


def _fold_layer(
    layer: int,
    plan: Plan,
    recipe: Recipe,
    stream: Stream,
    weights: LayerWeights,
    workers: Workers,
) -> dict[str, Any]:
    """Search factors on the layer as it is and fold them in; returns what was chosen, by point."""
    spec = stream.spec
    before = list(stream.hidden)
    seen: dict[str, InputStats] = {}
    seen["attn_in"] = stream.observe(stream.normed(weights.attn_norm), spec.hidden_size)[0]
    mixed = stream.attention(weights)
    seen["o_in"] = stream.observe(mixed, spec.q_size)[0]
    stream.add_linear(mixed, weights, "o")
    seen["ffn_in"] = stream.observe(stream.normed(weights.mlp_norm), spec.hidden_size)[0]
    seen["down_in"] = stream.observe(stream.gated(weights), spec.ffn_size)[0]
    stream.hidden = before
    chosen: dict[str, Any] = {}
    for point, roles in POINTS.items():
        grids: dict[str, Grid] = {}
        for role in roles:
            grid = plan.targets[layer, role]
            if isinstance(grid, Grid):
                grids[role] = grid
        if not grids:
            continue
        matrices = {role: weights.matrices[role] for role in grids}
        if recipe.method == "smoothquant":
            if point not in SMOOTH_POINTS:
                continue
            factors = smoothing_factors(matrices, seen[point], spec, point, recipe.smooth_alpha)
            chosen[point] = {"alpha": recipe.smooth_alpha}
        else:
            found = search_factors(matrices, grids, seen[point], spec, point, workers)
            factors = found.values
            chosen[point] = {
                "exponent": found.exponent,
                "error_ratio": found.error_after / found.error_before
                if found.error_before
                else 1.0,
            }
        assert len(factors) == free_width(spec, point)
        fold(weights, spec, point, factors)
    return chosen


class _Seen:
    """What passed one point: sums, their factor (made once for all roles), the held-out part.

    Factors of other settings are rarely asked for and are not kept: each is as large as the sums.
    """

    def __init__(self, stats: InputStats, held_out: InputStats) -> None:
        self.stats = stats
        self.held_out = held_out.gram.astype(np.float32)
        self._kept: tuple[GptqConfig, Hessian] | None = None  # of the first settings asked for

    def hessian(self, config: GptqConfig) -> Hessian:
        if self._kept is not None and self._kept[0] == config:
            return self._kept[1]
        hessian = Hessian.of(self.stats.gram, self.stats.tokens, config)
        if self._kept is None:
            self._kept = config, hessian
        return hessian


def _solve(
    weight: Float32,
    target: Target,
    recipe: Recipe,
    seen: _Seen,
    workers: Workers,
    name: str,
    *,
    clip: bool,
) -> tuple[Result, LinearProof]:
    """One linear; its error on held-out tokens before (round to nearest) and after."""
    norm = output_error(weight, seen.held_out) or 1.0
    tokens = seen.stats.tokens

    def error_of(values: Float32) -> float:
        return math.sqrt(output_error(values - weight, seen.held_out) / norm)

    if target is None or isinstance(target, Fp8):
        kept = _uncalibrated(weight, target)
        error = error_of(values_of(kept))
        how = "kept" if target is None else "fp8"
        size = _bytes_of(kept)
        return kept, LinearProof(
            name, target_name(target), how, tokens, None, 0, error, error, size
        )
    before = error_of(dequantize(quantize_nearest(weight, target)))
    hessian = seen.hessian(recipe.gptq)
    importance = np.einsum("ii->i", hessian.gram).astype(np.float32)
    method, replaced = recipe.method, ""
    if method in ("gptq", "awq+gptq"):
        result = quantize_gptq(weight, hessian, target, recipe.gptq, workers)
    elif method == "awq":
        result = quantize_clipped(weight, target, hessian, clip=clip)
    elif method == "smoothquant":
        result = quantize_nearest(weight, target)
    else:
        result = quantize_rtn(weight, target, importance=importance)
    after = error_of(dequantize(result))
    if after > before and method in ("gptq", "awq+gptq"):
        for damp in _RETRY_DAMPS:
            config = dataclasses.replace(recipe.gptq, damp=max(damp, recipe.gptq.damp))
            other = seen.hessian(config)
            tried = quantize_gptq(weight, other, target, config, workers)
            error = error_of(dequantize(tried))
            if error < after:
                result, after, hessian = tried, error, other
    if after > before:
        searched = quantize_rtn(weight, target, importance=importance)
        options = [(error_of(dequantize(searched)), searched)]
        options.append((before, quantize_nearest(weight, target)))
        after, result = min(options, key=lambda option: option[0])
        replaced = f"{method} was no better than round to nearest on held-out tokens"
        method = "rtn"
    uses_hessian = "gptq" in method
    proof = LinearProof(
        name, target.name, method, tokens, hessian.damp if uses_hessian else None,
        hessian.raised if uses_hessian else 0, before, after, _bytes_of(result), replaced,
    )  # fmt: skip
    return result, proof


class _Weights(Mapping[str, Any]):
    """Name -> tensor of all finished layers, one layer's file open at a time."""

    def __init__(self, model: Model, layers: list[Path]) -> None:
        self._model = model
        self._layers = layers
        self._cached: tuple[int, _Layer] | None = None
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

    def layer(self, index: int) -> _Layer:
        if self._cached is None or self._cached[0] != index:
            self._cached = (index, _Layer.from_file(self._layers[index]))
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


@contextlib.contextmanager
def float_folder(source: ModelSource, model: Model, work: Path) -> Iterator[Path]:
    """The source in Hugging Face layout in floats: itself, or written for the moment (from GGUF)."""
    if source.kind == "hf" and not getattr(model.checkpoint, "quantized_types", ()):
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


def _write(
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
    _write_durably(result / PROOF_FILE, text)
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
