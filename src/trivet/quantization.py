"""`trivet.quantize`: from a model's name to a judged folder.

Plans, predicts, quantizes (`trivet.quant.pipeline`) and puts the result before the gate. The folder
gets its name only when the gate passes or is off; otherwise it is DIR.rejected or DIR.undecided.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet import files
from trivet.checkpoint import ModelSource, Tokenizer, resolve_model
from trivet.checkpoint.cache import remove_caches
from trivet.checkpoint.formats import FORMATS as FOLDER_FORMATS
from trivet.checkpoint.ggml.imatrix import ImportanceMatrix
from trivet.config import ModelConfig, RowRule
from trivet.errors import CheckpointError, ConfigError
from trivet.json_values import plain
from trivet.models import ModelSpec, open_model
from trivet.models.gguf_export import OWN, plan_gguf
from trivet.models.load import Model, matrix_shapes
from trivet.quant.calibrate import CalibrationConfig
from trivet.quant.folder import Outcome, is_float_folder
from trivet.quant.gguf import (
    FILE_NAME,
    PREFIX,
    convert,
    gguf_loaders,
    gguf_type,
    parse_keep,
    quantize_gguf,
)
from trivet.quant.grid import Grid
from trivet.quant.methods.activations import parse_activations
from trivet.quant.methods.gptq import GptqConfig
from trivet.quant.pipeline import quantize_model, require_unquantized
from trivet.quant.plan import (
    FP8_BLOCKS,
    INT8_ROWS,
    METHODS,
    Fp8,
    Plan,
    Target,
    loaders,
    make_plan,
)
from trivet.quant.recipe import CALIBRATED, Recipe
from trivet.quant.workplace import claimed, free_attempt, free_candidate, named
from trivet.sizing import available_threads

FORMATS = ("native", *FOLDER_FORMATS)
GATES = ("fast", "full", "off")
NATIVE = "compressed-tensors"  # what `native` writes: the engine keeps it as it is
Progress = Callable[[str, float, float], None]
_SAMPLES, _IMPORTANCE_SAMPLES = 128, 32  # windows, unless the caller says
_PROCESS_BYTES = 160 << 20  # of the interpreter with numpy and the native core


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is known before anything runs.

    bytes          of all tensors of the output        source_bytes  the same model in bf16
    stored_bytes   of the source's weight files, most of whose tensor bytes are of stored_dtype
    memory_bytes   of the work, about: what is held at once, and the interpreter
    loaders        who should load the result, and the largest tensor-parallel degree
    targets        how many there are of each format: ``counted``, linears or all tensors of a file
    """

    bytes: int
    source_bytes: int
    memory_bytes: int
    loaders: dict[str, Any]
    targets: dict[str, int]
    stored_bytes: int
    stored_dtype: str
    counted: str = "linears"

    def as_json(self) -> dict[str, Any]:
        return {
            "predicted_bytes": self.bytes,
            "source_bytes": self.source_bytes,
            "stored_bytes": self.stored_bytes,
            "stored_dtype": self.stored_dtype,
            "predicted_memory_bytes": self.memory_bytes,
            "loaders": self.loaders,
            "targets": self.targets,
        }


@dataclasses.dataclass(frozen=True)
class Quantized:
    """What became of it. ``path`` is the folder's final name; ``verdict`` None: the gate was off."""

    path: Path | None
    prediction: Prediction
    outcome: Outcome | None
    seconds: float
    peak_rss_bytes: int
    gate: dict[str, Any] | None
    method: str
    form: str
    attempts: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str | None:
        return None if self.gate is None else str(self.gate["verdict"])

    def as_json(self) -> dict[str, Any]:
        """The contract's keys, then what else there is to say."""
        result: dict[str, Any] = {
            "path": None if self.path is None else str(self.path),
            "bytes": None if self.outcome is None else self.outcome.bytes,
            **self.prediction.as_json(),
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
            "verdict": self.verdict,
            "method": self.method,
            "form": self.form,
            "gate": self.gate,
            "warnings": [] if self.outcome is None else self.outcome.warnings,
            "resumed_layers": 0 if self.outcome is None else self.outcome.resumed,
        }
        if self.attempts:
            result["attempts"] = self.attempts
        return result


