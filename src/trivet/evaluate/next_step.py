"""What to try after a gate: one thing, by a stated rule.

The order after a rejection is the practitioners': damage is repaired, not tuned around; then another
calibration set; then smaller groups with static act-order; then AWQ; then the sensitive layers in more
bits; then 8 bits. A step is skipped when it does not apply (no calibrated method, already 8 bits) or
was taken: by the candidate itself, or by another one of the ledger that was held against the same
baseline and rejected. That a step was named before does not count: the same gate names it again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trivet.evaluate.results import UNKNOWN, CheckResult, Finding, Verdict

CALIBRATION = "calibration"
GROUPS = "groups"
AWQ = "awq"
SENSITIVE = "sensitive-layers"
EIGHT_BITS = "8-bits"
ORDER = (CALIBRATION, GROUPS, AWQ, SENSITIVE, EIGHT_BITS)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is known of how a candidate was made.

    method      none, rtn, gptq, awq, awq+gptq, smoothquant, fp8, kquant; ``rtn`` when nothing is said
    act_order   static, desc_act or none
    is_mixed    some linears have more bits than others
    on_traffic  calibrated on the user's own prompts
    """

    weights: str
    method: str = "rtn"
    group_size: int | None = None
    kv: str = "bf16"
    act_order: str | None = None
    is_mixed: bool = False
    on_traffic: bool = False

    @property
    def bits(self) -> int:
        found = re.match(r"w(\d+)a", self.weights)
        return int(found[1]) if found else 16

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps of ORDER that were taken to make the candidate."""
        in_groups = "gptq" in self.method and self.group_size is not None and self.group_size <= 32
        taken = {
            CALIBRATION: self.on_traffic,
            GROUPS: in_groups and self.act_order in ("static", "desc_act"),
            AWQ: "awq" in self.method,
            SENSITIVE: self.is_mixed,
            EIGHT_BITS: self.bits >= 8,
        }
        return tuple(step for step in ORDER if taken[step])


def recipe_of(weights: str, kv: str, quantization: Mapping[str, Any] | None) -> Recipe:
    """A recipe from the full form that ran and, where there is one, the folder's quantization.json."""
    group = re.search(r"-g(\d+)", weights)
    size = int(group[1]) if group else None
    if quantization is None:
        return Recipe(weights, group_size=size, kv=kv)
    options = _mapping(quantization.get("recipe"))
    act_order = _mapping(options.get("gptq")).get("act_order")
    return Recipe(
        weights,
        method=str(quantization.get("method", "rtn")),
        group_size=size,
        kv=kv,
        act_order=act_order if isinstance(act_order, str) else None,
        is_mixed=len(_mapping(quantization.get("targets"))) > 1,
        on_traffic=bool(_mapping(quantization.get("calibration")).get("traffic")),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def next_step(
    verdict: Verdict, checks: Sequence[CheckResult], recipe: Recipe, done: Collection[str] = ()
) -> tuple[str, str]:
    """(name of the step, one line that says what to do).

    done  steps that were taken by other candidates
    """
    if verdict is Verdict.PASS:
        return "serve", "serve it"
    if verdict is Verdict.UNDECIDED:
        return _decide(checks)
    rejected = {check.check for check in checks if check.finding is Finding.REJECT}
    if "identity" in rejected:
        return "files", "copy the baseline's tokenizer, chat template and config and run again"
    if "weights" in rejected:
        return "repair", "the file is damaged or was written wrongly: make it again"
    if recipe.weights == UNKNOWN:
        return "bits", "use more bits, smaller groups or a calibrated method for the weights"
    if recipe.kv != "bf16" and recipe.bits == 16:
        return "kv", "keep the KV cache in bf16: weights are not the cause"
    for step in ORDER:
        line = None if step in done or step in recipe.steps else _line(step, recipe)
        if line is not None:
            return step, line
    return "full-precision", "serve bf16: no other step is left for this form"


def _decide(checks: Sequence[CheckResult]) -> tuple[str, str]:
    if any(check.finding is Finding.NOT_RUN for check in checks):
        names = ", ".join(c.name for c in checks if c.finding is Finding.NOT_RUN)
        return "run", f"make these checks run: {names} (more --budget, or a model on this machine)"
    if any(check.finding is Finding.LEFT_OUT for check in checks):
        names = ", ".join(c.name for c in checks if c.finding is Finding.LEFT_OUT)
        return "run", f"give more --budget, or none: left out were {names}"
    if any(check.finding is Finding.UNDECIDED for check in checks):
        return "sample", "use --gate full or more items in --tasks DIR: the sample is too small"
    return "tasks", "give --tasks DIR with tasks the baseline can do"


def _line(step: str, recipe: Recipe) -> str | None:
    calibrated = recipe.method not in ("rtn", "none", "fp8", "kquant")
    few_bits = recipe.bits < 8
    match step:
        case "calibration" if calibrated:
            return "calibrate on another set: --traffic with prompts like those you serve"
        case "groups" if few_bits:
            return "use --method gptq --group-size 32 --act-order static"
        case "awq" if few_bits:
            return "use --method awq+gptq"
        case "sensitive-layers" if few_bits:
            return "keep the layers that hurt in 8 bits: --keep from trivet evaluate --sensitivity"
        case "8-bits" if few_bits:
            return "use 8 bits: --bits 8"
    return None
