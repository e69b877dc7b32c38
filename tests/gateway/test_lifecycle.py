"""Loading, full queues, clients that leave, workers that die, draining: nothing ends in silence."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from support.toy_server import HOOKS, toy_config, toy_server
from trivet.errors import ConfigError, EngineError, TrivetError
from trivet.gateway import LocalServer, pool
from trivet.gateway.spawn import SpawnedWorker, spawn_worker

PATH = "/v1/completions"
SLOW = "toy:step_seconds=0.02"
TESTS = Path(__file__).parents[1]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def worker_of(client: httpx.Client) -> dict[str, Any]:
    worker: dict[str, Any] = client.get("/workers").json()["workers"][0]
    return worker


def is_idle(client: httpx.Client) -> bool:
    worker = worker_of(client)
    return bool(worker["running"] == worker["queue"] == worker["pages"]["used"] == 0)


@contextlib.contextmanager
def serving(model: str = "toy", **settings: Any) -> Iterator[httpx.Client]:
    with (
        toy_server(model, **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def events_of(response: httpx.Response) -> Generator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_health_is_503_while_loading() -> None:
    server = LocalServer(toy_config("toy:load_seconds=1.0"), HOOKS, wait_ready=False)
    with server, httpx.Client(base_url=server.url) as client:
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "not_ready"
        refused = client.post(PATH, json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert client.get("/version").status_code == 200
        assert client.get("/v1/models").status_code == 200
        server.wait_ready()
        assert client.get("/health").status_code == 200


def test_stop_while_loading() -> None:
    with LocalServer(toy_config("toy:load_seconds=30"), HOOKS, wait_ready=False):
        pass


def test_stop_while_packing() -> None:
    begin = time.monotonic()
    with LocalServer(toy_config("toy:pack_seconds=60"), HOOKS, wait_ready=False):
        pass
    assert time.monotonic() - begin < 30


def test_model_that_cannot_be_loaded() -> None:
    with pytest.raises(TrivetError, match="made to fail"), toy_server("toy:fail=1"):
        pass
    with pytest.raises(EngineError, match="died while loading"), toy_server("toy:crash=1"):
        pass
    with pytest.raises(TrivetError, match="max_step_tokens"), toy_server(max_step_tokens=8):
        pass


def test_taken_port_is_a_setting_error() -> None:
    with toy_server() as server, pytest.raises(ConfigError, match="port"):
        LocalServer(toy_config(port=int(server.url.rpartition(":")[2])), HOOKS)


def test_full_queue_answers_429() -> None:
    with serving(SLOW, max_num_seqs=1, max_waiting=1) as client:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as first:
            assert first.status_code == 200
            with ThreadedPost(client, {**body, "stream": False}) as second:
                wait_until(lambda: worker_of(client)["queue"] == 1)
                full = client.post(PATH, json={"prompt": "z", "max_tokens": 1})
                assert full.status_code == 429
                assert full.json()["error"]["code"] == "queue_full"
                assert int(full.headers["retry-after"]) >= 1
                never = client.post(PATH, json={"prompt": "z", "max_tokens": 1, "n": 3})
                assert never.status_code == 400
                assert never.json()["error"]["param"] == "n"
                first.close()
                assert second.result().status_code == 200
        assert client.post(PATH, json={"prompt": "z", "max_tokens": 1}).status_code == 200


class ThreadedPost:
    """One POST on a thread."""

    def __init__(self, client: httpx.Client, body: dict[str, Any]) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(client.post(PATH, json=body))
        )

    def __enter__(self) -> ThreadedPost:
        self._thread.start()
        return self

    def result(self) -> httpx.Response:
        self._thread.join(60)
        [answer] = self._answers
        return answer

    def __exit__(self, *exception: object) -> None:
        self._thread.join(60)


def test_disconnect_frees_pages_within_one_step() -> None:
    with serving("toy:step_seconds=0.05") as client:
        body = {"prompt": "y" * 100, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            events = events_of(response)
            next(events)
            assert worker_of(client)["pages"]["used"] > 0
            events.close()
        wait_until(lambda: is_idle(client), 2.0)
        with contextlib.suppress(httpx.ReadTimeout):
            client.post(PATH, json={**body, "stream": False, "n": 3}, timeout=0.3)
        wait_until(lambda: is_idle(client), 2.0)
        text = client.get("/metrics").text
        aborted = 'request_success_total{engine="0",finished_reason="abort",model_name="toy"} 4.0'
        assert aborted in text


def test_deadline_is_an_error() -> None:
    with serving("toy:step_seconds=0.05", request_timeout_s=0.4) as client:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        late = client.post(PATH, json=body)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline"
        with client.stream("POST", PATH, json={**body, "stream": True}) as response:
            last = list(events_of(response))[-1]
        assert last["error"]["code"] == "deadline"
        assert is_idle(client)


def test_dead_worker_is_reported_and_restarted(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(SLOW) as client:
        body = {"prompt": "secret prompt", "max_tokens": 400, "ignore_eos": True}
        with (
            client.stream("POST", PATH, json={**body, "stream": True}) as response,
            ThreadedPost(client, body) as other,
        ):
            events = events_of(response)
            next(events)
            wait_until(lambda: worker_of(client)["running"] == 2)
            pid = worker_of(client)["pid"]
            os.kill(pid, signal.SIGKILL)
            rest = list(events)
            assert rest[-1]["error"]["code"] == "worker_died"
            assert set(rest[-1]["error"]) == {"message", "type", "param", "code"}
            answer = other.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "worker_died"
        wait_until(lambda: client.get("/health").status_code == 200)
        worker = worker_of(client)
        assert worker["pid"] != pid
        assert worker["restarts"] == 1
        assert client.post(PATH, json={**body, "max_tokens": 3}).status_code == 200
        metrics = client.get("/metrics").text
        assert 'trivet:worker_restarts{engine="0",model_name="toy"} 1.0' in metrics
        assert 'finished_reason="error",model_name="toy"} 2.0' in metrics
    logged = capfd.readouterr().err
    assert "w0 died" in logged
    assert "secret" not in logged


def test_a_restart_that_finds_no_process_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refusals = [OSError(11, "no more processes")] * 2

    def spawn(factory: str) -> SpawnedWorker:
        if refusals:
            raise refusals.pop()
        return spawn_worker(factory)

    with serving() as client:
        monkeypatch.setattr(pool, "spawn_worker", spawn)
        os.kill(worker_of(client)["pid"], signal.SIGKILL)
        wait_until(lambda: client.get("/health").status_code == 503)
        wait_until(lambda: client.get("/health").status_code == 200)
        assert worker_of(client)["restarts"] == 1
    assert capfd.readouterr().err.count("no more processes") == 2


@pytest.mark.slow
def test_silent_worker_is_killed_and_restarted(capfd: pytest.CaptureFixture[str]) -> None:
    hooks = msgspec.structs.replace(HOOKS, silence_limit_s=1.0)
    with (
        LocalServer(toy_config(SLOW), hooks) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        pid = worker_of(client)["pid"]
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            events = events_of(response)
            next(events)
            os.kill(pid, signal.SIGSTOP)
            assert list(events)[-1]["error"]["code"] == "worker_died"
        wait_until(lambda: client.get("/health").status_code == 200)
        assert worker_of(client)["pid"] != pid
    assert "w0 is silent" in capfd.readouterr().err


@contextlib.contextmanager
def server_process(model: str, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`trivet.gateway.serve` in a process of its own, and its URL once it says it is ready."""
    code = (
        "import json, sys\n"
        "from support.toy_server import HOOKS, toy_config\n"
        "from trivet.gateway import serve\n"
        "sys.exit(serve(toy_config(sys.argv[1], **json.loads(sys.argv[2])), HOOKS))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, model, json.dumps(settings)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
    ) as process:
        try:
            assert process.stderr is not None
            settings_in_force, line = process.stderr.readline(), process.stderr.readline()
            assert settings_in_force.startswith("settings model=toy"), settings_in_force
            assert line.startswith("ready http://127.0.0.1:"), line
            yield process, line.split()[1]
        finally:
            process.kill()