def predict(model: Model, plan: Plan, recipe: Recipe, calibrate: CalibrationConfig) -> Prediction:
    """Bytes, memory and loaders of a plan."""
    spec = model.spec
    rows = 0
    if recipe.needs_calibration:
        rows = calibrate.samples * calibrate.window * 9 // 8  # with the part kept apart
    layer = 4 * (spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.ffn_size))
    sums = 8 * 4 * max(spec.hidden_size, spec.q_size, spec.ffn_size) ** 2
    streams = 4 * rows * (2 * spec.hidden_size + spec.ffn_size)
    float_bytes = Plan(spec, dict.fromkeys(plan.targets)).bytes
    return Prediction(
        plan.bytes,
        float_bytes,
        streams + sums + 4 * layer + 4 * spec.vocab_size * spec.hidden_size + _PROCESS_BYTES,
        loaders(plan, recipe.format, recipe.gptq.act_order),
        plan.names(),
        *_stored(model),
    )


def _stored(model: Model) -> tuple[int, str]:
    """Bytes of a model's weight files, and the type that has most of their tensors' bytes."""
    by_type: collections.Counter[str] = collections.Counter()
    paths = set()
    for info in model.checkpoint.tensors.values():
        by_type[info.dtype] += info.num_bytes
        paths.add(info.path)
    return sum(path.stat().st_size for path in paths), by_type.most_common(1)[0][0]


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    method: str = "gptq",
    bits: int = 4,
    group_size: int | None = 64,
    sym: bool = True,
    act_order: str = "static",
    damp: float = 0.01,
    format: str = "native",
    traffic: str | os.PathLike[str] | None = None,
    samples: int | None = None,
    window: int = 512,
    general_share: float = 0.25,
    seed: int = 0,
    max_bytes: int | None = None,
    keep: Sequence[str] = (),
    gate: str = "fast",
    fp8: str = "channel",
    requantize: bool = False,
    dry_run: bool = False,
    auto: bool = False,
    mixed: str | None = None,
    activations: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    evaluate: dict[str, Any] | None = None,
    announce: Callable[[Prediction], None] | None = None,
) -> Quantized:
    """Quantize a model into a folder and judge it.

    model       folder, .gguf file, hub id or ``demo``       output  must not exist
    method      one of `METHODS`; group_size None: the whole row
    traffic     JSONL of prompts or chats, or plain text; None: prose and code of the Python library
    samples     windows of ``window`` tokens to calibrate on; None: 128, and 32 for ``kquant``, whose
                importance is a mean of squares for each column and settles sooner
    max_bytes   no tensor bytes above this; with auto, the budget it works under
    keep        ``REGEX=FORMAT`` for linears that get another format
    gate        ``fast``, ``full`` or ``off``
    mixed       formats that units may have instead, separated by commas (``w4-g32,w8-g64``): where
                bytes save most, as far as ``max_bytes`` goes
    auto        8 bits first, then methods at 4 bits until the gate passes
    activations rule for the activations of 8-bit rows: ``row``, ``hadamard64``, ``static``,
                ``outliersM`` or ``hadamard64+outliersM``; None: the engine's own, in groups of 128
    announce    called with what is predicted, before anything runs
    evaluate    further arguments of the evaluation behind the gate (corpora, max_tokens, ...)
    Raises ConfigError, CheckpointError, QuantError.
    """
    if gate not in GATES:
        raise ConfigError("gate", gate, ", ".join(GATES))
    if samples is None:
        samples = _IMPORTANCE_SAMPLES if method == "kquant" else _SAMPLES
    calibrate = CalibrationConfig(
        None if traffic is None else Path(traffic), samples, window, general_share, seed
    )
    if threads is not None and not 1 <= threads <= 1024:
        raise ConfigError("threads", threads, "1 to 1024")
    target = Path(output)
    if target.name in ("", ".."):
        raise ConfigError("output", os.fspath(output), "the name of a folder that is not there yet")
    if not dry_run:
        _require_free(target)
    source = resolve_model(model)
    opened = open_model(source)
    if not requantize and method != "none":
        require_unquantized(opened)
    settings = _Settings(
        source, opened, target, os.fspath(model), calibrate, threads or available_threads(), gate,
        progress or _silent, evaluate or {}, announce, requantize,
    )  # fmt: skip
    if activations is not None:
        is_plain = not auto and mixed is None and format in ("native", NATIVE)
        target_of = (method, bits, group_size, sym, fp8)
        if not is_plain or _default_target(*target_of) != INT8_ROWS:
            raise ConfigError(
                "activations", activations, "together with --method smoothquant, or a method with"
                " --bits 8 --group-size row, and the format native or compressed-tensors",
            )  # fmt: skip
        narrowest = min(columns for _, columns in matrix_shapes(opened.spec).values())
        parse_activations(activations, narrowest)
    is_file = format.startswith(PREFIX) or method == "kquant"
    if auto or mixed is not None or activations is not None or method in (*CALIBRATED, "kquant"):
        calibrate.check(Tokenizer(opened.tokenizer_data(), source.path))
    elif (gate != "off" and method != "none") or not (is_file or is_float_folder(source, opened)):
        opened.tokenizer_data()  # the gate reads texts, and a folder of another layout is made whole
    with contextlib.ExitStack() as held:
        if not dry_run:
            held.enter_context(claimed(target, source.path))
            _require_free(target)  # another run may have ended meanwhile
        if format.startswith(PREFIX) or method in ("none", "kquant"):
            if auto or mixed is not None:
                allowed = (
                    "a format of folders with --auto or --mixed; GGUF mixes say each tensor's type"
                )
                raise ConfigError("format", format, allowed)
            return _to_gguf(settings, method, format, tuple(keep), max_bytes, dry_run)
        config = GptqConfig(damp=damp, act_order=act_order)
        if auto and mixed is not None:
            raise ConfigError("mixed", mixed, "without --auto, which chooses the formats itself")
        if auto:
            return _automatic(
                settings, config, tuple(keep), max_bytes, _written_format(format), dry_run
            )
        default = _default_target(method, bits, group_size, sym, fp8)
        recipe = dataclasses.replace(
            _recipe(method, format, config, requantize), activations=activations
        )
        plan = make_plan(opened.spec, default, keep)
        if recipe.activation_form is not None:
            is_static = recipe.activation_form.rule is RowRule.STATIC
            plan = dataclasses.replace(plan, has_input_scales=is_static)
        if mixed is not None:
            from trivet.quant.mix import mix

            plan = mix(
                source, opened, plan, recipe, default, mixed, max_bytes, calibrate, settings.threads,
                settings.progress,
            )  # fmt: skip
        _require_budget(plan, max_bytes)
        return _attempt(settings, plan, recipe, target, dry_run)


