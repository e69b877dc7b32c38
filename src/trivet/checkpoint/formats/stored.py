"""Tensors exactly as a safetensors file holds them, and what every format reader has in common."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.source import (
    SourceTensor,
    TensorInfo,
    bf16_to_float,
    read_span,
    require_finite,
    shown_shape,
)
from trivet.errors import CheckpointError

Float32 = NDArray[np.float32]

# Type in the file -> numpy type that holds its bits; numpy has no bf16 and no fp8.
NUMPY_TYPES: Mapping[str, Any] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8, "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
FLOAT_TYPES = ("F16", "BF16", "F32")
_MAX_PATTERN = 256  # characters of a pattern in a config
_NESTED = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file: its type there, and its bits in the numpy type of `NUMPY_TYPES`."""

    dtype: str
    array: NDArray[Any]

    def __post_init__(self) -> None:
        assert self.array.dtype == NUMPY_TYPES[self.dtype], (self.dtype, self.array.dtype)

    def floats(self) -> NDArray[np.float16] | Float32:
        """The values of a float tensor: F16 as it is, the others exactly as float32."""
        if self.dtype == "BF16":
            return bf16_to_float(self.array)
        if self.dtype == "F8_E8M0":
            exponents = self.array.astype(np.int32) - 127
            powers: Float32 = np.ldexp(np.float32(1), exponents).astype(np.float32)
            return np.where(self.array == 255, np.float32(np.nan), powers).astype(np.float32)
        assert self.dtype in ("F16", "F32"), self.dtype
        return self.array


class StoredTensors:
    """The tensors of a folder by name; every check names file and tensor."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos

    def fail(self, name: str, reason: str) -> CheckpointError:
        """An error about a tensor that is there."""
        return CheckpointError(self.infos[name].path, reason, tensor=name)

    def expect(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int | None], beside: str
    ) -> TensorInfo:
        """The entry of a tensor that must have a type and a shape; None in a shape is any count.

        beside  a tensor that is there and needs this one, named when it is missing
        """
        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(
                self.infos[beside].path, f"is missing; {beside} needs it", tensor=name
            )
        if info.dtype not in dtypes:
            raise self.fail(name, f"has the type {info.dtype}, expected {' or '.join(dtypes)}")
        fits = len(info.shape) == len(shape) and all(
            want is None or want == have for want, have in zip(shape, info.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if count is None else str(count) for count in shape)
            raise self.fail(name, f"has shape {shown_shape(info.shape)}, expected [{wanted}]")
        if 0 in info.shape:
            raise self.fail(name, f"has the empty shape {shown_shape(info.shape)}")
        return info

    def read(self, name: str) -> Stored:
        """The bits of a tensor that `expect` has checked."""
        info = self.infos[name]
        raw = read_span(info.path, info.offset, info.num_bytes)
        return Stored(info.dtype, raw.view(NUMPY_TYPES[info.dtype]).reshape(info.shape))

    def read_floats(self, name: str) -> NDArray[np.float16] | Float32:
        """The values of a scale tensor. Raises CheckpointError: NaN or infinite ones among them."""
        values = self.read(name).floats()
        require_finite(values, self.infos[name].path, name)
        return values


class FormatReader(abc.ABC):
    """A folder's quantized weights under the plain names of the unquantized model.

    tensors  every tensor of the folder, with ``<module>.weight`` instead of a module's stored parts
    types    type names of quantized entries of ``tensors``; a prefix of what reports call the source
    """

    tensors: Mapping[str, TensorInfo]
    types: tuple[str, ...]

    @abc.abstractmethod
    def owns(self, name: str) -> bool:
        """Whether a name of ``tensors`` stands for stored parts."""

    @abc.abstractmethod
    def read(self, name: str) -> SourceTensor:
        """The weight of such a name. Raises CheckpointError: parts that do not fit each other."""


def logical_info(name: str, dtype: str, shape: tuple[int, int], stored: TensorInfo) -> TensorInfo:
    """The entry of a weight that stands for stored parts, ``stored`` the largest of them."""
    return TensorInfo(name, dtype, shape, stored.path, stored.offset, stored.num_bytes)


class Settings:
    """Typed access to a quantization config; complaints name file, key, value and what is allowed."""

    def __init__(self, path: Path, values: Mapping[str, Any], where: str) -> None:
        self.path = path
        self.values = values
        self.where = where

    def fail(self, key: str, allowed: str) -> CheckpointError:
        """An error about the value of a key."""
        shown = repr(self.values.get(key))
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return CheckpointError(self.path, f"{self.where}: {key} is {shown}; expected {allowed}")

    def choice(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value out of a list; absent or null is the default."""
        value = self.values.get(key)
        if value is None:
            value = default
        same = [a for a in allowed if type(a) is type(value) and a == value]
        if not same:
            shown = ", ".join("null" if a is None else str(a) for a in allowed)
            raise self.fail(key, f"one of {shown}")
        return same[0]

    def count(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in a range."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def names(self, key: str) -> list[str]:
        """A list of texts; absent or null is empty."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of names")
        return value

    def section(self, key: str, value: Any) -> Settings:
        """A nested object as settings of its own."""
        if not isinstance(value, dict):
            raise CheckpointError(self.path, f"{self.where}: {key} is not an object")
        return Settings(self.path, value, f"{self.where}.{key}")

    def pattern(self, text: str) -> re.Pattern[str]:
        """A pattern of the config, compiled; one that may take forever is refused."""
        if len(text) > _MAX_PATTERN or _NESTED.search(text):
            raise CheckpointError(
                self.path, f"{self.where}: the pattern {text!r:.60} is too complex"
            )
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError):
            raise CheckpointError(
                self.path, f"{self.where}: the pattern {text!r:.60} is not valid"
            ) from None
