"""AWQ checkpoints in the GEMM layout: everything packed along the output, nibbles interleaved.

Per linear [out, in] with 4-bit codes and G = in / group_size, tensors beside an optional bias:

    qweight int32 [in, out / 8]    nibble i of a word holds the output 8c + ORDER[i]
    qzeros  int32 [G, out / 8]     the zero points themselves, in the same order
    scales  fp16  [G, out]

W = (code - zero) * scale. The scales of activations are folded into the layer before, so that the
tensors alone are the whole weight. Source: AutoAWQ ``WQLinear_GEMM``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.bits import pack_dense, unpack_dense
from trivet.checkpoint.formats.gptq import half_scales
from trivet.checkpoint.formats.grid import CodeGrid, normalized, to_source
from trivet.checkpoint.formats.stored import (
    FLOAT_TYPES,
    FormatReader,
    Settings,
    Stored,
    StoredTensors,
    logical_info,
)
from trivet.checkpoint.source import SourceTensor, TensorInfo
from trivet.errors import CheckpointError, QuantError

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds column ORDER[i] of its eight
_PLACE = np.argsort(ORDER)  # column j lies in nibble _PLACE[j]


def _interleaved(codes: NDArray[np.uint8], order: Any) -> NDArray[np.uint8]:
    rows, columns = codes.shape
    return np.ascontiguousarray(codes.reshape(rows, columns // 8, 8)[:, :, order]).reshape(
        rows, columns
    )


def encode(grid: CodeGrid) -> dict[str, Stored]:
    """The stored tensors of a grid, by their suffix.

    Raises QuantError: not 4 bits, act-order, an output that is no multiple of 8, an input that is no
    multiple of the group, scales that are no fp16 numbers.
    """
    out, k = grid.shape
    if grid.bits != BITS:
        raise QuantError(f"{grid.bits} bits have no AWQ form; expected 4")
    if grid.group_index is not None:
        raise QuantError("act-order has no AWQ form")
    if out % 8 or k % (grid.group_size or k):
        raise QuantError(
            f"[{out}, {k}] in groups of {grid.group_size} has no AWQ form; expected"
            " an output of a multiple of 8 and an input of whole groups"
        )
    zeros = grid.zeros
    if zeros is None:
        zeros = np.full(grid.scales.shape, grid.middle, np.uint8)
    return {
        "qweight": Stored("I32", pack_dense(_interleaved(grid.codes.T, ORDER), BITS)),
        "qzeros": Stored("I32", pack_dense(_interleaved(zeros.T, ORDER), BITS)),
        "scales": Stored("F16", np.ascontiguousarray(half_scales(grid).T)),
    }


def decode(parts: Mapping[str, Stored], group_size: int | None) -> CodeGrid:
    """The grid of stored tensors whose shapes fit each other; the inverse of `encode`."""
    scales: Any = parts["scales"].floats()
    out = scales.shape[1]

    def codes(part: str) -> NDArray[np.uint8]:
        rows = _interleaved(unpack_dense(parts[part].array, BITS, out), _PLACE)
        return np.ascontiguousarray(rows.T)

    grid = CodeGrid(
        BITS, group_size, codes("qweight"), np.ascontiguousarray(scales.T), codes("qzeros")
    )
    return normalized(grid)


@dataclasses.dataclass(frozen=True)
class _Module:
    """One quantized linear of the folder."""

    name: str
    group_size: int | None
    out: int
    k: int


class AWQReader(FormatReader):
    """A folder of AWQ weights.

    Raises CheckpointError while opening: another layout than GEMM, other bits than 4, no zero points,
    shapes that do not fit.
    """

    types = ("AWQ",)

    def __init__(self, settings: Settings, stored: StoredTensors) -> None:
        self._stored = stored
        values = dict(settings.values)  # quant_config.json of older folders spells two keys its way
        for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
            values.setdefault(new, values.get(old))
        if isinstance(values.get("version"), str):
            values["version"] = values["version"].lower()
        settings = Settings(settings.path, values, settings.where)
        settings.choice("version", ("gemm",), "gemm")
        settings.choice("bits", (BITS,), BITS)
        settings.choice("zero_point", (True,), True)
        group_size = None
        if values.get("group_size") != -1:
            group_size = settings.count("group_size", 1, 1 << 20)
        names = [n.removesuffix(".qweight") for n in stored.infos if n.endswith(".qweight")]
        self._modules = {n + ".weight": self._module(n, group_size) for n in names}
        if not self._modules:
            raise CheckpointError(settings.path, f"{settings.where}: no tensor ends in .qweight")
        self.tensors = self._logical()

    def owns(self, name: str) -> bool:
        """See `FormatReader.owns`."""
        return name in self._modules

    def read(self, name: str) -> SourceTensor:
        """See `FormatReader.read`."""
        module = self._modules[name]
        stored = self._stored
        parts = {p: stored.read(f"{module.name}.{p}") for p in ("qweight", "qzeros", "scales")}
        stored.read_floats(module.name + ".scales")
        group = "row" if module.group_size is None else f"g{module.group_size}"
        return to_source(decode(parts, module.group_size), f"AWQ4-{group}")

    def _module(self, module: str, group_size: int | None) -> _Module:
        stored, weight = self._stored, module + ".qweight"
        k, words = stored.expect(weight, ("I32",), (None, None), weight).shape
        group = group_size or k
        if k % group:
            raise stored.fail(weight, f"has {k} inputs, no multiple of the group {group}")
        stored.expect(module + ".qzeros", ("I32",), (k // group, words), weight)
        stored.expect(module + ".scales", FLOAT_TYPES, (k // group, 8 * words), weight)
        if module + ".weight" in stored.infos:
            raise stored.fail(module + ".weight", f"is there beside {weight}")
        return _Module(module, group_size, 8 * words, k)

    def _logical(self) -> dict[str, TensorInfo]:
        hidden = {
            f"{m.name}.{part}"
            for m in self._modules.values()
            for part in ("qweight", "qzeros", "scales")
        }
        tensors = {n: info for n, info in self._stored.infos.items() if n not in hidden}
        for name, m in self._modules.items():
            weight = self._stored.infos[m.name + ".qweight"]
            tensors[name] = logical_info(name, "AWQ", (m.out, m.k), weight)
        return tensors


def config(grids: Mapping[str, CodeGrid], unquantized: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a folder.

    grids        module name -> its grid; all of one group
    unquantized  linear modules left as they are
    Raises QuantError: several groups, which the config cannot say.
    """
    groups = {grid.group_size for grid in grids.values()}
    if len(groups) != 1:
        shown = ", ".join(sorted(str(group or "row") for group in groups))
        raise QuantError(f"AWQ has one group for all layers, not {shown}")
    return {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": next(iter(groups)) or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": unquantized or None,
    }
