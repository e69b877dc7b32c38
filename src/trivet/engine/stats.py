"""Counters of one engine, as one struct that travels to the gateway."""

from __future__ import annotations

import bisect

import msgspec

_ROW_BOUNDS = [1.0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
_SECOND_BOUNDS = [
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1.024,
    4.096,
]


class Histogram(msgspec.Struct):
    """Counts per bucket: ``counts[i]`` values were <= ``bounds[i]`` and above the bound before.

    ``counts`` has one entry more than ``bounds``, for the values above all of them.
    """

    bounds: list[float]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: list[float]) -> Histogram:
        """A histogram of no values."""
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class SpeculationStats(msgspec.Struct):
    """Draft counters, defined as vLLM defines them; accepted tokens are the committed ones.

    num_drafts                request steps with at least one draft token
    num_accepted_per_position how often the draft token at each position of a draft was accepted
    num_drafted_per_position  how often one was proposed there
    num_fruitless_requests    ended requests that had draft tokens and not one accepted (I5)
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafted_per_position: list[int] = []
    num_accepted_per_position: list[int] = []
    num_fruitless_requests: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.num_drafted_per_position)
        if missing > 0:
            self.num_drafted_per_position.extend([0] * missing)
            self.num_accepted_per_position.extend([0] * missing)
        for position in range(drafted):
            self.num_drafted_per_position[position] += 1
        for position in range(accepted):
            self.num_accepted_per_position[position] += 1


class EngineStats(msgspec.Struct, kw_only=True):
    """State and counters of one engine. Counters only ever grow.

    num_prompt_tokens    prompt tokens of admitted requests, cached ones included
    num_output_tokens    committed output tokens; replayed ones are not counted again
    num_computed_tokens  rows computed, draft rows and recomputed rows included
    prefix_queries/hits  tokens looked up in, and served from, the prefix cache
    finished             ended requests by ending: stop, length, error, cancelled
    step_rows            rows per step
    step_seconds         seconds per step; empty when the caller of `Engine.step` gives no clock
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_leased: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    finished: dict[str, int] = {}
    step_rows: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(_ROW_BOUNDS))
    step_seconds: Histogram = msgspec.field(default_factory=lambda: Histogram.empty(_SECOND_BOUNDS))
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
