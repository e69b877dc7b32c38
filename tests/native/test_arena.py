"""The KV arena: reference columns, sharing by descriptor, and what is refused."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np
import pytest

from native.tiny_model import Runs, make_model, random_tokens
from trivet.config import KVFormat
from trivet.errors import ConfigError
from trivet.native import Arena, KVGeometry, kv_geometry


def _geometry(kv: KVFormat = KVFormat.BF16) -> KVGeometry:
    return kv_geometry(num_layers=2, num_kv_heads=3, head_dim=8, kv=kv)


def test_pages_are_counted_per_worker() -> None:
    arena = Arena(_geometry(), 8, num_workers=2)
    other = Arena.attach(arena.fd, worker=1)
    arena.add_refs([1, 1, 3])
    other.add_refs([3, 5])
    assert arena.total_refs().tolist() == [0, 2, 0, 2, 0, 1, 0, 0]
    assert other.column(0).tolist() == [0, 2, 0, 1, 0, 0, 0, 0]
    assert other.free_pages().tolist() == [0, 2, 4, 6, 7]
    arena.drop_refs([1])
    with pytest.raises(ValueError, match="page 5 has no reference"):
        arena.drop_refs([5])
    arena.clear_column(1)
    assert arena.total_refs().tolist() == [0, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kv", list(KVFormat))
def test_geometry_travels_with_the_descriptor(kv: KVFormat) -> None:
    arena = Arena(_geometry(kv), 5, num_workers=3, worker=2)
    other = Arena.attach(arena.fd)
    assert other.geometry == arena.geometry == _geometry(kv)
    assert (other.num_pages, other.num_workers, other.worker, arena.worker) == (5, 3, 0, 2)
    assert other.geometry.page_bytes == 2 * 3 * arena.block(0, 0, 0).nbytes


def test_size_is_sealed() -> None:
    arena = Arena(_geometry(), 4)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, arena.file_bytes * 2)
    assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_blocks_do_not_overlap() -> None:
    arena = Arena(_geometry(), 3)
    places = [(layer, head, page) for layer in range(2) for head in range(3) for page in range(3)]
    for value, place in enumerate(places, 1):
        arena.block(*place)[:] = value
    for value, place in enumerate(places, 1):
        assert set(arena.block(*place).tolist()) == {value}
    arena.copy_page(0, 2)
    for layer in range(2):
        for head in range(3):
            assert (arena.block(layer, head, 2) == arena.block(layer, head, 0)).all()
            assert (arena.block(layer, head, 1) != arena.block(layer, head, 0)).all()


def test_a_view_outlives_the_arena_object() -> None:
    arena = Arena(_geometry(), 2)
    view = arena.block(0, 0, 1)
    view[:] = 9
    del arena
    assert set(view.tolist()) == {9}


@pytest.mark.parametrize("num_pages", [0, -1, 2**31 - 1, 2**40])
def test_absurd_sizes_are_refused(num_pages: int) -> None:
    geometry = kv_geometry(num_layers=64, num_kv_heads=64, head_dim=256, kv=KVFormat.BF16)
    with pytest.raises(ConfigError, match="num_pages"):
        Arena(geometry, num_pages)


def test_other_files_are_refused(tmp_path: object) -> None:
    plain = os.memfd_create("plain")
    try:
        os.ftruncate(plain, 8192)
        with pytest.raises(ValueError, match="not a KV arena"):
            Arena.attach(plain)
    finally:
        os.close(plain)
    arena = Arena(_geometry(), 2)
    with pytest.raises(ValueError, match="worker"):
        Arena.attach(arena.fd, worker=1)


@pytest.mark.parametrize("page", [-1, 4])
def test_pages_that_do_not_exist_are_refused(page: int) -> None:
    arena = Arena(_geometry(), 4)
    for call in (arena.add_refs, arena.drop_refs):
        with pytest.raises(ValueError, match="does not exist"):
            call([page])
    with pytest.raises(ValueError, match="does not exist"):
        arena.copy_page(0, page)
    assert arena.total_refs().sum() == 0


def _other_worker(connection: Connection) -> None:
    """A worker process: attaches, reads the first worker's KV and decodes one token from it."""
    fd = recv_handle(connection)
    tables, token, length = connection.recv()
    runs = Runs(make_model("bf16")[0])
    runs.arena = Arena.attach(fd, worker=1)
    os.close(fd)
    runs.tables, runs.lengths = tables, [length]
    runs.arena.add_refs(tables[0].tolist())
    connection.send(runs.step([(0, token)]))
    connection.recv()


def test_another_process_continues_from_the_same_pages() -> None:
    tokens = random_tokens(20)
    runs = Runs(make_model("bf16")[0])
    runs.arena = Arena(runs.model.kv_geometry(), runs.arena.num_pages, num_workers=2)
    runs.step([(0, tokens[:19])])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other_worker, args=(theirs,))
    process.start()
    try:
        assert process.pid is not None
        send_handle(ours, runs.arena.fd, process.pid)
        ours.send((runs.tables, tokens[19:], 19))
        assert ours.poll(60), "the other worker gave no answer"
        got = ours.recv()
        np.testing.assert_array_equal(got, runs.step([(0, tokens[19:])]))
        assert runs.arena.column(1).sum() == runs.tables.size
        assert runs.arena.progress(1) == (1, 2)
        process.kill()
        process.join(30)
        runs.arena.clear_column(1)
        assert runs.arena.total_refs().sum() == 0
    finally:
        process.kill()
        process.join(30)
        ours.close()
        theirs.close()
