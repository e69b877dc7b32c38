"""FP8 e4m3 weights (`trivet.native.e4m3`), and folders of the Hugging Face fp8 kind.

A weight is value * scale with one scale for the tensor, for each output row, or for each block
of 128 x 128 (edge blocks may be partial). Per linear [out, in]:

    weight            F8_E4M3 [out, in]
    weight_scale_inv  [ceil(out / 128), ceil(in / 128)]. The name is historical: it multiplies
    weight_scale      one scale, or [out, 1]
    input_scale       static activations; not used here, activations are scaled as they come

Written are these names, which are vLLM's; read is either name with any of the shapes. transformers has
one scale under ``weight_scale_inv`` too, and none a row. Source: OCP 8-bit floating point, vLLM 0.32
``fp8.py``, transformers 5.24 ``FineGrainedFP8``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.grid import ENGINE_GROUPS
from trivet.checkpoint.formats.stored import (
    FLOAT_TYPES,
    FormatReader,
    Settings,
    Stored,
    StoredTensors,
)
from trivet.checkpoint.source import FloatMatrix, SourceTensor, TensorInfo
from trivet.config import Scheme, WeightFormat
from trivet.errors import CheckpointError, QuantError
from trivet.native.e4m3 import MAX, NAN, decode_values, encode_values
from trivet.native.weights import WeightTensor

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

GRANULARITIES = ("tensor", "channel", "block")
_ENGINE_FORM = WeightFormat(8, 32)
_SCALE_TYPES = (*FLOAT_TYPES, "F8_E8M0")


@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """One linear weight [N out, K in]: e4m3 value * scale.

    codes        uint8 [N, K]
    scales       float32 [ceil(N / block[0]), ceil(K / block[1])]
    block        rows and columns of one scale
    granularity  ``tensor``, ``channel`` (the output row) or ``block``; left empty, it is what block
                 and shape say, and a weight of one block counts as ``tensor``
    """

    codes: UInt8
    scales: Float32
    block: tuple[int, int]
    granularity: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def __post_init__(self) -> None:
        rows, columns = self.block
        n, k = self.codes.shape
        if not self.granularity:
            known = {(n, k): "tensor", (1, k): "channel"}
            object.__setattr__(self, "granularity", known.get(self.block, "block"))
        assert self.granularity in GRANULARITIES, self.granularity
        assert self.codes.dtype == np.uint8, self.codes.dtype
        assert self.scales.dtype == np.float32, self.scales.dtype
        assert self.scales.shape == (-(-n // rows), -(-k // columns)), self.scales.shape

    def values(self) -> Float32:
        """The values the weight stands for, each rounded once to float32, [N, K]."""
        result: Float32 = decode_values(self.codes) * _spread(self.scales, self.block, self.shape)
        return result


def _spread(scales: Float32, block: tuple[int, int], shape: tuple[int, int]) -> Float32:
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def quantize(values: Float32, block: tuple[int, int] | str) -> Fp8Weight:
    """Round float32 [N, K] to e4m3 with the scale that brings each block's largest value to 448.

    block  ``tensor``, ``channel``, or rows and columns
    Raises QuantError: NaN or infinite values.
    """
    n, k = values.shape
    granularity = block if isinstance(block, str) else "block"
    size = {"tensor": (n, k), "channel": (1, k)}[block] if isinstance(block, str) else block
    if not np.isfinite(values).all():
        raise QuantError("NaN or infinite values cannot be rounded to fp8")
    rows, columns = size
    padded = np.zeros((-(-n // rows) * rows, -(-k // columns) * columns), np.float32)
    padded[:n, :k] = np.abs(values)
    largest = padded.reshape(-(-n // rows), rows, -(-k // columns), columns).max(axis=(1, 3))
    scales = (largest / np.float32(MAX)).astype(np.float32)
    scales[scales == 0] = 1.0
    codes = encode_values(values / _spread(scales, size, (n, k)))
    return Fp8Weight(codes, scales, size, granularity)


def encode(weight: Fp8Weight) -> dict[str, Stored]:
    """The stored tensors of a weight, by their suffix, as Hugging Face fp8 names them."""
    codes = Stored("F8_E4M3", weight.codes)
    if weight.granularity == "tensor":
        return {"weight": codes, "weight_scale": Stored("F32", weight.scales.reshape(1))}
    if weight.granularity == "channel":
        return {"weight": codes, "weight_scale": Stored("F32", weight.scales)}
    return {"weight": codes, "weight_scale_inv": Stored("F32", weight.scales)}


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Rows and columns of one scale as a config says; None where it says nothing."""
    value = settings.values.get(key)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(side) is int and 1 <= side <= 1 << 20 for side in value):
        raise settings.fail(key, "two counts or null")
    return value[0], value[1]


