"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trivet import files
from trivet.errors import CheckpointError


def test_a_file_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    files.write(path, "old")
    files.write(path, b"n\xc3\xa9w")
    assert path.read_text("utf-8") == "n\u00e9w"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_named_leaves_the_older_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    files.write(path, "old")

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_everything_is_flushed_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    order: list[tuple[str, bool]] = []

    def flush(part: Path) -> None:
        order.append((part.name, path.exists()))

    monkeypatch.setattr(files, "flush", flush)
    with files.new_folder(path) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "a").write_text("a")
        (temporary / "b").write_text("b")
    inside, parent = order[:-1], order[-1]
    assert sorted(inside) == sorted(
        (name, False) for name in ("a", "b", "deep", files.temporary_name(path).name)
    )
    assert parent == (tmp_path.name, True)
    assert (path / "deep" / "a").read_text() == "a"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_that_fails_is_not_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "sub" / "model"

    def write() -> None:
        with files.new_folder(path) as temporary:
            (temporary / "a").write_text("a")
            raise error

    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        write()
    assert not list((tmp_path / "sub").iterdir())


def test_a_failure_is_one_line_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    path = tmp_path / "plain" / "model"
    expected = pytest.raises(CheckpointError, match=r"model: cannot be written: File exists$")
    with expected, files.new_file(path):
        raise AssertionError("there is no place to write to")


def test_a_model_is_never_overwritten(tmp_path: Path) -> None:
    for name, new in (("file", files.new_file), ("folder", files.new_folder)):
        path = tmp_path / name
        path.write_text("kept")
        with pytest.raises(CheckpointError, match="never overwritten"), new(path):
            raise AssertionError("nothing may be written")
        assert path.read_text() == "kept"


def test_what_a_process_of_the_same_number_left_is_not_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "model"
    left = files.temporary_name(path)
    left.mkdir()
    (left / "half").write_text("half")
    assert list(files.left_behind(path)) == [left]
    with files.new_folder(path) as temporary:
        (temporary / "whole").write_text("whole")
    assert [p.name for p in path.iterdir()] == ["whole"]
    assert not list(files.left_behind(path))


def test_a_text_is_read_as_python_would(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("a\r\nb\rc\u2028\u00e9\n".encode())
    assert files.read_text(path, 100) == path.read_text("utf-8") == "a\nb\nc\u2028\u00e9\n"
    assert files.read_text(path, path.stat().st_size)


def test_what_is_no_text_of_a_bounded_size_is_named(tmp_path: Path, unix_folder: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "long").write_text("0123456789a")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(unix_folder / "socket"))
        for path, reason in (
            (tmp_path / "pipe", "is a pipe; expected a regular file"),
            (Path("/dev/zero"), "is a device"),
            (tmp_path, "is a folder"),
            (unix_folder / "socket", "is a socket"),
            (tmp_path / "absent", "cannot be read: No such file or directory"),
            (tmp_path / "a\0b", "cannot be read"),
            (tmp_path / ("x" * 300), "cannot be read: File name too long"),
            (tmp_path / "latin", "is not UTF-8 text"),
            (tmp_path / "long", "has more than 10 bytes"),
            (Path("/proc/self/environ"), "has more than 10 bytes"),  # its size is told as 0
        ):
            with pytest.raises(CheckpointError, match=reason) as caught:
                files.read_text(path, 10)
            assert "\n" not in str(caught.value)


@pytest.fixture
def unix_folder() -> Iterator[Path]:
    """A folder whose name is short enough for a socket's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)
