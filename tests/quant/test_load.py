"""Packed caches: found, made, made again, and never trusted."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.data import demo_file
from support.tiny_models import VARIANTS, build_folder, build_gguf, weights_of
from trivet.checkpoint import cache as cache_module
from trivet.checkpoint import resolve_model
from trivet.checkpoint.packed import PackedFile, PackedWriter
from trivet.config import own_or_format
from trivet.errors import CheckpointError, ConfigError
from trivet.models import open_model, rope_tables
from trivet.models.reference import to_float
from trivet.native.packing import unpack
from trivet.native.weights import dequantize
from trivet.quant import PackedModel, load_packed
from trivet.quant.load import Target
from trivet.quant.pack import least_bytes
from trivet.sizing import format_bytes

FORMATS = [
    "bf16", "w8a8", "w8a8-g64", "w4a8-g32", "w4a8-g64-zp", "w4a8-g128-min",
    "w8a8-g16-min", "w4a8-g16", "w4a8-row-zp", "w4a16-g64-min", "w4a16-row", "fp8-g128", "fp8-row",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRIVET_CACHE", str(folder))
    return folder


def _values(packed: PackedModel, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return dequantize(unpack(packed.file.weight(name)))


@pytest.mark.parametrize("variant", ["llama3", "llama32", "smollm2", "qwen2", "biases"])
def test_packed_bf16_holds_the_weights(variant: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / variant, variant)
    packed = load_packed(folder, "bf16")
    model = open_model(resolve_model(folder))
    spec = packed.spec
    assert packed.weights_form == "bf16"
    assert all(report.exact for report in packed.report)
    assert ("embed" in packed.tensors) == (not spec.tied_embeddings)
    np.testing.assert_array_equal(
        _values(packed, "head"), to_float(model.matrix("embed" if spec.tied_embeddings else "head"))
    )
    for layer in range(spec.num_layers):
        for name, roles in {"qkv": "q k v", "o": "o", "gate_up": "gate up", "down": "down"}.items():
            full = f"layers.{layer}.{name}"
            want = np.concatenate([to_float(model.matrix(r, layer)) for r in roles.split()])
            np.testing.assert_array_equal(_values(packed, full), want)
            biases = [model.bias(r, layer) for r in roles.split()]
            bias = packed.file.bias(full)
            if biases[0] is None:
                assert bias is None
            else:
                assert bias is not None
                np.testing.assert_array_equal(
                    bias, np.concatenate([b for b in biases if b is not None])
                )
        for role in ("attn_norm", "mlp_norm"):
            got = packed.file.floats(f"layers.{layer}.{role}")[0]
            np.testing.assert_array_equal(got, model.norm(role, layer))
    cos, sin = rope_tables(spec)
    np.testing.assert_array_equal(packed.rope_cos, cos)
    np.testing.assert_array_equal(packed.rope_sin, sin)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_packs_and_is_found_again(name: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "qwen2")
    first = load_packed(folder, name)
    second = load_packed(folder, name)
    assert (first.cache_state, second.cache_state) == ("packed", "hit")
    assert first.numerics_id == second.numerics_id
    second.verify()
    table = "bf16" if name == "bf16" else "int8_group"
    assert second.tensors["head"].kind == second.tensors["embed"].kind == table
    assert all(t.codes % 64 == 0 for t in second.tensors.values())
    for report in second.report:
        assert report.rel_error < 0.15, report
    assert second.tensors["layers.0.qkv"].bias is not None
    total = sum(t.num_bytes for t in second.tensors.values())
    assert second.weight_bytes == total - 2 * second.rope_cos.nbytes


def test_numerics_ids_differ_by_format_and_weights(tmp_path: Path) -> None:
    one = build_folder(tmp_path / "one", "llama3", seed=1)
    two = build_folder(tmp_path / "two", "llama3", seed=2)
    same = build_folder(tmp_path / "same", "llama3", seed=1)
    ids = {load_packed(one, name).numerics_id for name in FORMATS}
    assert len(ids) == len(FORMATS)
    assert load_packed(two, "bf16").numerics_id not in ids
    assert load_packed(same, "bf16").numerics_id == load_packed(one, "bf16").numerics_id


def test_auto_keeps_the_grid_of_the_file(tmp_path: Path) -> None:
    for qtype, form in {
        "Q4_0": "w4a8-g32",
        "Q4_1": "w4a8-g32-min",
        "Q8_0": "w8a8-g32",
        "BF16": "bf16",
    }.items():
        matrices = {"blk": qtype, "output": "Q8_0", "token_embd": "Q8_0"}
        path = build_gguf(tmp_path / f"{qtype}.gguf", "llama3", qtype=matrices)
        packed = load_packed(path)
        assert packed.weights_form == form
        assert all(report.exact for report in packed.report)
        assert packed.notes == ()
        model = open_model(resolve_model(path))
        np.testing.assert_array_equal(
            _values(packed, "layers.1.down"), to_float(model.matrix("down", 1))
        )


def test_auto_turns_floats_into_bf16_and_says_when_that_rounds(tmp_path: Path) -> None:
    exact = load_packed(build_folder(tmp_path / "f32", "llama3"))
    assert exact.weights_form == "bf16"
    assert exact.notes == ()
    folder = build_folder(tmp_path / "f16", "llama3", dtype="F16")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    info = open_model(resolve_model(folder)).checkpoint.tensors["lm_head.weight"]
    raw[info.offset] |= 1  # a bit that bf16 has no room for
    (folder / "model.safetensors").write_bytes(raw)
    rounded = load_packed(folder)
    assert "requantized" in rounded.notes[0]
    assert sum(not report.exact for report in rounded.report) == 1


@pytest.mark.parametrize("own", ["Q4_0", "Q4_1"])
def test_roles_of_several_types_lie_apart_each_as_it_is(own: str, tmp_path: Path) -> None:
    kinds = {"attn_v": "Q8_0", "token_embd": own, "output.": own, "blk": own}
    path = build_gguf(tmp_path / "mixed.gguf", "llama3", qtype=kinds)
    packed = load_packed(path)
    form = "w4a8-g32" if own == "Q4_0" else "w4a8-g32-min"
    assert "layers.0.qkv" not in packed.tensors
    assert [packed.tensors[f"layers.0.{role}"].format for role in "qkv"] == [form, form, "w8a8-g32"]
    assert packed.tensors["layers.0.gate_up"].format == form
    assert packed.tensors["embed"].format == form.replace("w4", "w8")  # it is looked up
    assert packed.tensors["head"].kind == "int4_group"
    assert packed.weights_form == f"{form}+w8a8-g32"
    assert all(report.exact for report in packed.report)
    assert packed.notes == ()
    model = open_model(resolve_model(path))
    for role in "qkv":
        want = to_float(model.matrix(role, 0))
        np.testing.assert_array_equal(_values(packed, f"layers.0.{role}"), want)
    # Asked for one format, they are one weight again.
    fused = load_packed(path, "w8a8-g32").tensors["layers.0.qkv"]
    assert (fused.format, fused.exact) == ("w8a8-g32", own == "Q4_0")


def test_biases_stay_with_roles_that_lie_apart(tmp_path: Path) -> None:
    path = build_gguf(tmp_path / "m.gguf", "qwen2", qtype={"attn_v": "Q8_0", "blk": "Q4_0"})
    packed = load_packed(path)
    model = open_model(resolve_model(path))
    for role in "qkv":
        bias, want = packed.file.bias(f"layers.1.{role}"), model.bias(role, 1)
        assert bias is not None
        assert want is not None
        np.testing.assert_array_equal(bias, want)


@pytest.mark.demo
def test_demo_is_exact_on_its_own_grid() -> None:
    demo_file()
    packed = load_packed("demo")
    assert packed.weights_form == "w4a8-g32-min"
    assert packed.tensors["head"].format == "w8a8-g32"
    assert all(report.exact for report in packed.report)
    assert packed.spec.eos_ids == (2,)
    model = open_model(resolve_model("demo"))
    want = np.concatenate([to_float(model.matrix(r, 7)) for r in ("gate", "up")])
    np.testing.assert_array_equal(_values(packed, "layers.7.gate_up"), want)
    again = load_packed("demo")
    assert again.cache_state == "hit"
    assert again.tokenizer().encode("Hello") == [19556]


def test_a_changed_model_is_packed_again(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3", seed=1)
    before = load_packed(folder)
    shutil.rmtree(folder)
    build_folder(folder, "llama3", seed=2)
    after = load_packed(folder)
    assert after.cache_state == "repacked"
    assert "made again: the model has changed" in after.notes[0]
    assert after.numerics_id != before.numerics_id
    want = weights_of(VARIANTS["llama3"], 2)["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(_values(after, "layers.0.o"), want)
    assert load_packed(folder).cache_state == "hit"


def _damage(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data + b"\0",
        _damage(0, b"X"),
        _damage(8, b"\x63"),
        _damage(12, b"\0\0\0\0"),
        _damage(16, b"\xff" * 8),
        _damage(200, b"X"),
    ],
)
def test_a_damaged_cache_is_packed_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    path = load_packed(folder).path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError):
        PackedFile.open(path)
    again = load_packed(folder)
    assert again.cache_state == "repacked"
    assert "made again" in again.notes[0]
    again.verify()


def _rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the header and make its checksum fit again."""
    import struct
    import zlib

    data = path.read_bytes()
    magic, version, _, length = struct.unpack_from("<8sIIQ", data)
    header = json.loads(data[24 : 24 + length])
    edit(header)
    raw = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(
        struct.pack("<8sIIQ", magic, version, zlib.crc32(raw), length) + raw + data[24 + length :]
    )


