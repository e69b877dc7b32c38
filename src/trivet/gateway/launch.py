"""What a server begins with, before its own imports: the socket, the workers, the model's front.

Workers are spawned first of all. On a thread of its own the front is loaded: as soon as the packed
weights are found (or made) every worker is told to load them, and the tokenizer is built meanwhile.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import msgspec

from trivet.config import ServerConfig
from trivet.errors import ConfigError
from trivet.gateway.spawn import DEFAULT_FACTORY, SpawnedWorker, num_workers_of, spawn_worker
from trivet.gateway.tokens import ModelFront
from trivet.worker.frames import WorkerConfig

_BACKLOG = 2048
DEFAULT_FRONT = "trivet.gateway.front:load_front"


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Where engine and tokenizer come from, as ``module:function``; tests put toys here.

    engine  WorkerConfig -> LoadedEngine, called in the worker
    front   (ServerConfig, on_packed, is_cancelled) -> ModelFront, called in the gateway, off the event
            loop; calls on_packed() when workers can begin to load, and raises TrivetError soon after
            is_cancelled() is true
    silence_limit_s  a worker that holds requests and says nothing for so long is killed
    """

    engine: str = DEFAULT_FACTORY
    front: str = DEFAULT_FRONT
    silence_limit_s: float = 300.0


FrontLoader = Callable[[ServerConfig, Callable[[], None], Callable[[], bool]], ModelFront]


def find_front(name: str) -> FrontLoader:
    """The function named ``module:function``."""
    module_name, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module_name), attribute)
    return cast(FrontLoader, function)


def worker_config(config: ServerConfig, num_workers: int) -> WorkerConfig:
    """The part of the server's settings that each worker gets."""
    model, memory = config.model, config.memory
    return WorkerConfig(
        model=model.model,
        weights=model.weights,
        kv=model.kv.value,
        threads=model.threads,
        max_model_len=model.max_model_len,
        memory_utilization=memory.memory_utilization,
        kv_bytes=memory.kv_bytes,
        num_workers=num_workers,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        draft=config.draft,
        draft_tokens=config.draft_tokens,
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ConfigError: the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        allowed = f"a free local address ({error.strerror or error})"
        raise ConfigError("host, port", f"{host}:{port}", allowed) from None
    return sock


class Launch:
    """The workers of a server and its front, on their way.

    workers  spawned; told to load when ``packed`` is done
    front    what the gateway knows of the model, or the error that prevents it
    """

    def __init__(
        self, config: ServerConfig, hooks: Hooks, spawned: Sequence[SpawnedWorker] = ()
    ) -> None:
        num_workers = num_workers_of(config.workers)
        self._cancelled = threading.Event()
        self.workers = list(spawned)
        try:
            while len(self.workers) < num_workers:
                self.workers.append(spawn_worker(hooks.engine))
        except OSError:
            self.cancel()
            raise
        self.worker_config = worker_config(config, num_workers)
        self.front: Future[ModelFront] = Future()
        self.packed: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._load, args=(config, hooks.front), name="trivet-front"
        )
        self._thread.start()

    def _load(self, config: ServerConfig, name: str) -> None:
        try:
            front = find_front(name)(config, self._on_packed, self._cancelled.is_set)
            self.front.set_result(front)
        except BaseException as error:
            self.front.set_exception(error)

    def _on_packed(self) -> None:
        for worker in self.workers:
            worker.start(self.worker_config)
        self.packed.set_result(None)

    def cancel_front(self) -> None:
        """Nobody wants the front any more: packing, which may take minutes, ends early."""
        self._cancelled.set()

    def cancel(self) -> None:
        """End the workers of a server that will not run, and the loading of its front."""
        self.cancel_front()
        for worker in self.workers:
            worker.discard()
