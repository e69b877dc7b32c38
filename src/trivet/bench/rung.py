"""What the ladder is asked for and what comes out: options, settings, rungs, the whole.

No measuring here; `trivet.bench.ladder` fills these in and `trivet.bench.report` writes them down.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from trivet.errors import ConfigError
from trivet.evaluate import QualityReport
from trivet.recipe import Recipe

RUNGS = ("bf16", "w8a8", "w4", "int8-kv", "ngram", "chunked-prefill")
GATES = ("fast", "full", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LadderOptions:
    """What to climb.

    rungs       names out of RUNGS, in any order; the baseline is always measured
    gate        ``fast`` or ``full`` (both: the corpora rule), or ``off``: quality is not measured
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
    """One measured step. Times are medians over the rounds; ``spread`` has (low, high) of each.

    weights        full form that ran
    is_exact       whether every weight is held exactly as the file has it
    gain_*         median ratio of ``gain_metric``; above 1 is better; None: not measured
    ratios         gain_over_previous of each round
    in_recipe      whether it is part of what is recommended; ``reason`` says why (not)
    details        more figures, by name
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
    peak_rss_bytes: int | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    start_s: float | None = None
    quality: QualityReport | None = None
    verdict: str | None = None
    in_recipe: bool = False
    reason: str = ""
    gain_metric: str = "wall time of the same work"
    gain_over_previous: float | None = None
    gain_over_baseline: float | None = None
    rounds: int = 0
    ratios: list[float] = dataclasses.field(default_factory=list)
    spread: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def set_gain(self, ratios: list[float]) -> None:
        """Take the gain over the previous rung from its value in each round."""
        self.ratios = ratios
        self.gain_over_previous = statistics.median(ratios)
        self.spread["gain_over_previous"] = [min(ratios), max(ratios)]

    def as_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["quality"] = None if self.quality is None else self.quality.as_json()
        return fields


@dataclasses.dataclass
class Ladder:
    """The rungs in order, what to run, and where the numbers come from."""

    model: str
    rungs: list[Rung]
    recipe: Recipe
    machine: dict[str, Any]
    corpora: list[dict[str, Any]]
    workload: dict[str, Any]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "rungs": [rung.as_json() for rung in self.rungs],
            "machine": self.machine,
            "corpora": self.corpora,
            "workload": self.workload,
            "seconds": self.seconds,
        }