def scale_block(
    stored: StoredTensors, name: str, weight: str, block: tuple[int, int] | None
) -> tuple[str, tuple[int, int]]:
    """Granularity, and rows and columns of one scale, from the shapes of weight and scale.

    Raises CheckpointError: a shape or type that is none of tensor, channel and the config's block.
    """
    info = stored.infos[name]
    n, k = stored.infos[weight].shape
    if info.dtype not in _SCALE_TYPES:
        raise stored.fail(name, f"has the type {info.dtype}, expected {' or '.join(_SCALE_TYPES)}")
    if block is not None and info.shape == (-(-n // block[0]), -(-k // block[1])):
        return "block", block
    if info.shape in ((), (1,), (1, 1)):
        return "tensor", (n, k)
    if info.shape in ((n,), (n, 1)):
        return "channel", (1, k)
    wanted = f"[1] or [{n}, 1]"
    if block is not None:
        wanted = f"[{-(-n // block[0])}, {-(-k // block[1])}]"
    raise stored.fail(name, f"has shape {list(info.shape)}, expected {wanted}")


def read_weight(
    stored: StoredTensors, weight: str, scale: str, layout: tuple[str, tuple[int, int]]
) -> Fp8Weight:
    """The weight of a checked module. Raises CheckpointError: NaN among codes or scales.

    layout  what `scale_block` found
    """
    codes = stored.read(weight).array
    if (codes & np.uint8(0x7F) == NAN).any():
        raise stored.fail(weight, "holds NaN or infinite values")
    scales = stored.read_floats(scale).astype(np.float32)
    n, k = codes.shape
    granularity, block = layout
    scales = scales.reshape(-(-n // block[0]), -(-k // block[1]))
    return Fp8Weight(codes, scales, block, granularity)


def to_source(weight: Fp8Weight) -> WeightTensor | FloatMatrix:
    """The weight as the engine's own form, where blocks are whole groups of columns; else floats."""
    kind = weight.granularity
    if kind == "block":
        kind += "x".join(map(str, weight.block))
    (n, k), (rows, columns) = weight.shape, weight.block
    own = None if columns >= k else columns
    group = next((g for g in ENGINE_GROUPS if own is not None and own % g == 0), None)
    if own is not None and group is None:
        note = f"blocks of {own} columns are no multiple of 16"
        return FloatMatrix(weight.values(), _ENGINE_FORM, f"FP8-{kind}", note)
    scales = np.repeat(weight.scales, rows, axis=0)[:n]
    if own is not None and group is not None:
        scales = np.repeat(scales, own // group, axis=1)[:, : -(-k // group)]
    form = WeightFormat(8, group, Scheme.FP8, 16)
    scales = np.ascontiguousarray(scales)
    return WeightTensor(form, weight.codes, scales, exact=True, source=f"FP8-{kind}")


class FP8Reader(FormatReader):
    """A folder of Hugging Face fp8 weights.

    Raises CheckpointError while opening: e5m2 codes, a missing scale, shapes that do not fit.
    """

    types = ("F8_E4M3",)

    def __init__(self, settings: Settings, stored: StoredTensors) -> None:
        self._stored = stored
        settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        settings.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        block = block_size(settings, "weight_block_size")
        self._scales: dict[str, tuple[str, tuple[str, tuple[int, int]]]] = {}
        for name, info in stored.infos.items():
            if info.dtype == "F8_E5M2":
                raise stored.fail(name, "has the type F8_E5M2, which is not supported")
            if info.dtype == "F8_E4M3" and name.endswith(".weight"):
                self._scales[name] = self._scale(name, block)
        if not self._scales:
            raise CheckpointError(
                settings.path, f"{settings.where}: no weight has the type F8_E4M3"
            )
        hidden = {name for name, _ in self._scales.values()}
        hidden |= {name.removesuffix("weight") + "input_scale" for name in self._scales}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in stored.infos.items() if name not in hidden
        }

    def _scale(
        self, weight: str, block: tuple[int, int] | None
    ) -> tuple[str, tuple[str, tuple[int, int]]]:
        stored = self._stored
        stored.expect(weight, ("F8_E4M3",), (None, None), weight)
        names = [weight + suffix for suffix in ("_scale_inv", "_scale")]
        found = [name for name in names if name in stored.infos]
        if len(found) != 1:
            reason = (
                f"is missing; {weight} needs it" if not found else f"is there beside {names[1]}"
            )
            raise CheckpointError(stored.infos[weight].path, reason, tensor=names[0])
        return found[0], scale_block(stored, found[0], weight, block)

    def owns(self, name: str) -> bool:
        """See `FormatReader.owns`."""
        return name in self._scales

    def read(self, name: str) -> SourceTensor:
        """See `FormatReader.read`."""
        scale, layout = self._scales[name]
        return to_source(read_weight(self._stored, name, scale, layout))


def config(weights: Mapping[str, Fp8Weight], unquantized: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder.

    weights      module name -> its weight; all of one granularity
    unquantized  linear modules left as they are
    Raises QuantError: several granularities, which the config cannot say.
    """
    kinds = {
        (w.granularity, w.block if w.granularity == "block" else None) for w in weights.values()
    }
    if len(kinds) != 1:
        shown = ", ".join(sorted(kind if b is None else f"{kind} {b}" for kind, b in kinds))
        raise QuantError(f"fp8 has one granularity for all layers, not {shown}")
    _, block = next(iter(kinds))
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": unquantized or None,
    }
