"""Evaluate a model from its name: load it and its baseline, read the corpora, measure, judge."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet import files
from trivet.config import PAGE_TOKENS, EndpointConfig, ModelConfig
from trivet.errors import CheckpointError, ConfigError
from trivet.evaluate import ledger
from trivet.evaluate.corpora import Corpus, load_corpora
from trivet.evaluate.gate import GateResult, judge_corpora
from trivet.evaluate.next_step import next_step, recipe_of
from trivet.evaluate.quality import (
    CONTEXT,
    MAX_TOKENS,
    QualityReport,
    encode_corpora,
    measure_quality,
    read_quality,
)
from trivet.evaluate.results import Finding, Verdict
from trivet.evaluate.scoring import Scorer
from trivet.evaluate.subject import KnownAnswers, LocalSubject, Subject
from trivet.loader import LoadedModel, Progress, load_model

if TYPE_CHECKING:  # a plain evaluation loads no checks
    from trivet.evaluate.gating import GateOptions, GateReport
    from trivet.evaluate.task import Task

_MAX_PROOF_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured, on what, and the verdict when a gate was asked for.

    weights, kv, baseline_weights, baseline_kv  full forms that ran; UNKNOWN where a server tells none
    sources  per corpus: name, where its text came from, sha256 of the text
    hashes   of the candidate and the baseline: identity of the source, and of what ran (numerics);
             behind a URL the address with the model's name, and the fingerprint of the answers
    details  everything the gate found; None without one, or without a baseline to compare with
    interaction  of a combination, see `trivet.evaluate.ledger.interaction`; None for one variable
    """

    report: QualityReport
    model: str
    weights: str
    kv: str
    baseline: str | None
    baseline_weights: str | None
    baseline_kv: str | None
    context: int
    stride: int
    max_tokens: int
    sources: list[dict[str, str]]
    gate: GateResult | None
    hashes: dict[str, dict[str, str | None]] = dataclasses.field(default_factory=dict)
    details: GateReport | None = None
    interaction: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The contract's keys, then how they came about."""
        result = self.report.as_json()
        if self.gate is not None:
            result |= self.gate.as_json()
        for name in (
            "model", "weights", "kv", "baseline", "baseline_weights", "baseline_kv",
            "context", "stride", "max_tokens", "sources", "hashes",
        ):  # fmt: skip
            result[name] = getattr(self, name)
        if self.gate is not None:
            result["interaction"] = self.interaction
        return result

    def gate_json(self) -> dict[str, Any]:
        """The gate file: verdict, every check with its intervals, hashes and seeds."""
        found = self.details.as_json() if self.details is not None else {}
        return {**found, **self.as_json()}


