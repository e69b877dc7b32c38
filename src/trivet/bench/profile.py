"""Where the time of an engine's steps goes, by phase.

A `ProfiledRunner` stands between an engine and its model. It times the calls from outside, takes the
model's own times by class of operation, and leaves what is in no call to Python. A step belongs to the
decode phase when every request in it continues its output, and to the prefill phase when any of its
rows is of a prompt; the time between two steps belongs to the second.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from trivet.native.api import (
    Arena,
    Float32,
    Int32,
    KVGeometry,
    ModelRunner,
    SampleInput,
    SampleResult,
    SamplerState,
    StepInput,
    Taps,
)
from trivet.request import Logprob, SamplingParams

# Parts of a phase and the model's classes of operations in each. The rest of a forward call (embedding,
# checks, the attention's plan) is `other`; `python` is everything outside the model's calls.
_CLASSES = {
    "linears": ("linear_qkv", "linear_o", "linear_gate_up", "linear_down"),
    "attention": ("attention",),
    "head": ("head",),
    "preparation": ("prepare",),
    "waiting": ("wait",),
}
PARTS = (*_CLASSES, "sampling", "other", "python")
PHASES = ("prefill", "decode")


class TimedRunner(ModelRunner, Protocol):
    """A model that counts its own times: `trivet.native.NativeModel`."""

    def times_s(self) -> dict[str, float]: ...
    def set_timers(self, on: bool) -> None: ...


@dataclasses.dataclass
class Phase:
    """What the steps of one phase did and what they took.

    steps        how many steps                       logit_steps  those that computed logits
    rows         tokens computed                      logit_rows   rows with logits
    context      tokens whose KV was read: the sum over steps and requests
    pairs        sum over rows of the tokens each attends
    wall_s       seconds of all steps                 parts_s      the same by part (`PARTS`)
    """

    steps: int = 0
    logit_steps: int = 0
    rows: int = 0
    logit_rows: int = 0
    context: int = 0
    pairs: int = 0
    wall_s: float = 0.0
    parts_s: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, other: Phase) -> None:
        """Count the steps of another one too."""
        for name in ("steps", "logit_steps", "rows", "logit_rows", "context", "pairs", "wall_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for part in PARTS:
            self.parts_s[part] += other.parts_s[part]


class _Step(NamedTuple):
    """What is kept of a step until somebody asks: its cost is part of what is measured.

    times_s  the model's times when it was over
    """

    segments: Int32
    num_logits: int
    num_continued: int
    wall_s: float
    forward_s: float
    sample_s: float
    times_s: dict[str, float]


class ProfiledRunner:
    """Passes an engine's calls on to a model and sorts the time by phase and part.

    The engine's driver calls `begin` before the first step and `end_step` after each. Making one turns
    the model's timers on.
    """

    def __init__(self, inner: TimedRunner) -> None:
        inner.set_timers(True)
        self._inner = inner
        self._steps: list[_Step] = []
        self._segments: Int32 | None = None
        self._num_logits = 0
        self._forward_s = self._sample_s = 0.0
        self._moment = 0.0
        self._times_s = inner.times_s()

    def begin(self, moment: float) -> None:
        """The first step's time starts here; earlier steps are forgotten."""
        self._steps = []
        self._moment = moment
        self._times_s = self._inner.times_s()

    def end_step(self, moment: float, num_continued: int) -> None:
        """A step is over; ``num_continued`` requests got tokens that were not their first.

        A step that ran nothing leaves its time to the next one.
        """
        if self._segments is None:
            return
        self._steps.append(
            _Step(
                self._segments,
                self._num_logits,
                num_continued,
                moment - self._moment,
                self._forward_s,
                self._sample_s,
                self._inner.times_s(),
            )
        )
        self._segments, self._forward_s, self._sample_s = None, 0.0, 0.0
        self._moment = moment

    def phases(self) -> dict[str, Phase]:
        """The steps since `begin`, summed up by phase."""
        phases = {name: Phase() for name in PHASES}
        before = self._times_s
        for step in self._steps:
            name = "decode" if step.num_continued == len(step.segments) else "prefill"
            phases[name].add(_phase_of(step, before))
            before = step.times_s
        return phases

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        begin = time.perf_counter()
        hidden = self._inner.forward(step, arena, taps)
        self._forward_s += time.perf_counter() - begin
        self._segments = step.segments.copy()  # the engine may build the next step in place
        self._num_logits = len(step.logit_rows)
        return hidden

    def nonfinite_logits(self) -> Sequence[int]:
        return self._inner.nonfinite_logits()

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        begin = time.perf_counter()
        results = self._inner.sample(inputs)
        self._sample_s += time.perf_counter() - begin
        return results

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[Logprob]:
        begin = time.perf_counter()
        logprobs = self._inner.token_logprobs(first_logit, token_ids, top)
        self._sample_s += time.perf_counter() - begin
        return logprobs

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def num_layers(self) -> int:
        return self._inner.num_layers

    @property
    def hidden_size(self) -> int:
        return self._inner.hidden_size

    @property
    def max_positions(self) -> int:
        return self._inner.max_positions

    @property
    def numerics_id(self) -> str:
        return self._inner.numerics_id

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._inner.eos_ids

    def kv_geometry(self) -> KVGeometry:
        return self._inner.kv_geometry()

    def logits(self) -> Float32:
        return self._inner.logits()

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> SamplerState:
        return self._inner.new_sampler(params, choice_index, prompt_ids)


def _phase_of(step: _Step, before: Mapping[str, float]) -> Phase:
    """One step's work and times; ``before``: the model's times when it began."""
    phase = Phase(
        steps=1, logit_steps=min(1, step.num_logits), logit_rows=step.num_logits, wall_s=step.wall_s
    )
    for _, count, start, _ in step.segments.tolist():
        phase.rows += count
        phase.context += start + count
        phase.pairs += count * start + count * (count + 1) // 2
    parts = phase.parts_s
    for part, classes in _CLASSES.items():
        parts[part] = sum(step.times_s[name] - before[name] for name in classes)
    parts["other"] = step.forward_s - sum(parts[part] for part in _CLASSES)
    parts["sampling"] = step.sample_s
    parts["python"] = step.wall_s - step.forward_s - step.sample_s
    return phase


def phases_json(phases: Mapping[str, Phase]) -> dict[str, Any]:
    """Phases as plain JSON values; ``Phase(**value)`` turns one back."""
    return {name: dataclasses.asdict(phase) for name, phase in phases.items()}
