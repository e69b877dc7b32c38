"""e4m3 bit for bit against torch, and its scales of a tensor, of rows and of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trivet.checkpoint.formats import Fp8Weight
from trivet.checkpoint.formats.fp8 import config, encode, quantize, to_source
from trivet.errors import QuantError
from trivet.models.reference import to_float
from trivet.native.e4m3 import MAX, decode_values, encode_values
from trivet.native.weights import WeightTensor

Float32 = NDArray[np.float32]
CODES = np.arange(256, dtype=np.uint8)


def _torch_values(codes: NDArray[np.uint8]) -> Float32:
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.float32)
    result: Float32 = values.numpy()
    return result


def _torch_codes(values: Float32) -> NDArray[np.uint8]:
    torch = pytest.importorskip("torch")
    limited = torch.from_numpy(values.copy()).clamp(-MAX, MAX)
    codes: NDArray[np.uint8] = limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def test_every_code_means_what_torch_reads() -> None:
    np.testing.assert_array_equal(decode_values(CODES), _torch_values(CODES))
    assert np.nanmax(decode_values(CODES)) == MAX
    assert np.isnan(decode_values(CODES)).sum() == 2


def test_every_value_is_encoded_as_its_code() -> None:
    number = CODES[~np.isnan(decode_values(CODES))]
    np.testing.assert_array_equal(encode_values(decode_values(number)), number)


@pytest.mark.parametrize("upper", [0, 0x4000, 0x8000, 0xC000])
def test_numbers_round_as_torch_rounds(upper: int) -> None:
    """All bf16 numbers, the halfway points and their neighbours: ties go to the even code."""
    bits = np.arange(upper, upper + 0x4000, dtype=np.uint32) << 16
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(encode_values(values), _torch_codes(values))
    near = np.concatenate([(bits | 1).view(np.float32), (bits | 0xFFFF).view(np.float32)])
    near = near[np.isfinite(near)]
    np.testing.assert_array_equal(encode_values(near), _torch_codes(near))


def test_large_and_odd_numbers() -> None:
    values = np.array([448, 449, 464, 1e30, np.inf, -np.inf, 0.0, -0.0, 1e-30], np.float32)
    want = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00, 0x80, 0x00]
    assert encode_values(values).tolist() == want
    assert encode_values(np.array([np.nan], np.float32))[0] & 0x7F == 0x7F


@pytest.mark.parametrize("block", ["tensor", "channel", (128, 128), (16, 32)])
def test_scales_bring_the_largest_value_to_the_top(block: str | tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    values = (rng.standard_normal((200, 300)) * np.exp(rng.standard_normal((200, 1)))).astype(
        np.float32
    )
    weight = quantize(values, block)
    back = weight.values()
    assert np.abs(back - values).max() <= np.abs(values).max() * 2**-4 + 1e-6
    error = np.linalg.norm(back - values) / np.linalg.norm(values)
    assert 0.015 < error < 0.035, error
    # The values are those of the plain definition: one scale for each block, partial at the edges.
    rows, columns = weight.block
    for i, j in [(0, 0), (199, 299), (127, 128), (15, 31)]:
        scale = weight.scales[i // rows, j // columns]
        assert back[i, j] == np.float32(decode_values(weight.codes[i : i + 1, j])[0] * scale)


def test_finer_scales_err_less() -> None:
    rng = np.random.default_rng(3)
    spread = np.exp(3 * rng.standard_normal((256, 1))) * np.exp(rng.standard_normal((1, 256)))
    values = (rng.standard_normal((256, 256)) * spread).astype(np.float32)
    errors = {
        block: np.abs(quantize(values, block).values() - values).mean()
        for block in ("tensor", "channel")
    }
    assert errors["channel"] < errors["tensor"]


def test_stored_parts_by_granularity() -> None:
    values = np.ones((200, 300), np.float32)
    blocks: dict[str, str | tuple[int, int]] = {"t": "tensor", "c": "channel", "b": (128, 128)}
    shapes = {
        name: {part: s.array.shape for part, s in encode(quantize(values, block)).items()}
        for name, block in blocks.items()
    }
    assert shapes == {
        "t": {"weight": (200, 300), "weight_scale": (1,)},
        "c": {"weight": (200, 300), "weight_scale": (200, 1)},
        "b": {"weight": (200, 300), "weight_scale_inv": (2, 3)},
    }


def test_zero_blocks_and_bad_values() -> None:
    weight = quantize(np.zeros((4, 4), np.float32), "channel")
    assert not weight.values().any()
    with pytest.raises(QuantError, match="NaN"):
        quantize(np.full((2, 2), np.inf, np.float32), "tensor")


@pytest.mark.parametrize(
    ("block", "form"),
    [
        ("tensor", "fp8-row"), ("channel", "fp8-row"), ((32, 32), "fp8-g32"),
        ((128, 128), "fp8-g128"), ((7, 256), "fp8-g128"), ((50, 48), "fp8-g16"),
        ((16, 40), "w8a8-g32"),
    ],
)  # fmt: skip
def test_the_engine_takes_it_as_it_is(block: str | tuple[int, int], form: str) -> None:
    rng = np.random.default_rng(0)
    weight = quantize(rng.standard_normal((130, 300)).astype(np.float32), block)
    source = to_source(weight)
    assert isinstance(source, WeightTensor) == form.startswith("fp8")
    assert source.format.name == form
    assert source.source.startswith("FP8-")
    np.testing.assert_array_equal(to_float(source), weight.values())


def test_the_config_has_one_granularity() -> None:
    weight = Fp8Weight(np.zeros((8, 8), np.uint8), np.ones((1, 1), np.float32), (8, 8))
    assert config({"a": weight}, ["lm_head"])["weight_block_size"] is None
    assert config({"a": quantize(np.eye(200, dtype=np.float32), (128, 128))}, [])[
        "weight_block_size"
    ] == [128, 128]
    with pytest.raises(QuantError, match="channel, tensor"):
        config({"a": weight, "b": quantize(np.eye(8, dtype=np.float32), "channel")}, [])