def _require_free(target: Path) -> None:
    for path in (target, named(target, "rejected"), named(target, "undecided")):
        if os.path.lexists(path):
            raise CheckpointError(path, "exists; a model is never overwritten")


def _to_gguf(
    settings: _Settings,
    method: str,
    format: str,
    keep: tuple[str, ...],
    max_bytes: int | None,
    dry_run: bool,
) -> Quantized:
    """The methods whose result is a GGUF file, and conversion without quantizing."""
    started = time.monotonic()
    if method not in ("none", "rtn", "kquant"):
        raise ConfigError("method", method, "rtn or kquant for GGUF")
    if method == "kquant" and format == "native":
        format = f"{PREFIX}Q4_K_M"
    to_folder = method == "none" and not format.startswith(PREFIX)
    if to_folder and settings.model.checkpoint.kind != "gguf":
        raise ConfigError("format", format, "gguf:own or gguf:TYPE: the model is a folder already")
    if to_folder and format != "native":
        raise ConfigError("format", format, "native, which is float, with the method none")
    if keep and (to_folder or gguf_type(format).lower() == OWN):
        allowed = f"nothing with {format}, which leaves every type as it is"
        raise ConfigError("keep", ", ".join(keep), allowed)
    spec = settings.model.spec
    float_bytes = make_plan(spec, None).bytes
    if to_folder:
        memory = _PROCESS_BYTES + 20 * spec.vocab_size * spec.hidden_size  # widened in float64
        prediction = Prediction(
            2 * float_bytes, float_bytes, memory, {}, {}, *_stored(settings.model)
        )
    else:
        expected = None  # of an importance matrix: what the file's size and types depend on
        if method == "kquant":
            expected = ImportanceMatrix({}, tuple(sorted(settings.calibrate.tokens)))
        planned = plan_gguf(settings.model, gguf_type(format), expected, parse_keep(keep))
        kinds = collections.Counter(tensor.kind for tensor in planned.tensors)
        memory = _PROCESS_BYTES + planned.memory_bytes(settings.threads)
        if method == "kquant":
            memory += float_bytes  # the model in bf16, mapped while inputs are collected
        prediction = Prediction(
            planned.num_bytes, float_bytes, memory, gguf_loaders(planned), dict(kinds),
            *_stored(settings.model), counted="tensors",
        )  # fmt: skip
        if max_bytes is not None and planned.num_bytes > max_bytes:
            allowed = f"at least the {planned.num_bytes} bytes that are predicted"
            raise ConfigError("max_bytes", max_bytes, allowed)
    if settings.announce is not None:
        settings.announce(prediction)
    if dry_run:
        spent = time.monotonic() - started
        return Quantized(None, prediction, None, spent, _peak_rss(), None, method, format)
    candidate = free_candidate(settings.target)
    if method == "none":
        outcome = convert(
            settings.source, settings.model, candidate, format, settings.progress, keep
        )
    else:
        outcome = quantize_gguf(
            settings.source,
            candidate,
            gguf_type(format),
            method=method,
            keep=keep,
            calibrate=settings.calibrate,
            threads=settings.threads,
            requantized=settings.requantize,
            progress=settings.progress,
        )
    judged = None
    if method != "none":
        judged = _judge(settings, candidate / FILE_NAME)
    final = _settle(settings.target, candidate, judged)
    shown = final / FILE_NAME if (final / FILE_NAME).exists() else final
    spent = time.monotonic() - started
    return Quantized(shown, prediction, outcome, spent, _peak_rss(), judged, method, format)