HEADER_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "codes outside": lambda h: h["tensors"]["layers.0.o"].update(codes=1 << 40),
    "codes before the data": lambda h: h["tensors"]["layers.0.o"].update(codes=0),
    "codes not aligned": lambda h: h["tensors"]["layers.0.o"].update(codes=4097 * 4096 + 1),
    "codes negative": lambda h: h["tensors"]["layers.0.o"].update(codes=-4096),
    "overlap": lambda h: h["tensors"]["layers.0.o"].update(
        codes=h["tensors"]["layers.1.o"]["codes"]
    ),
    "order outside": lambda h: h["tensors"]["layers.0.o"].update(order=1 << 40),
    "order not a count": lambda h: h["tensors"]["layers.0.o"].update(order=-64),
    "n huge": lambda h: h["tensors"]["layers.0.o"].update(n=1 << 50),
    "n zero": lambda h: h["tensors"]["layers.0.o"].update(n=0),
    "n a string": lambda h: h["tensors"]["layers.0.o"].update(n="64"),
    "n unlike the padding": lambda h: h["tensors"]["layers.0.o"].update(n_padded=32),
    "scales missing": lambda h: h["tensors"]["layers.0.o"].update(scales=None),
    "unknown format": lambda h: h["tensors"]["layers.0.o"].update(format="w3"),
    "kind unlike the format": lambda h: h["tensors"]["layers.0.o"].update(kind="bf16"),
    "unknown field": lambda h: h["tensors"]["layers.0.o"].update(extra=1),
    "another name": lambda h: h["tensors"]["layers.0.o"].update(name="x"),
    "tensors a list": lambda h: h.update(tensors=[]),
    "size": lambda h: h.update(file_size=1),
}


