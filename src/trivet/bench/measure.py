"""Runs an engine on a fixed set of requests and records when every token came.

In-process and closed: requests are there from the start, or begin when others end, or arrive by a plan
in `run_mixed`; nothing else competes. Definitions, per request: ttft_s is the first token minus the
arrival; tpot_s is (last - first token) / (tokens - tokens of the first event). decode_tok_s is the mean
of 1 / tpot_s times the requests that run at once (the sum over a batch); prefill_tok_s is all prompt
tokens over the time until the last request of a batch has its first token, or, when prompts take turns,
over the mean time to the first token times the turns; out_tok_s is all output tokens over the wall
time, prefill included.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trivet.bench.profile import Phase, ProfiledRunner
from trivet.engine import DraftAsk, Drafter, StepLoad
from trivet.errors import EngineError
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    Event,
    FinishedEvent,
    Request,
    SamplingParams,
    TokensEvent,
)

LOOP_TOKENS = 16  # a sequence of this length ...
LOOP_TIMES = 3  # ... that occurred this often begins a loop


class SteppingEngine(Protocol):
    """What is needed of `trivet.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request, now: float) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self, now: float, clock: Callable[[], float] | None = None) -> list[Event]: ...


@dataclasses.dataclass
class Trace:
    """One request's tokens and when they came.

    arrivals  (time, number of tokens) of each event
    drafts    (output length before, drafted, accepted) of each decode step, when there is a drafter
    """

    request_id: str
    prompt_len: int
    arrived: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    drafts: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    finished: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.arrived

    @property
    def tpot_s(self) -> float | None:
        return self.tpot_until(len(self.token_ids))

    def decode_s(self, num_tokens: int) -> float:
        """Seconds from the first event to the event that completes ``num_tokens`` tokens."""
        count = 0
        for moment, tokens in self.arrivals:
            count += tokens
            if count >= num_tokens:
                return moment - self.arrivals[0][0]
        return self.arrivals[-1][0] - self.arrivals[0][0]

    def tpot_until(self, num_tokens: int) -> float | None:
        """Seconds per token over the first ``num_tokens``; None when there is no second event."""
        rest = num_tokens - self.arrivals[0][1]
        return self.decode_s(num_tokens) / rest if rest > 0 else None

    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        moments = [moment for moment, _ in self.arrivals]
        return [after - before for before, after in itertools.pairwise(moments)]


class RecordingDrafter:
    """Passes everything on to a drafter and notes what became of each draft."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._output_len: dict[str, int] = {}
        self.drafts: dict[str, list[tuple[int, int, int]]] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def open(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._output_len[request_id] = 0
        self.drafts[request_id] = []
        self._inner.open(request_id, token_ids)

    def propose(self, asks: Sequence[DraftAsk], load: StepLoad) -> list[list[int]]:
        return self._inner.propose(asks, load)

    def observe(
        self, request_id: str, token_ids: Sequence[int], drafted: int, accepted: int
    ) -> None:
        before = self._output_len[request_id]
        if before > 0:
            self.drafts[request_id].append((before, drafted, accepted))
        self._output_len[request_id] = before + len(token_ids)
        self._inner.observe(request_id, token_ids, drafted, accepted)

    def close(self, request_id: str) -> None:
        self._inner.close(request_id)


@dataclasses.dataclass(frozen=True)
class BatchRun:
    """One run of a batch: its traces, in the order of the prompts, and its wall time.

    at_once  requests that ran at the same time
    phases   where the time went, when the run was profiled
    """

    traces: list[Trace]
    wall_s: float
    at_once: int
    phases: Mapping[str, Phase] = dataclasses.field(default_factory=dict)

    def figures(self) -> dict[str, float | None]:
        """The contract's speeds of this run."""
        known = [tpot for trace in self.traces if (tpot := trace.tpot_s)]
        turns = len(self.traces) / self.at_once
        if turns > 1:
            prefill_s = turns * statistics.fmean(trace.ttft_s for trace in self.traces)
        else:
            start = min(trace.arrived for trace in self.traces)
            prefill_s = max(trace.arrivals[0][0] for trace in self.traces) - start
        prompt_tokens = sum(trace.prompt_len for trace in self.traces)
        return {
            "ttft_s": statistics.median(trace.ttft_s for trace in self.traces),
            "tpot_s": statistics.median(known) if known else None,
            "decode_tok_s": statistics.fmean(1 / tpot for tpot in known) * self.at_once
            if known
            else None,
            "prefill_tok_s": prompt_tokens / max(prefill_s, 1e-9),
            "out_tok_s": sum(len(trace.token_ids) for trace in self.traces) / self.wall_s,
            "wall_s": self.wall_s,
        }


def run_batch(
    engine: SteppingEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    recorder: RecordingDrafter | None = None,
    at_once: int | None = None,
    profile: ProfiledRunner | None = None,
) -> BatchRun:
    """Run all prompts, each with its own noise, and step until every one is done.

    at_once  requests that run at the same time; the next begins when one is done. None: all of them
    profile  the engine's runner, where it is one that sorts the time
    """
    at_once = min(at_once or len(prompts), len(prompts))
    start = time.monotonic()
    if profile is not None:
        profile.begin(start)
    traces: dict[str, Trace] = {}
    num_done = 0
    while num_done < len(prompts):
        while len(traces) < min(num_done + at_once, len(prompts)):
            index, now = len(traces), time.monotonic()
            trace = Trace(f"bench-{index}", len(prompts[index]), now if traces else start)
            traces[trace.request_id] = trace
            engine.add(_request(trace.request_id, prompts[index], params, index), now)
        moment, num_continued = _step(engine, traces)
        if profile is not None:
            profile.end_step(moment, num_continued)
        num_done = sum(trace.finished is not None for trace in traces.values())
    wall = max(trace.finished or start for trace in traces.values()) - start
    if recorder is not None:
        for trace in traces.values():
            trace.drafts = recorder.drafts.pop(trace.request_id, [])
    phases = {} if profile is None else profile.phases()
    return BatchRun(list(traces.values()), wall, at_once, phases)


@dataclasses.dataclass(frozen=True)
class MixedLoad:
    """Short chats in a fixed number of streams, and long prompts that arrive by the clock.

    A stream starts its next chat as soon as the one before is done. ``long_every_s`` seconds lie
    between long prompts, the first after half of that.
    """

    streams: int
    long_every_s: float
    duration_s: float
    chat_output_tokens: int = 32
    long_output_tokens: int = 8


def run_mixed(
    engine: SteppingEngine,
    chats: Sequence[Sequence[int]],
    longs: Sequence[Sequence[int]],
    load: MixedLoad,
) -> dict[str, float | None]:
    """Run the mixed load for its duration in real time; what still runs then is cancelled.

    Returns the chats' ttft_s and tpot_s (medians), chat_gap_p99_s (99th percentile of the time between
    two tokens of a chat), long_ttft_s (median) and out_tok_s of everything.
    """
    chat_params = SamplingParams(
        max_tokens=load.chat_output_tokens, temperature=0.0, seed=0, ignore_eos=True
    )
    long_params = SamplingParams(
        max_tokens=load.long_output_tokens, temperature=0.0, seed=0, ignore_eos=True
    )
    start = time.monotonic()
    traces: dict[str, Trace] = {}
    num_chats = num_longs = 0
    active: set[str] = set()
    while (now := time.monotonic()) - start < load.duration_s:
        active = {name for name in active if traces[name].finished is None}
        while len(active) < load.streams:
            prompt = chats[num_chats % len(chats)]
            trace = Trace(f"chat-{num_chats}", len(prompt), now)
            traces[trace.request_id] = trace
            active.add(trace.request_id)
            engine.add(_request(trace.request_id, prompt, chat_params, num_chats), now)
            num_chats += 1
        due = start + (num_longs + 0.5) * load.long_every_s
        if now >= due:
            prompt = longs[num_longs % len(longs)]
            trace = Trace(f"long-{num_longs}", len(prompt), due)
            traces[trace.request_id] = trace
            engine.add(_request(trace.request_id, prompt, long_params, num_longs), now)
            num_longs += 1
        _step(engine, traces)
    wall = time.monotonic() - start
    for name, trace in traces.items():
        if trace.finished is None:
            engine.abort(name)
    while engine.has_work:
        engine.step(time.monotonic(), time.monotonic)
    started = [trace for trace in traces.values() if trace.arrivals]
    chat_traces = [trace for trace in started if trace.request_id.startswith("chat-")]
    long_traces = [trace for trace in started if trace.request_id.startswith("long-")]
    gaps = sorted(gap for trace in chat_traces for gap in trace.gaps())
    tpots = [trace.tpot_s for trace in chat_traces if trace.tpot_s]
    return {
        "ttft_s": _median([trace.ttft_s for trace in chat_traces]),
        "tpot_s": _median([tpot for tpot in tpots if tpot]),
        "chat_gap_p99_s": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] if gaps else None,
        "long_ttft_s": _median([trace.ttft_s for trace in long_traces]),
        "out_tok_s": sum(len(trace.token_ids) for trace in traces.values()) / wall,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _request(name: str, prompt: Sequence[int], params: SamplingParams, index: int) -> Request:
    return Request(
        request_id=name,
        prompt_ids=list(prompt),
        params=params,
        choice_index=index,
        use_prefix_cache=False,
    )


def _step(engine: SteppingEngine, traces: dict[str, Trace]) -> tuple[float, int]:
    """One engine step. Returns the moment of its end, with which its tokens are stamped, and how many
    requests got tokens that were not their first.
    """
    events = engine.step(time.monotonic(), time.monotonic)
    moment = time.monotonic()
    num_continued = 0
    for event in events:
        trace = traces[event.request_id]
        match event:
            case TokensEvent():
                if event.token_ids:
                    num_continued += bool(trace.arrivals)
                    trace.token_ids += event.token_ids
                    trace.arrivals.append((moment, len(event.token_ids)))
            case FinishedEvent():
                trace.finished = moment
            case ErrorEvent():
                raise EngineError(f"{event.request_id}: {event.code}: {event.message}")
            case CancelledEvent():
                raise EngineError(f"{event.request_id} was cancelled")
    return moment, num_continued


def loop_start(token_ids: Sequence[int]) -> int:
    """Number of leading tokens before a loop: where some 16 tokens have occurred three times.

    Returns the index just after the third occurrence's last token; len(token_ids) without a loop.
    Occurrences may overlap, as they do when one token repeats.
    """
    seen: dict[tuple[int, ...], int] = {}
    for end in range(LOOP_TOKENS, len(token_ids) + 1):
        key = tuple(token_ids[end - LOOP_TOKENS : end])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == LOOP_TIMES:
            return end
    return len(token_ids)


@dataclasses.dataclass(frozen=True)
class DraftFigures:
    """What speculation did in the tokens before any loop.

    alpha                 accepted / tested draft tokens: the chance that a draft token is accepted
                          given that all before it were
    mean_accepted_length  1 + accepted / drafts, as vLLM counts it; None without a draft
    tokens_per_step       tokens of decode steps / decode steps, those without a draft included
    rows_per_step         how many decode steps had 1 + n rows, by n
    looped_share          share of tokens that lie in loops
    """

    alpha: float | None
    mean_accepted_length: float | None
    tokens_per_step: float | None
    rows_per_step: dict[int, int]
    looped_share: float
    draft_tokens: int
    accepted_tokens: int

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        fields["rows_per_step"] = {str(k): v for k, v in sorted(self.rows_per_step.items())}
        return fields


def draft_figures(traces: Sequence[Trace]) -> DraftFigures:
    """Count drafts over the traces of a run with speculation."""
    drafts = drafted = accepted = tested = steps = tokens = looped = total = 0
    rows: dict[int, int] = {}
    for trace in traces:
        cut = loop_start(trace.token_ids)
        looped += len(trace.token_ids) - cut
        total += len(trace.token_ids)
        for before, num_drafted, num_accepted in trace.drafts:
            if before >= cut:
                break
            steps += 1
            tokens += 1 + num_accepted
            rows[1 + num_drafted] = rows.get(1 + num_drafted, 0) + 1
            if num_drafted:
                drafts += 1
                drafted += num_drafted
                accepted += num_accepted
                tested += min(num_drafted, num_accepted + 1)
    return DraftFigures(
        alpha=accepted / tested if tested else None,
        mean_accepted_length=1 + accepted / drafts if drafts else None,
        tokens_per_step=tokens / steps if steps else None,
        rows_per_step=rows,
        looped_share=looped / total if total else 0.0,
        draft_tokens=drafted,
        accepted_tokens=accepted,
    )


def decode_ratio(off: BatchRun, on: BatchRun) -> float | None:
    """Decode time without speculation over that with it, for the tokens before any loop."""
    seconds_off = seconds_on = 0.0
    for plain, drafted in zip(off.traces, on.traces, strict=True):
        cut = loop_start(plain.token_ids)
        seconds_off += plain.decode_s(cut)
        seconds_on += drafted.decode_s(cut)
    return seconds_off / seconds_on if seconds_on > 0 else None


def are_identical(off: BatchRun, on: BatchRun) -> bool:
    """Whether every request produced the same tokens."""
    return all(a.token_ids == b.token_ids for a, b in zip(off.traces, on.traces, strict=True))
