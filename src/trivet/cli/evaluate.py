"""`trivet evaluate`: perplexity, the distance from a baseline, and the gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trivet import files
from trivet.cli import options
from trivet.cli.commands import Argument, Command
from trivet.cli.output import Output, number

if TYPE_CHECKING:
    from trivet.config import EndpointConfig, ModelConfig
    from trivet.evaluate import Evaluation, GateOptions


@click.command(cls=Command)
@click.argument(
    "model",
    cls=Argument,
    metavar="MODEL|URL",
    help="Folder in Hugging Face layout, .gguf file, hub id, recipe (.toml), or the word demo; or the "
    "URL of a server, #NAME after it when it has several models.",
)
@options.weights
@options.kv
@click.option(
    "--baseline",
    metavar="MODEL2|URL2",
    help="Compare with this one; a URL when the model is one.  [default: MODEL where "
    "--baseline-weights or --baseline-kv is given, else nothing is compared]",
)
@click.option(
    "--baseline-weights",
    metavar="F2",
    help="Weight format of the baseline.  [default: bf16]",
)
@click.option("--baseline-kv", metavar="K2", help="KV format of the baseline.  [default: bf16]")
@options.several(
    "--corpus",
    metavar="FILE",
    type=options.PATH,
    help="Text file; once for each.  [default: pydoc-topics and stdlib-source]",
)
@click.option(
    "--max-tokens",
    metavar="M",
    type=int,
    help="Tokens scored of each corpus.  [default: 8192, in a fast gate 1280]",
)
@click.option(
    "--context",
    metavar="N",
    type=int,
    help="Tokens of one window.  [default: 1024, or as many as the model takes]",
)
@click.option(
    "--stride", metavar="N", type=int, help="Tokens between windows.  [default: the context]"
)
@click.option(
    "--gate",
    metavar="G",
    help="fast or full: may the model take the baseline's place? Exit 0 only on pass.",
)
@options.several(
    "--task",
    metavar="KIND",
    help="Kind of task that may block: chat, summary, classification, knowledge, maths, code, sql, "
    "structured-output, long-context; once for each.  [default: all]",
)
@click.option(
    "--tasks",
    metavar="DIR",
    type=options.PATH,
    help="Folder of task files (.jsonl).  [default: built in]",
)
@click.option(
    "--budget",
    metavar="SECONDS",
    type=float,
    help="Time for the gate; its checks are sized to it.",
)
@click.option("--seed", metavar="S", default=0, help="Seed of drawn items and of intervals.")
@click.option(
    "--output",
    "-o",
    metavar="DIR",
    type=options.PATH,
    help="Write gate.json and the report (HTML) here.",
)
@click.option(
    "--ledger",
    metavar="FILE",
    type=options.PATH,
    help="Ledger of gates (JSONL).  [default: trivet/gates.jsonl of the state folder]",
)
@click.option(
    "--api-key",
    metavar="K",
    envvar="TRIVET_API_KEY",
    show_envvar=True,
    help="Bearer key for models behind URLs.",
)
@click.option(
    "--sensitivity",
    is_flag=True,
    help="Quantize one weight at a time: which layer hurts the baseline?",
)
@options.threads
@options.max_model_len
@options.json
def evaluate(
    model: str,
    weights: str | None,
    kv: str | None,
    baseline: str | None,
    baseline_weights: str | None,
    baseline_kv: str | None,
    corpus: list[Path] | None,
    max_tokens: int | None,
    context: int | None,
    stride: int | None,
    gate: str | None,
    task: list[str] | None,
    tasks: Path | None,
    budget: float | None,
    seed: int,
    output: Path | None,
    ledger: Path | None,
    api_key: str | None,
    sensitivity: bool,
    threads: int | None,
    max_model_len: int | None,
    json: bool,
) -> int:
    """Measure perplexity and the distance from a baseline; with --gate, say whether it may serve.

    Every token of a corpus is scored once. Windows of --context tokens begin every --stride tokens and
    each scores what the one before did not.
    """
    from trivet.config import ModelConfig, is_url
    from trivet.errors import ConfigError
    from trivet.evaluate import (
        GateOptions,
        Verdict,
        default_ledger,
        evaluate_model,
        parse_kinds,
    )

    if sensitivity:
        for name, given in (("gate", gate), ("output", output), ("ledger", ledger)):
            if given:
                allowed = "nothing with --sensitivity, which judges nothing"
                raise ConfigError(name, str(given), allowed)
    if gate is None:
        for name, value in (("task", task), ("tasks", tasks), ("budget", budget)):
            if value:
                raise ConfigError(name, str(value), "nothing without --gate fast or full")
    config: ModelConfig | EndpointConfig
    base_config: ModelConfig | EndpointConfig | None = None
    both = {"threads": threads, "max_model_len": max_model_len}
    own = {"weights": weights, "kv": kv}
    base = {"weights": baseline_weights, "kv": baseline_kv}
    if is_url(model) or is_url(baseline or ""):
        renamed = {f"baseline_{name}": value for name, value in base.items()}
        _refuse({**own, **both, **renamed, "sensitivity": sensitivity or None})
        config = _source(model, api_key)
        base_config = None if baseline is None else _source(baseline, api_key)
    else:
        config = _local(model, own | both)
        if baseline is not None or any(base.values()):
            base = {name: value or "bf16" for name, value in base.items()}
            base_config = _local(baseline or model, base | both)
    if sensitivity:
        if not isinstance(config, ModelConfig) or not isinstance(base_config, ModelConfig):
            raise ConfigError("sensitivity", True, "--baseline MODEL2 or --baseline-weights F2")
        return _show_sensitivity(Output(json), config, base_config, corpus, max_tokens)
    asked: GateOptions | None = None
    if gate is not None:
        asked = GateOptions(
            size=gate, tasks=tasks, kinds=parse_kinds(task), budget_s=budget, seed=seed
        )
    if output is not None:
        files.require_folder(output)
    ledger = ledger or default_ledger()
    if gate is not None:
        files.require_folder(ledger.parent)
        if ledger.exists():
            files.require_file(ledger)
    out = Output(json)
    with out.loading() as loading, out.progress("evaluate", 1.0) as bar:

        def on_check(label: str, share: float) -> None:
            bar.label(label)
            bar.set(share)

        evaluation = evaluate_model(
            config,
            base_config,
            corpora=corpus,
            max_tokens=max_tokens,
            context=context,
            stride=stride,
            gate=asked,
            loading=loading,
            progress=lambda done, total: bar.set(done / total),
            on_check=on_check,
            ledger_path=ledger,
        )
    _show(out, evaluation)
    if output is not None:
        from trivet.evaluate import write_gate

        path = write_gate(evaluation, output)
        out.note(f"wrote {path}")
    out.result(evaluation.as_json())
    verdict = evaluation.gate
    return 0 if verdict is None or verdict.verdict is Verdict.PASS else 1


def _local(model: str, settings: dict[str, Any]) -> ModelConfig:
    """A model on this machine with the settings that are given."""
    from trivet.config import KVFormat, ModelConfig

    name, given = options.settings(model, **settings)
    given["kv"] = KVFormat.parse(given.get("kv", "bf16"))
    return ModelConfig(model=name, **given)


def _source(model: str, api_key: str | None) -> ModelConfig | EndpointConfig:
    """A model behind a URL, or on this machine as it is."""
    from trivet.config import EndpointConfig, is_url

    return EndpointConfig(model=model, api_key=api_key) if is_url(model) else _local(model, {})


def _refuse(given: dict[str, Any]) -> None:
    """Raises ConfigError: a setting is given of a model that runs elsewhere."""
    from trivet.errors import ConfigError

    for field, value in given.items():
        if value is not None:
            raise ConfigError(field, value, "nothing with a URL: its server sets it")


def _show_sensitivity(
    out: Output,
    config: ModelConfig,
    baseline: ModelConfig,
    corpus: list[Path] | None,
    max_tokens: int | None,
) -> int:
    """Print the units of a model, the most harmful first."""
    from trivet.evaluate import evaluate_sensitivity

    with out.loading() as loading, out.progress("sensitivity", 1.0) as bar:
        found = evaluate_sensitivity(
            config,
            baseline,
            corpora=corpus,
            max_tokens=max_tokens or 256,
            loading=loading,
            progress=lambda done, total: bar.set(done / total),
        )
    out.table(
        f"{config.model}  each weight alone as {found['weights']}",
        ("weight", "mean KL", "bytes saved"),
        [(unit["name"], number(unit["mean_kl"]), unit["saved_bytes"]) for unit in found["units"]],
    )
    out.result(found)
    return 0


def _show(out: Output, evaluation: Evaluation) -> None:
    report = evaluation.report
    out.table(
        f"{evaluation.model}  weights {evaluation.weights}  kv {evaluation.kv}"
        + (f"  against {evaluation.baseline_weights}" if evaluation.baseline_weights else ""),
        ("corpus", "perplexity", "baseline", "delta", "mean KL", "top-1", "tokens"),
        [
            (
                quality.corpus,
                number(quality.perplexity, 5),
                number(quality.baseline_perplexity, 5),
                None if quality.delta_ppl is None else f"{quality.delta_ppl:+.3f}",
                number(quality.mean_kl),
                None if quality.top1_agreement is None else f"{quality.top1_agreement:.2%}",
                quality.tokens,
            )
            for quality in [*report.corpora, report.overall]
        ],
    )
    details = evaluation.details
    if details is not None:
        out.table(
            f"checks ({details.options.size} gate, {details.seconds:.0f} s)",
            ("check", "kind", "finding", "seconds"),
            [
                (check.name, check.kind.value, check.finding.value, f"{check.seconds:.1f}")
                for check in details.checks
            ],
        )
    if evaluation.interaction is not None:
        out.note(_interaction(evaluation.interaction))
    verdict = evaluation.gate
    if verdict is not None:
        out.note(
            f"{verdict.verdict.value}: {'; '.join(verdict.reasons)}. Next: {verdict.next_step}."
        )


def _interaction(found: dict[str, Any]) -> str:
    """One line on what a combination loses beyond its parts."""
    names = " + ".join(f"{name}={value}" for name, value in found["variables"].items())
    if found["missing"]:
        return f"{names}: tested as one; alone not yet in the ledger: {', '.join(found['missing'])}"
    terms = ", ".join(
        f"{figure} {value:+.4f}" for figure, value in found["terms"].items() if value is not None
    )
    return f"{names}: tested as one; interaction beyond the sum of its parts: {terms}"