@pytest.mark.parametrize("name", HEADER_EDITS)
def test_a_hostile_header_is_refused(name: str, tmp_path: Path) -> None:
    path = load_packed(build_folder(tmp_path / "model", "llama3"), "w4a8-g32").path
    _rewrite(path, HEADER_EDITS[name])
    with pytest.raises(CheckpointError) as caught:
        PackedFile.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["packer", "contract"])
def test_a_cache_of_another_version_is_packed_again(part: str, tmp_path: Path) -> None:
    """A packer that wrote other bytes, or other numerics, under the same name and file layout."""
    folder = build_folder(tmp_path / "model", "llama3")
    path = load_packed(folder).path
    whole = path.read_bytes()
    _rewrite(path, lambda h: h["key"].update({part: h["key"][part] - 1}))
    PackedFile.open(path)  # sound, but not for us
    again = load_packed(folder)
    assert again.path == path
    assert again.cache_state == "repacked"
    assert "made again: another version of trivet packed it" in again.notes[0]
    assert path.read_bytes() == whole
    assert load_packed(folder).cache_state == "hit"


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h.pop("tokenizer_settings"),
        lambda h: h.update(tokenizer_settings=[1]),
        lambda h: h["tokenizer_settings"].update(extra=1),
        lambda h: h["tokenizer_settings"].pop("eos_ids"),
        lambda h: h.update(tokenizer=[h["tensors"]["layers.0.o"]["codes"], 64]),
        lambda h: h.update(tokenizer=[0, 1 << 50]),
    ],
)
def test_a_hostile_tokenizer_is_refused(
    edit: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    _rewrite(load_packed(folder).path, edit)
    with pytest.raises(CheckpointError) as caught:
        load_packed(folder).tokenizer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["layers.1.down", "head", "rope.cos", "final_norm"])