def new_scorer(model: LoadedModel, context: int) -> Scorer:
    """A scorer with an arena that holds one window of ``context`` rows."""
    if context > model.runner.max_positions:
        raise ConfigError(
            "context", context, f"up to {model.runner.max_positions}, the model's own"
        )
    return Scorer(model.runner, model.new_arena(-(-context // PAGE_TOKENS)))


def evaluate_model(
    config: ModelConfig | EndpointConfig,
    baseline: ModelConfig | EndpointConfig | None = None,
    *,
    corpora: Sequence[str | Path] | None = None,
    max_tokens: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    gate: str | GateOptions | None = None,
    loading: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_check: Callable[[str, float], None] | None = None,
    ledger_path: Path | None = None,
) -> Evaluation:
    """Measure perplexity on the corpora, and the distance from ``baseline`` when there is one.

    corpora     text files, or names of built-in corpora; None: the two built-in ones
    max_tokens  tokens scored of each corpus; None: 8192, or what the gate's size says
    context     tokens of one window; None: 1024, or as many as the models take
    stride      tokens from one window to the next; None: the context
    gate        ``fast``, ``full`` or all the options of a gate: run its checks and judge them
    progress    called with (tokens scored, all tokens) when there is no gate
    on_check    called with (what a gate is doing, share of the whole)
    ledger_path a gate with a baseline is added to this ledger; None: to none
    Both models are on this machine, or both behind URLs (`EndpointConfig`). Behind a URL the whole
    vocabulary cannot be seen: mean_kl is None, and a gate is undecided at best.
    Raises ConfigError, CheckpointError, EndpointError; a baseline with another vocabulary is refused.
    """
    options = _gate_options(gate, max_tokens)
    is_served = isinstance(config, EndpointConfig)
    if baseline is not None and isinstance(baseline, EndpointConfig) != is_served:
        allowed = "a URL" if is_served else "a model on this machine"
        raise ConfigError(
            "baseline", baseline.model, f"{allowed}, as MODEL is; `trivet serve` gives one a URL"
        )
    started = time.monotonic()
    texts = load_corpora(corpora)
    found = None
    if options is not None and options.tasks is not None and baseline is not None:
        from trivet.evaluate.task import load_tasks

        found = load_tasks(options.tasks)  # before a model is packed
    room = _room(options, context or CONTEXT)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(_open(config, loading, room))
        base = None
        if baseline is not None:
            base = model
            if baseline != config:
                base = stack.enter_context(_open(baseline, loading, room, keep=options is not None))
            _check_comparable(model, base, baseline.model, is_gated=options is not None)
        if context is None:
            context = min(one.max_tokens for one in (model, base) if one is not None)
            context = min(context, CONTEXT)
        else:
            _check_context(context, (model, base))
        stride = context if stride is None else stride
        details = None
        if options is not None and base is not None:
            details = _gate(model, base, texts, options, context, stride, on_check, started, found)
        if details is not None:
            max_tokens = details.sizes.corpus_tokens
            report = details.quality
        else:
            max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
            report = _measure(model, base, texts, max_tokens, context, stride, progress)
    result = details.result if details is not None else None
    if options is not None and result is None:
        result = judge_corpora(report)
    evaluation = Evaluation(
        report=report,
        model=config.model,
        weights=model.weights,
        kv=model.kv,
        baseline=baseline.model if baseline is not None else None,
        baseline_weights=base.weights if base is not None else None,
        baseline_kv=base.kv if base is not None else None,
        context=context,
        stride=stride,
        max_tokens=max_tokens,
        sources=[
            {"corpus": text.name, "source": text.source, "sha256": text.sha256} for text in texts
        ],
        gate=result,
        hashes={
            name: one.hashes
            for name, one in (("model", model), ("baseline", base))
            if one is not None
        },
        details=details,
    )
    if details is None:
        return evaluation
    return _with_next_step(evaluation, _quantization(config.model), ledger_path)


@contextlib.contextmanager
def _open(
    config: ModelConfig | EndpointConfig,
    loading: Progress | None,
    room: int,
    *,
    keep: bool = False,
) -> Iterator[Subject]:
    """A model, closed at the end.

    room  tokens that its checks use at once
    keep  its answers stay beside its cache, for the next gate against it
    """
    if isinstance(config, ModelConfig):
        model = load_model(config, loading)
        room = min(room, _longest(model))
        if not keep:
            yield LocalSubject(model, room)
            return
        name = f"{model.packed.path.name}.{model.runner.numerics_id[:12]}.answers.json"
        path = model.packed.path.with_name(name)
        known = KnownAnswers.load(path)
        yield LocalSubject(model, room, known)
        with contextlib.suppress(OSError):  # a read-only cache: asked again next time
            known.save(path)
        return
    from trivet.evaluate.endpoint import EndpointSubject

    endpoint = EndpointSubject(config)
    try:
        yield endpoint
    finally:
        endpoint.close()


def _longest(model: LoadedModel) -> int:
    """Tokens that a request of a model may have. Raises ConfigError: more than the model's own."""
    own, asked = model.runner.max_positions, model.config.max_model_len
    if asked is not None and asked > own:
        raise ConfigError("max_model_len", asked, f"up to {own}, the model's own")
    return asked or own


def _check_context(context: int, models: Sequence[Subject | None]) -> None:
    longest = min(one.max_tokens for one in models if one is not None)
    if context > longest:
        raise ConfigError("context", context, f"up to {longest}, the model's own or max_model_len")


def _room(options: GateOptions | None, context: int) -> int:
    if options is None:
        return context
    from trivet.evaluate.gating import SIZES

    sizes = SIZES[options.size]
    return max(context, sizes.long_tokens, sizes.passkey_tokens + 256)


def _check_comparable(model: Subject, base: Subject, name: str, *, is_gated: bool) -> None:
    """Raises ConfigError: the two cannot read the same tokens. A gate names other tokenizers itself."""
    if model.loaded is not None and base.loaded is not None:
        size = model.loaded.runner.vocab_size
        if base.loaded.runner.vocab_size != size:
            allowed = f"a model with the same vocabulary of {size} tokens"
            raise ConfigError("baseline", name, allowed)
    elif not is_gated:
        from trivet.evaluate.checks import identity

        found = identity.check(model, base)
        if found.finding is Finding.REJECT:
            allowed = f"a model with the same tokenizer (what differs: {found.metrics['differ']})"
            raise ConfigError("baseline", name, allowed)


def evaluate_sensitivity(
    config: ModelConfig,
    baseline: ModelConfig,
    *,
    corpora: Sequence[str | Path] | None = None,
    max_tokens: int = 256,
    loading: Progress | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Which weight hurts: each alone in the candidate's format, KL on a short text.

    The text is the beginning of the first corpus. Raises ConfigError: other architectures.
    """
    from trivet.evaluate.sensitivity import measure_sensitivity

    text = load_corpora(corpora)[0]
    base, model = load_model(baseline, loading), load_model(config, loading)
    if base.packed.spec.to_json() != model.packed.spec.to_json():
        raise ConfigError("baseline", baseline.model, "a model of the same architecture")
    length = min(max_tokens, _longest(base), _longest(model))
    ids = base.tokenizer.encode(text.text[: 24 * length])[:length]
    units = measure_sensitivity(model, base, ids, progress)
    return {
        "model": config.model,
        "weights": model.weights_form,
        "baseline": baseline.model,
        "baseline_weights": base.weights_form,
        "corpus": text.name,
        "sha256": text.sha256,
        "tokens": len(ids),
        "units": [unit.as_json() for unit in units],
    }


def _with_next_step(
    evaluation: Evaluation, quantization: dict[str, Any] | None, ledger_path: Path | None
) -> Evaluation:
    """Say what to do next, and enter the run into the ledger."""
    details = evaluation.details
    assert details is not None
    assert evaluation.gate is not None
    identity = evaluation.hashes["model"]["identity"] or ""
    known = ledger.read(ledger_path) if ledger_path is not None else []
    hashes = evaluation.hashes["baseline"]
    baseline = hashes["numerics_id"] or hashes["identity"] or ""
    done = {
        step
        for entry in known
        if entry.baseline == baseline and entry.verdict == Verdict.REJECT
        for step in entry.steps
    }
    recipe = recipe_of(evaluation.weights, evaluation.kv, quantization)
    verdict = evaluation.gate.verdict
    step, line = next_step(verdict, details.checks, recipe, done)
    result = dataclasses.replace(
        evaluation.gate, next_step=line, metrics={**evaluation.gate.metrics, "next": step}
    )
    variables = {}
    if (
        evaluation.weights != evaluation.baseline_weights
        or evaluation.hashes["model"]["identity"] != (evaluation.hashes["baseline"]["identity"])
    ):
        variables["weights"] = evaluation.weights
    if evaluation.kv != evaluation.baseline_kv:
        variables["kv"] = evaluation.kv
    overall = evaluation.report.overall
    facts = [evaluation.sources, evaluation.max_tokens, evaluation.context, evaluation.stride]
    entry = ledger.Entry(
        time=ledger.now(),
        model=evaluation.model,
        identity=identity,
        baseline=baseline,
        variables=variables,
        verdict=verdict.value,
        next_step=step,
        figures={"delta_ppl": overall.delta_ppl, "mean_kl": overall.mean_kl},
        corpora=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        gate=details.options.size,
        steps=list(recipe.steps),
    )
    if ledger_path is not None:
        ledger.append(ledger_path, entry)
    return dataclasses.replace(
        evaluation,
        gate=result,
        details=dataclasses.replace(details, result=result),
        interaction=ledger.interaction(entry, known),
    )


def _quantization(model: str) -> dict[str, Any] | None:
    """The quantization.json of a folder that `trivet quantize` wrote, or None."""
    try:
        found = json.loads(files.read_text(Path(model) / "quantization.json", _MAX_PROOF_BYTES))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _gate_options(gate: str | GateOptions | None, max_tokens: int | None) -> GateOptions | None:
    if gate is None:
        return None
    from trivet.evaluate.gating import SIZES, GateOptions

    options = GateOptions(size=gate) if isinstance(gate, str) else gate
    if options.size not in SIZES:
        raise ConfigError("gate", options.size, ", ".join(SIZES))
    if options.budget_s is not None and not options.budget_s > 0:
        raise ConfigError("budget", options.budget_s, "a number of seconds above 0")
    if max_tokens is not None:
        options = dataclasses.replace(options, corpus_tokens=max_tokens)
    return options


def _gate(
    model: Subject,
    base: Subject,
    texts: Sequence[Corpus],
    options: GateOptions,
    context: int,
    stride: int,
    on_check: Callable[[str, float], None] | None,
    started: float,
    found: Sequence[Task] | None,
) -> GateReport:
    from trivet.evaluate.gating import run_gate

    return run_gate(
        model, base, texts, options, context=context, stride=stride, progress=on_check,
        started=started, found=found,
    )  # fmt: skip


def _measure(
    model: Subject,
    base: Subject | None,
    texts: Sequence[Corpus],
    max_tokens: int,
    context: int,
    stride: int,
    progress: Callable[[int, int], None] | None,
) -> QualityReport:
    encoded = encode_corpora(model, texts, max_tokens=max_tokens, context=context, stride=stride)
    total = sum(corpus.num_tokens for corpus in encoded)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    if model.loaded is None or (base is not None and base.loaded is None):
        return read_quality(model, base, encoded, advance)
    scorer = new_scorer(model.loaded, context)
    base_scorer = None
    if base is not None and base.loaded is not None:
        base_scorer = new_scorer(base.loaded, context)
    return measure_quality({"model": scorer}, encoded, base_scorer, advance)["model"]
