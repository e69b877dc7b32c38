"""Prometheus metrics: vLLM's names where the meaning is the same, ours (``trivet:``) elsewhere.

Latencies are measured here, at the gateway, per request (`Observer` of `trivet.gateway.generation`);
counts of tokens, pages and drafts come from the workers' engines, as differences between two reports,
so that they go on growing when a worker is restarted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from trivet.engine import EngineStats
from trivet.engine import Histogram as StepHistogram
from trivet.gateway.generation import Choice
from trivet.gateway.pool import WorkerHandle
from trivet.request import StageTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_LABELS = ("model_name", "engine")

_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], int]]] = {
    "vllm:prefix_cache_queries": (
        "Tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_queries,
    ),
    "vllm:prefix_cache_hits": (
        "Tokens served from the prefix cache.",
        lambda stats: stats.prefix_hits,
    ),
    "vllm:num_preemptions": (
        "Requests preempted for want of pages.",
        lambda stats: stats.num_preemptions,
    ),
    "vllm:prompt_tokens": (
        "Prompt tokens of admitted requests.",
        lambda stats: stats.num_prompt_tokens,
    ),
    "vllm:generation_tokens": (
        "Output tokens.",
        lambda stats: stats.num_output_tokens,
    ),
    "vllm:spec_decode_num_drafts": (
        "Request steps with a draft.",
        lambda stats: stats.speculation.num_drafts,
    ),
    "vllm:spec_decode_num_draft_tokens": (
        "Draft tokens proposed.",
        lambda stats: stats.speculation.num_draft_tokens,
    ),
    "vllm:spec_decode_num_accepted_tokens": (
        "Draft tokens accepted.",
        lambda stats: stats.speculation.num_accepted_tokens,
    ),
    "trivet:computed_tokens": (
        "Rows computed, draft rows and recomputed rows included.",
        lambda stats: stats.num_computed_tokens,
    ),
    "trivet:steps": (
        "Engine steps.",
        lambda stats: stats.num_steps,
    ),
    "trivet:fruitless_draft_requests": (
        "Requests that had draft tokens and not one accepted.",
        lambda stats: stats.speculation.num_fruitless_requests,
    ),
}


class _StepCollector(Collector):
    """Histograms that the engines keep themselves: rows and seconds of their steps."""

    def __init__(self, model_name: str, workers: Callable[[], Sequence[WorkerHandle]]) -> None:
        self._model = model_name
        self._workers = workers

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for name, help_text, kept in (
            ("vllm:iteration_tokens_total", "Rows of an engine step.", "step_rows"),
            ("trivet:step_seconds", "Seconds of an engine step.", "step_seconds"),
        ):
            family = HistogramMetricFamily(name, help_text, labels=_LABELS)
            for worker in self._workers():
                histogram: StepHistogram = getattr(worker.stats, kept)
                bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
                sums = itertools.accumulate(histogram.counts)
                buckets = list(zip(bounds, map(float, sums), strict=True))
                family.add_metric([self._model, _engine(worker)], buckets, histogram.sum)
            yield family


class Metrics:
    """One registry per gateway. Worker ``w0`` is engine ``0``.

    workers  the workers there are now
    """

    def __init__(self, model_name: str, workers: Callable[[], Sequence[WorkerHandle]]) -> None:
        self.registry = CollectorRegistry()
        self._workers = workers
        self.registry.register(_StepCollector(model_name, workers))
        self._model = model_name
        self._counters = {
            name: Counter(name, help_text, _LABELS, registry=self.registry)
            for name, (help_text, _) in _COUNTERS.items()
        }
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            (*_LABELS, "position"),
            registry=self.registry,
        )
        self._running = self._gauge("vllm:num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.")
        self._pages = Gauge(
            "trivet:pages", "KV pages by state.", (*_LABELS, "state"), registry=self.registry
        )
        self._restarts = self._gauge("trivet:worker_restarts", "Times the worker was restarted.")
        self._up = self._gauge("trivet:worker_up", "1 while the worker takes requests.")
        self._cache_info = Gauge(
            "vllm:cache_config_info",
            "KV cache settings as labels.",
            (*_LABELS, "block_size", "cache_dtype", "num_gpu_blocks", "weights", "numerics_id"),
            registry=self.registry,
        )
        self._success = Counter(
            "vllm:request_success",
            "Requests by ending.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            ("model_name",),
            registry=self.registry,
        )
        self._http = Counter(
            "trivet:http_responses",
            "HTTP responses by status.",
            ("status",),
            registry=self.registry,
        )
        first, token, request = _FIRST_TOKEN_S, _TOKEN_S, _REQUEST_S
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", first)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", token)
        self._tpot = self._histogram("vllm:request_time_per_output_token_seconds", token)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", request)
        self._queue = self._histogram("vllm:request_queue_time_seconds", request)
        self._inference = self._histogram("vllm:request_inference_time_seconds", request)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", request)
        self._decode = self._histogram("vllm:request_decode_time_seconds", request)
        self._prompt_len = self._histogram("vllm:request_prompt_tokens", _TOKENS)
        self._output_len = self._histogram("vllm:request_generation_tokens", _TOKENS)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", _TOKENS)
        self._n = self._histogram("vllm:request_params_n", (1, 2, 5, 10, 20, 50, 100))

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, _LABELS, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        help_text = name.partition(":")[2].replace("_", " ") + "."
        histogram = Histogram(
            name, help_text, ("model_name",), buckets=buckets, registry=self.registry
        )
        return histogram.labels(self._model)

    def worker_ready(self, worker: WorkerHandle) -> None:
        """Begin the series of a worker, so that a scrape before the first request shows zeros."""
        ready = worker.ready
        assert ready is not None, "the worker is ready"
        labels = (self._model, _engine(worker))
        for counter in self._counters.values():
            counter.labels(*labels)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*labels, reason)
        self._cache_info.clear()
        self._cache_info.labels(
            *labels,
            str(ready.page_tokens),
            ready.kv,
            str(ready.num_pages),
            ready.weights,
            ready.numerics_id,
        ).set(1)
        self.worker_stats(worker, worker.stats)

    def worker_stats(self, worker: WorkerHandle, new: EngineStats) -> None:
        """Take a report; ``worker.stats`` is still the one before it."""
        labels, old = (self._model, _engine(worker)), worker.stats
        for name, (_, value) in _COUNTERS.items():
            self._counters[name].labels(*labels).inc(max(0, value(new) - value(old)))
        before = old.speculation.num_accepted_per_position
        for position, count in enumerate(new.speculation.num_accepted_per_position):
            known = before[position] if position < len(before) else 0
            self._accepted_at.labels(*labels, str(position)).inc(max(0, count - known))
        self._running.labels(*labels).set(new.num_running)
        self._waiting.labels(*labels).set(new.num_waiting)
        used = new.pages_used / new.num_pages if new.num_pages else 0.0
        self._kv_usage.labels(*labels).set(used)
        for state in ("free", "used", "cached", "leased"):
            self._pages.labels(*labels, state).set(getattr(new, f"pages_{state}"))
        self._restarts.labels(*labels).set(worker.restarts)

    def begun(self, choice: Choice, num_choices: int) -> None:
        """A request was admitted."""
        self._prompt_len.observe(len(choice.request.prompt_ids))
        self._max_tokens.observe(choice.request.params.max_tokens)
        self._n.observe(num_choices)

    def rejected(self) -> None:
        """A call was refused because the queue was full."""
        self._rejections.labels(self._model).inc()

    def responded(self, status: int) -> None:
        """An HTTP response began."""
        self._http.labels(str(status)).inc()

    def tokens(self, choice: Choice, now: float, num_tokens: int) -> None:
        """Output tokens arrived; ``choice`` still has the time of those before them."""
        if choice.last_token_at is None:
            self._ttft.observe(now - choice.arrived)
        else:
            self._itl.observe(now - choice.last_token_at)

    def ended(self, choice: Choice, now: float, reason: str) -> None:
        """A request ended, as the client sees it."""
        engine = _engine(choice.backend) if isinstance(choice.backend, WorkerHandle) else "0"
        self._success.labels(self._model, engine, reason).inc()
        self._e2e.observe(now - choice.arrived)
        self._output_len.observe(choice.output_len)
        first, last = choice.first_token_at, choice.last_token_at
        if first is not None and last is not None and choice.output_len > 1:
            self._tpot.observe((last - first) / (choice.output_len - 1))

    def stages(self, choice: Choice, times: StageTimes) -> None:
        """The worker's timeline of a finished request."""
        if times.scheduled is None or times.finished is None:
            return
        self._queue.observe(times.scheduled - times.arrived)
        self._inference.observe(times.finished - times.scheduled)
        if times.first_token is not None:
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.finished - times.first_token)

    def render(self) -> bytes:
        """The page of GET /metrics."""
        for worker in self._workers():
            self._up.labels(self._model, _engine(worker)).set(worker.state == "ready")
            self._restarts.labels(self._model, _engine(worker)).set(worker.restarts)
        return generate_latest(self.registry)


def _engine(worker: WorkerHandle) -> str:
    return worker.worker_id.removeprefix("w")
