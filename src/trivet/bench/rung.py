"""What the ladder is asked for and what comes out: options, settings, rungs, the whole.

No measuring here; `trivet.bench.ladder` fills these in and `trivet.bench.report` writes them down.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from trivet.errors import ConfigError
from trivet.evaluate import QualityReport, Verdict
from trivet.recipe import Recipe

RUNGS = ("bf16", "w8a8", "w4", "int8-kv", "ngram", "chunked-prefill")
GATES = ("fast", "full", "off")
FIGURES = ("ttft_s", "tpot_s", "out_tok_s", "wall_s")  # what a round of the workload gives
WALL_TIME = "wall time of the workload"
CHAT_GAP = "p99 inter-token latency of a chat"
SHORT_NAMES = {WALL_TIME: "time", CHAT_GAP: "p99 gap"}  # for narrow tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """What to climb.

    rungs       names out of RUNGS, in any order; the baseline is always measured
    gate        ``fast``: the corpora rule; ``full``: with it all checks of `trivet evaluate --gate
                full`, as large as the budget allows; ``off``: quality is not measured
    budget_s    seconds the whole ladder may take, loading and packing aside
    corpora     text files, or None for the built-in corpora
    max_tokens  tokens scored of each corpus; None: what the budget allows, 128 to 4096
    """

    model: str
    rungs: tuple[str, ...] = RUNGS
    gate: str = "fast"
    budget_s: float = 600.0
    threads: int | None = None
    corpora: tuple[str, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.rungs:
            if name not in RUNGS:
                raise ConfigError("rungs", name, ", ".join(RUNGS))
        if self.gate not in GATES:
            raise ConfigError("gate", self.gate, ", ".join(GATES))
        if not self.budget_s > 0:
            raise ConfigError("budget", self.budget_s, "seconds above 0")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError("max_tokens", self.max_tokens, "an integer >= 2")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration: ``weights`` as `ModelConfig` takes it; ``chunk`` None: whole prompts."""

    weights: str
    kv: str = "bf16"
    draft: str = "off"
    chunk: int | None = None


@dataclasses.dataclass
class Rung:
    """One measured step.

    Times are medians over the rounds; ``spread`` has (low, high) of each. A gain is the median of what
    each round gives, and comes from the same rounds as the rung's own figures and those of ``before``.

    weights           full form that ran
    is_exact          whether every weight is held exactly as the file has it
    wall_s            of one round of the workload; None: the rung has a load of its own
    before, baseline  the same figures of the configuration the rung is held against, and of the
                      baseline, in the same rounds; with the weights, kv and draft that ran
    quality_verdict   of the gate; None: it is off
    gain_verdict      whether the gain is there in enough of the rounds; None for the baseline
    gain_of           what the gains are ratios of; above 1 is better; None: not measured
    ratios            gain_over_previous of each round
    in_recipe         whether it is part of what is recommended; ``reason`` says why (not)
    details           more figures, by name
    """

    name: str
    change: str
    weights: str
    is_exact: bool
    kv: str
    draft: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    out_tok_s: float | None = None
    wall_s: float | None = None
    peak_rss_bytes: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    start_s: float | None = None
    before: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    quality: QualityReport | None = None
    quality_verdict: str | None = None
    gain_verdict: str | None = None
    in_recipe: bool = False
    reason: str = ""
    gain_of: str = WALL_TIME
    gain_over_previous: float | None = None
    gain_over_baseline: float | None = None
    rounds: int = 0
    ratios: list[float] = dataclasses.field(default_factory=list)
    spread: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str | None:
        """Of quality and gain together; None: the gate is off, and nothing is said of quality."""
        if self.quality_verdict is None:
            return None
        found = {self.quality_verdict, self.gain_verdict or Verdict.PASS.value}
        for verdict in (Verdict.REJECT, Verdict.UNDECIDED):
            if verdict.value in found:
                return verdict.value
        return Verdict.PASS.value

    @property
    def outcome(self) -> str:
        """Whether it is in the recipe: ``yes``, ``no``, or ``undecided`` (and then it is not)."""
        if self.in_recipe:
            return "yes"
        found = {self.quality_verdict, self.gain_verdict}
        return "no" if Verdict.REJECT.value in found else "undecided"

    def set_gain(self, ratios: list[float]) -> None:
        """Take the gain over the previous rung from its value in each round."""
        self.ratios = ratios
        self.gain_over_previous = statistics.median(ratios)
        self.spread["gain_over_previous"] = [min(ratios), max(ratios)]

    def set_total(self, ratios: list[float]) -> None:
        """Take the gain over the baseline from its value in each round."""
        self.gain_over_baseline = statistics.median(ratios)
        self.spread["gain_over_baseline"] = [min(ratios), max(ratios)]

    def as_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["quality"] = None if self.quality is None else self.quality.as_json()
        fields["verdict"] = self.verdict
        return fields


@dataclasses.dataclass
class Ladder:
    """The rungs in order, what to run, and where the numbers come from.

    run  when and with what it was measured: date, version, commit, seed, gate, budget, threads
    """

    model: str
    rungs: list[Rung]
    recipe: Recipe
    run: dict[str, Any]
    machine: dict[str, Any]
    corpora: list[dict[str, Any]]
    workload: dict[str, Any]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "rungs": [rung.as_json() for rung in self.rungs],
            "run": self.run,
            "machine": self.machine,
            "corpora": self.corpora,
            "workload": self.workload,
            "seconds": self.seconds,
        }
