"""Policy and pool details that a running server hardly shows."""

from __future__ import annotations

import dataclasses

import pytest

from trivet.engine.stats import EngineStats
from trivet.errors import RequestError
from trivet.gateway.policy import assign_least_loaded
from trivet.gateway.pool import WorkerHandle
from trivet.request import ErrorEvent, Event, Request, SamplingParams


@dataclasses.dataclass
class FakeWorker:
    room: int
    num_live: int = 0


def test_groups_go_where_fewest_requests_are() -> None:
    workers = [FakeWorker(10, 3), FakeWorker(10, 1), FakeWorker(0, 0)]
    assert assign_least_loaded(workers, [1, 1, 1, 1]) == [1, 1, 0, 1]
    assert assign_least_loaded(workers, [4, 1]) == [1, 0]


def test_all_groups_or_none() -> None:
    workers = [FakeWorker(2), FakeWorker(2)]
    assert assign_least_loaded(workers, [2, 2]) == [0, 1]
    with pytest.raises(RequestError) as caught:
        assign_least_loaded(workers, [2, 1, 2])
    assert caught.value.status == 429
    assert caught.value.code == "queue_full"


class Recorder:
    """Receiver and observer: remembers what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.wakes = 0

    def deliver(self, event: Event) -> None:
        self.events.append(event)

    def wake(self) -> None:
        self.wakes += 1

    def worker_ready(self, worker: WorkerHandle) -> None: ...
    def worker_stats(self, worker: WorkerHandle, new: EngineStats) -> None: ...


def test_a_dead_worker_answers_at_once() -> None:
    recorder = Recorder()
    worker = WorkerHandle("w0", recorder)
    request = Request(request_id="a", prompt_ids=[1], params=SamplingParams(seed=0))
    worker.submit(request, recorder)
    [event] = recorder.events
    assert isinstance(event, ErrorEvent)
    assert event.code == "worker_died"
    assert recorder.wakes == 1
    assert worker.num_live == worker.room == 0