def _settle(target: Path, candidate: Path, judged: dict[str, Any] | None) -> Path:
    """Give a candidate the name that its verdict earns, gate.json inside; returns it."""
    verdict = None if judged is None else judged["verdict"]
    ending = {"reject": "rejected", "undecided": "undecided"}.get(str(verdict))
    final = target if ending is None else named(target, ending)
    if judged is not None:
        text = json.dumps(plain(judged), indent=1, allow_nan=False)
        (candidate / "gate.json").write_text(text + "\n", "utf-8")
        file = candidate / FILE_NAME
        remove_caches(resolve_model(file if file.exists() else candidate), "auto")  # the gate's
    shutil.rmtree(candidate / ".trivet", ignore_errors=True)
    files.settle(candidate, final)
    return final


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What all attempts of one call share."""

    source: ModelSource
    model: Model
    target: Path
    name: str
    calibrate: CalibrationConfig
    threads: int
    gate: str
    progress: Progress
    evaluate: dict[str, Any]
    announce: Callable[[Prediction], None] | None
    requantize: bool


def _silent(what: str, done: float, total: float) -> None:
    return None


def _default_target(method: str, bits: int, group_size: int | None, sym: bool, fp8: str) -> Target:
    if method not in METHODS:
        raise ConfigError("method", method, ", ".join(METHODS))
    if method == "fp8":
        if fp8 not in FP8_BLOCKS:
            raise ConfigError("fp8", fp8, ", ".join(FP8_BLOCKS))
        return Fp8(fp8)
    if method == "smoothquant":
        return Grid(8, None, True)
    return Grid(bits, group_size, sym)


def _written_format(format: str) -> str:
    if format not in FORMATS:
        raise ConfigError("format", format, ", ".join((*FORMATS, "gguf:TYPE")))
    return NATIVE if format == "native" else format


def _recipe(method: str, format: str, config: GptqConfig, requantize: bool) -> Recipe:
    written = _written_format(format)
    if method == "fp8" and written not in ("fp8", "compressed-tensors"):
        raise ConfigError("format", format, "native, fp8 or compressed-tensors for the method fp8")
    if method != "fp8" and written == "fp8":
        raise ConfigError("format", format, "another format: fp8 holds what the method fp8 makes")
    if method == "smoothquant" and written != "compressed-tensors":
        raise ConfigError(
            "format", format, "native or compressed-tensors for the method smoothquant"
        )
    if config.act_order == "desc_act" and written == "awq":
        raise ConfigError("act_order", config.act_order, "static or none: AWQ has no g_idx")
    return Recipe(method=method, format=written, gptq=config, requantized=requantize)


def _require_budget(plan: Plan, max_bytes: int | None) -> None:
    if max_bytes is not None and plan.bytes > max_bytes:
        raise ConfigError(
            "max_bytes", max_bytes, f"at least the {plan.bytes} bytes that are predicted;"
            " use fewer --bits or a larger --group-size"
        )  # fmt: skip


def _attempt(
    settings: _Settings, plan: Plan, recipe: Recipe, target: Path, dry_run: bool
) -> Quantized:
    """Predict, quantize, judge, name."""
    if recipe.format == "awq" and any(
        not isinstance(t, Grid) or t.bits != 4 for t in plan.targets.values() if t is not None
    ):
        raise ConfigError("format", "awq", "another format: AWQ has 4 bits only")
    if any(isinstance(t, Fp8) for t in plan.targets.values()) and recipe.format not in (
        "fp8", "compressed-tensors",
    ):  # fmt: skip
        allowed = f"native or compressed-tensors: {recipe.format} has no fp8, which --keep asks for"
        raise ConfigError("format", recipe.format, allowed)
    started = time.monotonic()
    prediction = predict(settings.model, plan, recipe, settings.calibrate)
    form = "+".join(sorted(plan.names()))
    if settings.announce is not None:
        settings.announce(prediction)
    if dry_run:
        return Quantized(
            None,
            prediction,
            None,
            time.monotonic() - started,
            _peak_rss(),
            None,
            recipe.method,
            form,
        )
    candidate = free_candidate(target)
    outcome = quantize_model(
        settings.source,
        plan,
        recipe,
        candidate,
        calibrate=settings.calibrate,
        threads=settings.threads,
        progress=settings.progress,
    )
    judged = _judge(settings, candidate)
    final = _settle(target, candidate, judged)
    shutil.rmtree(named(candidate, "partial"), ignore_errors=True)
    return Quantized(
        final, prediction, outcome, time.monotonic() - started, _peak_rss(), judged,
        recipe.method, form,
    )  # fmt: skip


def _judge(settings: _Settings, candidate: Path) -> dict[str, Any] | None:
    """The gate's verdict on a candidate against its source in bf16; None when the gate is off."""
    if settings.gate == "off":
        return None
    from trivet.evaluate import GateOptions, evaluate_model

    def advance(label: str, share: float) -> None:
        settings.progress(f"judging: {label}", share, 1)

    settings.progress("judging", 0, 1)
    evaluation = evaluate_model(
        ModelConfig(model=str(candidate), threads=settings.threads),
        ModelConfig(model=settings.name, weights="bf16", threads=settings.threads),
        gate=GateOptions(size=settings.gate, seed=settings.calibrate.seed),
        on_check=advance,
        **settings.evaluate,
    )
    return evaluation.as_json()


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def automatic_order(spec: ModelSpec) -> list[tuple[str, int, int | None]]:
    """(method, bits, group size) in the order that `--auto` tries: 8 bits prove the flow, then 4.

    Source: what practitioners do on a reject: smaller groups with act-order, then AWQ with GPTQ.
    """
    from trivet.quant.plan import group_sizes_for

    groups = [g for g in group_sizes_for(spec) if g <= 128]
    eight: list[tuple[str, int, int | None]] = [("rtn", 8, groups[0] if groups else None)]
    four: list[tuple[str, int, int | None]] = [("gptq", 4, g) for g in groups]
    four += [("awq+gptq", 4, g) for g in groups[-2:]]
    return eight + (four or [("gptq", 4, None)])


