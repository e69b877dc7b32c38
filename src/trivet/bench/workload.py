"""The work of one round of the ladder: what is run, how large, and what a round gives."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from trivet.bench.process import EngineProcess
from trivet.bench.prompts import NaturalText
from trivet.bench.rung import Setting
from trivet.bench.session import BatchJob

# Tokens in and out of a single request; requests of the batch, tokens in and out of each.
_SIZES = ((256, 64, 8, 128, 48), (192, 48, 4, 96, 32), (96, 24, 4, 48, 16), (32, 12, 2, 24, 8))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one round: single requests one after the other, then a batch."""

    singles: list[BatchJob]
    batch: BatchJob

    def describe(self) -> dict[str, Any]:
        single = self.singles[0]
        return {
            "single_prompt_tokens": len(single.prompts[0]),
            "single_output_tokens": single.output_tokens,
            "batch": self.batch.batch,
            "batch_prompt_tokens": len(self.batch.prompts[0]),
            "batch_output_tokens": self.batch.output_tokens,
        }


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one setting: the singles' results, and the batch's."""

    singles: list[dict[str, Any]]
    batch: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        return statistics.fmean(single["ttft_s"] for single in self.singles)

    @property
    def tpot_s(self) -> float | None:
        known = [single["tpot_s"] for single in self.singles if single["tpot_s"] is not None]
        return statistics.fmean(known) if known else None

    @property
    def out_tok_s(self) -> float:
        return float(self.batch["out_tok_s"])

    @property
    def wall_s(self) -> float:
        return float(sum(one["wall_s"] for one in [*self.singles, self.batch]))

    @property
    def peak_rss_bytes(self) -> int:
        return max(int(one["peak_rss_bytes"]) for one in [*self.singles, self.batch])

    @property
    def token_ids(self) -> list[list[list[int]]]:
        return [one["token_ids"] for one in [*self.singles, self.batch]]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """First impression of the baseline, to size the work."""

    prefill_tok_s: float
    tpot_s: float


def calibrate(process: EngineProcess, text: NaturalText) -> Speeds:
    """Run one short request, after one that warms up."""
    room = process.facts["max_positions"]
    num_tokens = max(1, min(64, room - 8))
    prompts = text.prompts(1, num_tokens)
    job = BatchJob(prompts=prompts, batch=1, output_tokens=max(1, min(8, room - num_tokens)))
    process.call("warm_up", job=dataclasses.asdict(job))
    run = process.call("batch", job=dataclasses.asdict(job))
    return Speeds(run["prefill_tok_s"], run["tpot_s"] or 1 / run["prefill_tok_s"])


def fit_workload(text: NaturalText, speeds: Speeds, room: int, allowed_s: float) -> Workload:
    """The largest workload that the baseline does in ``allowed_s``, else the smallest.

    room  tokens of prompt and output together that the model takes
    """
    for single_in, single_out, batch, batch_in, batch_out in _SIZES:
        seconds = (2 * single_in + batch * batch_in) / speeds.prefill_tok_s + (
            2 * single_out + 2 * batch_out
        ) * speeds.tpot_s
        fits = max(single_in + single_out, batch_in + batch_out) <= room
        if fits and (seconds <= allowed_s or (single_in, batch) == (32, 2)):
            break
    else:
        single_in = batch_in = max(1, room // 2)
        single_out = batch_out = max(1, room - single_in)
    singles = text.prompts(2, single_in)
    many = text.prompts(batch, batch_in, salt=1)
    return Workload(
        [BatchJob(prompts=[one], batch=1, output_tokens=single_out) for one in singles],
        BatchJob(prompts=many, batch=batch, output_tokens=batch_out),
    )


def time_ratios(
    rounds: Sequence[dict[Setting, Round]], before: Setting, after: Setting
) -> list[float]:
    """Wall time before over wall time after, round by round."""
    return [one[before].wall_s / one[after].wall_s for one in rounds]


def draft_details(rounds: Sequence[Round]) -> dict[str, Any]:
    """Acceptance over the last round's three runs (every round drafts the same)."""
    drafts = [one["draft"] for one in [*rounds[-1].singles, rounds[-1].batch]]
    drafted = sum(draft["draft_tokens"] for draft in drafts)
    accepted = sum(draft["accepted_tokens"] for draft in drafts)
    return {
        "drafter": drafts[0]["drafter"],
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "single_alpha": [draft["alpha"] for draft in drafts[:-1]],
        "batch_alpha": drafts[-1]["alpha"],
    }
