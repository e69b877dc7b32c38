"""Values, metadata and shapes of GGUF files equal what the gguf package reads, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from support.data import demo_file
from support.tiny_models import build_gguf
from trivet.checkpoint import GGUFCheckpoint
from trivet.models.reference import to_float
from trivet.native.weights import WeightTensor

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]


def _assert_same_tensors(path: Path, only: str = "") -> None:
    checkpoint = GGUFCheckpoint(path)
    reader = gguf.GGUFReader(path)
    assert {t.name for t in reader.tensors} == set(checkpoint.tensors)
    for tensor in reader.tensors:
        info = checkpoint.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.dtype == tensor.tensor_type.name
        assert info.offset == tensor.data_offset
        if only in tensor.name:
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
            got = to_float(checkpoint.read(tensor.name)).reshape(info.shape)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("qtype", TYPES)
def test_tensors_are_read_bit_for_bit(qtype: str, tmp_path: Path) -> None:
    _assert_same_tensors(build_gguf(tmp_path / "m.gguf", "smollm2", qtype=qtype))


@pytest.mark.demo
@pytest.mark.slow
def test_demo_tensors_are_read_bit_for_bit() -> None:
    _assert_same_tensors(demo_file(), only="blk.1")


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0"])
def test_grids_keep_codes_and_scales(qtype: str, tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(build_gguf(tmp_path / "m.gguf", "smollm2", qtype=qtype))
    weight = checkpoint.read("blk.0.ffn_up.weight")
    assert isinstance(weight, WeightTensor)
    assert weight.exact
    assert weight.source == qtype
    assert (
        weight.format.name
        == {
            "Q4_0": "w4a8-g32",
            "Q4_1": "w4a8-g32-min",
            "Q8_0": "w8a8-g32",
        }[qtype]
    )
    assert weight.scales is not None
    assert weight.scales.dtype == np.float16


def test_metadata_equals_the_package(tmp_path: Path) -> None:
    path = build_gguf(tmp_path / "m.gguf", "llama3")
    checkpoint = GGUFCheckpoint(path)
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith("GGUF."):
            continue
        got = checkpoint.metadata[key]
        want = field.contents()
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == want, key


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4000000000,
        "i32": -2000000000,
        "u64": 1 << 60,
        "i64": -(1 << 60),
        "f32": 0.5,
        "f64": 0.1,
        "text": "snow \u2603",
        "yes": True,
    }
    kinds = {
        "u8": writer.add_uint8,
        "i8": writer.add_int8,
        "u16": writer.add_uint16,
        "i16": writer.add_int16,
        "u32": writer.add_uint32,
        "i32": writer.add_int32,
        "u64": writer.add_uint64,
        "i64": writer.add_int64,
        "f32": writer.add_float32,
        "f64": writer.add_float64,
        "text": writer.add_string,
        "yes": writer.add_bool,
    }
    for name, value in values.items():
        kinds[name](name, value)
    writer.add_array("floats", [0.25, 0.5])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFCheckpoint(path).metadata
    assert {name: metadata[name] for name in values} == values
    assert metadata["floats"].tolist() == [0.25, 0.5]
    assert [part.tolist() for part in metadata["nested"]] == [[1, 2], [3]]