def test_sigterm_drains() -> None:
    with server_process(SLOW) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        worker_pid = worker_of(client)["pid"]
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            events = events_of(response)
            next(events)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health").status_code == 503)
            refused = client.post(PATH, json={"prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            *_, final, done = events
        assert done == "[DONE]"
        assert final["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == 0
        assert not is_alive(worker_pid)
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_second_signal_ends_requests_in_an_error() -> None:
    with server_process(SLOW) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            events = events_of(response)
            next(events)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: client.get("/health").status_code == 503)
            process.send_signal(signal.SIGINT)
            last = list(events)[-1]
        assert last["error"]["code"] == "shutting_down"
        assert process.wait(20) == 0


@pytest.mark.slow
def test_drain_timeout_ends_requests_in_an_error() -> None:
    server = LocalServer(toy_config(SLOW, drain_timeout_s=0.2), HOOKS)
    with server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": "x", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with client.stream("POST", PATH, json=body) as response:
            events = events_of(response)
            next(events)
            stopper = threading.Thread(target=server.stop)
            stopper.start()
            last = list(events)[-1]
            stopper.join()
        assert last["error"]["code"] == "shutting_down"


def test_worker_dies_with_its_gateway() -> None:
    with server_process("toy") as (process, url), httpx.Client(base_url=url) as client:
        worker_pid = worker_of(client)["pid"]
        assert is_alive(worker_pid)
        process.kill()
        process.wait()
        wait_until(lambda: not is_alive(worker_pid))