def _automatic(
    settings: _Settings,
    config: GptqConfig,
    keep: tuple[str, ...],
    max_bytes: int | None,
    format: str,
    dry_run: bool,
) -> Quantized:
    """8 bits first; then down the order at 4 bits until one passes or the budget is broken.

    The smallest folder that passes gets the name; when 8 bits do not pass, nothing below is tried.
    """
    if settings.gate == "off":
        raise ConfigError("gate", "off", "fast or full: --auto stops where the gate passes")
    attempts: list[dict[str, Any]] = []
    passed: Quantized | None = None
    last: Quantized | None = None
    for index, (method, bits, group) in enumerate(automatic_order(settings.model.spec)):
        plan = make_plan(settings.model.spec, Grid(bits, group), keep)
        name = f"{method} w{bits}-{'row' if group is None else f'g{group}'}"
        is_proof = index == 0  # 8 bits show that the flow is sound, even beyond the budget
        if max_bytes is not None and plan.bytes > max_bytes and not is_proof:
            attempts.append({"name": name, "predicted_bytes": plan.bytes, "verdict": "over budget"})
            continue
        place = settings.target
        if not dry_run:
            place = free_attempt(settings.target, index)
        recipe = _recipe(method, format, config, settings.requantize)
        done = _attempt(settings, plan, recipe, place, dry_run)
        attempts.append({"name": name, "predicted_bytes": plan.bytes, "verdict": done.verdict})
        if last is not None and last.path is not None and last is not passed:
            shutil.rmtree(last.path, ignore_errors=True)
        last = done
        if dry_run:
            return dataclasses.replace(done, attempts=attempts)
        if is_proof and done.verdict != "pass":
            break
        if done.verdict == "pass":
            fits = max_bytes is None or plan.bytes <= max_bytes
            if passed is not None and passed.path is not None:
                shutil.rmtree(passed.path, ignore_errors=True)
            passed = done if fits else None
            if not fits and done.path is not None and not is_proof:
                shutil.rmtree(done.path, ignore_errors=True)
            if not is_proof:
                break
    best = passed or last
    assert best is not None
    assert best.path is not None
    if passed is not None and last is not None and last is not passed and last.path is not None:
        shutil.rmtree(last.path, ignore_errors=True)
    ending = "" if passed is not None else best.path.suffix
    if (
        passed is None and best.verdict == "pass"
    ):  # only the proof at 8 bits passed: over the budget
        ending = ".rejected"
    final = settings.target.with_name(settings.target.name + ending)
    files.settle(best.path, final)
    return dataclasses.replace(best, path=final, attempts=attempts)