def test_a_cache_without_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    _rewrite(load_packed(folder).path, lambda h: h["tensors"].pop(name))
    with pytest.raises(CheckpointError, match="missing"):
        load_packed(folder)


def test_damaged_weights_are_found_on_demand(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    packed = load_packed(folder)
    data = bytearray(packed.path.read_bytes())
    data[packed.tensors["layers.1.down"].codes + 5] ^= 1
    packed.path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        load_packed(folder).verify()


def test_the_mapping_is_read_only(tmp_path: Path) -> None:
    packed = load_packed(build_folder(tmp_path / "model", "llama3"))
    assert packed.buffer.readonly
    assert not packed.rope_cos.flags.writeable
    address = np.frombuffer(packed.buffer, np.uint8).ctypes.data
    assert address % 4096 == 0


def test_context_can_be_shortened_only(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    assert load_packed(folder).spec.max_positions == 256
    assert load_packed(folder, max_model_len=100).spec.max_positions == 100
    for length in (0, 257):
        with pytest.raises(ConfigError, match="max_model_len"):
            load_packed(folder, max_model_len=length)


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_packed(
        build_folder(tmp_path / "model", "llama3"), progress=lambda *call: calls.append(call)
    )
    assert [done for _, done, _ in calls] == list(range(1, 11))
    assert {total for _, _, total in calls} == {10}


def test_cache_lies_beside_the_model_or_with_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIVET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = build_folder(tmp_path / "model", "llama3")
    assert load_packed(folder).path.parent == folder / ".trivet"
    file = build_gguf(tmp_path / "files" / "model.gguf", "llama3")
    assert load_packed(file).path.parent == tmp_path / "files" / ".trivet"
    installed = build_gguf(tmp_path / "site-packages" / "p" / "model.gguf", "llama3")
    assert load_packed(installed).path.parent == tmp_path / "user" / "trivet"


def test_a_folder_that_cannot_be_written_uses_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIVET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = build_folder(tmp_path / "model", "llama3")
    (folder / ".trivet").write_text("a file where the folder should be")
    assert load_packed(folder).path.parent == tmp_path / "user" / "trivet"
    shutil.rmtree(tmp_path / "user")
    (tmp_path / "user").write_text("")
    with pytest.raises(CheckpointError, match="TRIVET_CACHE"):
        load_packed(folder)


@pytest.fixture
def two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """A model, the place beside it and the user's."""
    monkeypatch.delenv("TRIVET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = build_folder(tmp_path / "model", "llama3")
    return folder, folder / ".trivet", tmp_path / "user" / "trivet"


def _full(monkeypatch: pytest.MonkeyPatch, *full: Path, says_so: bool) -> None:
    """Disks under these folders have no room; says_so: and the system knows it beforehand."""

    def free(folder: Path) -> int:
        return 5 << 10 if says_so and folder in full else 1 << 40

    real = PackedWriter.blob

    def blob(writer: PackedWriter, data: Any, align: int = 64) -> int:
        if writer.path.parent in full and len(writer.tensors) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(writer, data, align)

    monkeypatch.setattr(cache_module, "free_bytes", free)
    monkeypatch.setattr(PackedWriter, "blob", blob)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_full_disk_uses_the_users_folder_and_says_so_once(
    two_places: tuple[Path, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says_so: bool,
) -> None:
    folder, beside, user = two_places
    _full(monkeypatch, beside, says_so=says_so)
    packed = load_packed(folder)
    assert (packed.path.parent, packed.cache_state) == (user, "packed")
    packed.verify()
    [line] = [record.getMessage() for record in caplog.records]
    assert str(beside) in line
    assert f"goes to {user}" in line
    assert ("5 KiB free" if says_so else "No space left on device") in line
    again = load_packed(folder)
    assert (again.path, again.cache_state) == (packed.path, "hit")
    assert len(caplog.records) == 1
    assert not [path for path in beside.iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize("says_so", [True, False])
def test_two_full_disks_are_one_line_with_both(
    two_places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, says_so: bool
) -> None:
    folder, beside, user = two_places
    _full(monkeypatch, beside, user, says_so=says_so)
    with pytest.raises(CheckpointError) as caught:
        load_packed(folder)
    line = str(caught.value)
    why = "5 KiB free" if says_so else "No space left on device"
    assert f"{beside} ({why})" in line
    assert f"{user} ({why})" in line
    needed = format_bytes(least_bytes(open_model(resolve_model(folder)), Target()))
    assert f"at least {needed}" in line
    assert "TRIVET_CACHE" in line
    assert "\n" not in line


def test_another_failure_of_a_disk_is_not_tried_elsewhere(
    two_places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    folder, beside, user = two_places
    monkeypatch.setattr(PackedWriter, "blob", fail)
    with pytest.raises(CheckpointError, match="cannot be written: Input/output error"):
        load_packed(folder)
    assert beside.exists()
    assert not user.exists()


@pytest.mark.parametrize("weights", ["auto", "stored", *FORMATS])
@pytest.mark.parametrize("name", ["llama3", "tied.gguf", "float_head.gguf"])
def test_a_cache_takes_at_least_what_was_foreseen(name: str, weights: str, tmp_path: Path) -> None:
    if name == "llama3":
        path = build_folder(tmp_path / "model", name)
    else:
        table = "F16" if name.startswith("float") else "Q8_0"
        path = build_gguf(tmp_path / name, "smollm2", qtype={"token_embd": table, "blk": "Q4_0"})
    target = Target(own_or_format(weights), keeps_tables=weights == "stored")
    foreseen = least_bytes(open_model(resolve_model(path)), target)
    tensors = load_packed(path, weights).tensors.values()
    size = sum(tensor.num_bytes for tensor in tensors)
    assert 0.6 * size < foreseen <= size


@pytest.mark.parametrize("variant", ["smollm2", "llama3"])
def test_floats_beside_quantized_layers_run_in_8_bits_unless_asked(
    variant: str, tmp_path: Path
) -> None:
    path = build_gguf(
        tmp_path / "a.gguf", variant, qtype={"token_embd": "F16", "output": "F16", "blk": "Q4_0"}
    )
    auto, stored = load_packed(path), load_packed(path, "stored")
    tables = [name for name in ("head", "embed") if name in auto.tensors]
    assert len(tables) == (1 if auto.spec.tied_embeddings else 2)
    for name in tables:
        assert auto.tensors[name].format == "w8a8-g32"
        assert "--weights stored" in auto.tensors[name].note
        assert stored.tensors[name].format == "bf16"
    assert stored.weights_form == auto.weights_form
    assert stored.numerics_id != auto.numerics_id
    assert "requantized (worst: " in auto.notes[0]


def test_a_file_of_floats_keeps_its_tables(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", VARIANTS["llama3"])
    auto, stored = load_packed(folder), load_packed(folder, "stored")
    assert auto.tensors["head"].format == auto.tensors["embed"].format == "bf16"
    assert stored.numerics_id == auto.numerics_id


def test_cache_variable_must_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="TRIVET_CACHE"):
        load_packed(build_folder(tmp_path / "model", "llama3"))


def test_no_temporary_file_is_left(tmp_path: Path, cache: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_packed(folder)
    assert not [p for p in cache.iterdir() if not p.name.endswith(".lock")]


def _load_in_child(folder: str, results: multiprocessing.SimpleQueue[str]) -> None:
    packed = load_packed(folder, "w8a8")
    packed.verify()
    results.put(packed.cache_state)


def test_two_processes_pack_once(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", "llama3")
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    children = [
        context.Process(target=_load_in_child, args=(str(folder), results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    states = sorted(results.get() for _ in children)
    assert states == ["hit", "hit", "packed"]


def test_unknown_formats_name_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights"):
        load_packed(build_folder(tmp_path / "model", "llama3"), "w5a5")


def test_what_is_not_a_model_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("hello")
    for model in (tmp_path / "absent", tmp_path / "empty", tmp_path / "text.gguf", "", "a b/c"):
        with pytest.raises(CheckpointError) as caught:
            load_packed(model)
        assert "\n" not in str(caught.value)
        assert os.fspath(model) in str(caught.value)


def test_an_end_token_outside_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", VARIANTS["llama2"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").unlink(missing_ok=True)
    vocab = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, vocab, 1 << 40]}))
    packed = load_packed(folder)
    assert 3 in packed.spec.eos_ids
    assert max(packed.spec.eos_ids) < vocab
    assert packed.file.tokenizer().eos_ids == set(packed.spec.eos_ids)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": vocab}))
    with pytest.raises(CheckpointError, match=f"begins prompts with token {vocab}"):
        load_packed(folder)
