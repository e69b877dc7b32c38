"""GPTQ checkpoints: codes packed along the input, zero points along the output, scales in fp16.

Per linear [out, in], G = ceil(in / group_size), tensors beside an optional bias:

    qweight int32 [in * bits / 32, out]    codes of one column of outputs, a dense bit stream down
    qzeros  int32 [G, out * bits / 32]     zero points of one group, a dense bit stream across
    scales  fp16  [G, out]
    g_idx   int32 [in]                     the group of each input

Version 1 (``gptq``) stores zero - 1 modulo 2^bits in every field, version 2 (``gptq_v2``) the zero
itself. Files lie about which they are, so the values decide: on the right grid codes minus zeros have
a mean near 0, on the other one near 1 or -1. Source: AutoGPTQ and GPTQModel, as their readers behave.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats.bits import dense_words, pack_dense, unpack_dense
from trivet.checkpoint.formats.grid import CodeGrid, normalized, num_groups, to_source
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

BITS = (2, 3, 4, 8)
_PARTS = ("qzeros", "scales", "g_idx")
_NEAR, _FAR = 0.35, 0.65  # |mean(code - zero)| of the right and of the wrong version
_SAMPLE = 16  # modules that decide the version of a folder


class Version(enum.Enum):
    """Which zero points a file stores."""

    V1 = "gptq"
    V2 = "gptq_v2"


def encode(grid: CodeGrid, version: Version) -> dict[str, Stored]:
    """The stored tensors of a grid, by their suffix.

    Raises QuantError: bits or sizes that the layout cannot hold; scales that are no fp16 numbers; in
    version 1 a zero point of 0, which would wrap and which readers get wrong.
    """
    out, k = grid.shape
    if grid.bits not in BITS:
        raise QuantError(f"{grid.bits} bits have no GPTQ form; expected 2, 3, 4 or 8")
    if k * grid.bits % 32 or out * grid.bits % 32:
        raise QuantError(
            f"[{out}, {k}] at {grid.bits} bits does not fill 32-bit words, which GPTQ needs"
        )
    zeros = grid.zeros
    if zeros is None:
        zeros = np.full(grid.scales.shape, grid.middle, np.uint8)
    if version is Version.V1:
        if not zeros.all():
            raise QuantError(
                "a zero point is 0, which version 1 cannot store; expected 1 and above, or gptq_v2"
            )
        zeros = zeros - np.uint8(1)
    return {
        "qweight": Stored("I32", np.ascontiguousarray(pack_dense(grid.codes, grid.bits).T)),
        "qzeros": Stored("I32", pack_dense(np.ascontiguousarray(zeros.T), grid.bits)),
        "scales": Stored("F16", np.ascontiguousarray(half_scales(grid).T)),
        "g_idx": Stored("I32", grid.column_groups().astype(np.int32)),
    }


def half_scales(grid: CodeGrid) -> NDArray[np.float16]:
    """The scales in fp16. Raises QuantError when that changes one: it belongs to other codes."""
    with np.errstate(over="ignore"):
        half = grid.scales.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), grid.scales.astype(np.float32)):
        raise QuantError("a scale is no fp16 number, as this format needs; round scales first")
    return half


def decode(
    parts: Mapping[str, Stored], bits: int, group_size: int | None, version: Version
) -> CodeGrid:
    """The grid of stored tensors whose shapes fit each other; the inverse of `encode`."""
    return normalized(_with_version(_raw(parts, bits, group_size), version))


def _raw(parts: Mapping[str, Stored], bits: int, group_size: int | None) -> CodeGrid:
    """The grid with zero points as they are stored."""
    scales: Any = parts["scales"].floats()
    groups, out = scales.shape
    k = parts["qweight"].array.shape[0] * 32 // bits
    zeros = unpack_dense(parts["qzeros"].array, bits, out)
    index = parts["g_idx"].array if "g_idx" in parts else None
    assert groups == num_groups(k, group_size), (groups, k, group_size)
    return CodeGrid(
        bits,
        group_size,
        unpack_dense(np.ascontiguousarray(parts["qweight"].array.T), bits, k),
        np.ascontiguousarray(scales.T),
        np.ascontiguousarray(zeros.T),
        index,
    )


def _with_version(raw: CodeGrid, version: Version) -> CodeGrid:
    assert raw.zeros is not None
    if version is Version.V2:
        return raw
    # Per field: a sum over whole words would carry from a field of all ones into the next.
    zeros = raw.zeros + np.uint8(1) & np.uint8((1 << raw.bits) - 1)
    return dataclasses.replace(raw, zeros=zeros)


@dataclasses.dataclass
class Evidence:
    """What the values of some weights say about the version.

    sums, count   of code - zero under each version
    uniform       versions under which some weight is symmetric, every zero point the middle
    """

    count: int = 0
    sums: dict[Version, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(Version, 0.0)
    )
    squares: float = 0.0
    uniform: set[Version] = dataclasses.field(default_factory=set)

    def add(self, raw: CodeGrid) -> None:
        """One weight, its zero points as stored."""
        self.count += raw.codes.size
        total = float(raw.codes.sum(dtype=np.int64))
        sizes = np.bincount(raw.column_groups(), minlength=raw.num_groups)
        for version in Version:
            zeros = _with_version(raw, version).zeros
            assert zeros is not None
            if (zeros == raw.middle).all():
                self.uniform.add(version)
            self.sums[version] += total - float((zeros.astype(np.int64) * sizes).sum())
        wide = raw.codes[: max(1, (1 << 16) // raw.codes.shape[1])].astype(np.float64)
        self.squares += float(wide.var()) * raw.codes.size

    def mean(self, version: Version) -> float:
        """Mean distance of the codes from their zero point, in steps of the grid."""
        return abs(self.sums[version]) / max(self.count, 1)

    @property
    def noise(self) -> float:
        """Standard error of `mean`."""
        return float(np.sqrt(self.squares)) / max(self.count, 1)

    def verdict(self, symmetric: bool) -> Version | None:
        """The version the values prove; None when they prove none.

        symmetric  what the config says: then zero points that all are the middle are proof enough
        """
        alone = next(iter(self.uniform)) if len(self.uniform) == 1 else None
        if symmetric and alone is not None:
            return alone
        near, far = sorted(Version, key=self.mean)
        is_clear = self.mean(near) < _NEAR and self.mean(far) > _FAR
        # Right and wrong are one step apart: a wrong verdict takes a mean of _FAR, four deviations.
        return near if is_clear and 4 * self.noise < _FAR else alone


@dataclasses.dataclass(frozen=True)
class _Module:
    """One quantized linear of the folder."""

    name: str
    bits: int
    group_size: int | None
    parts: tuple[str, ...]
    out: int
    k: int


class GPTQReader(FormatReader):
    """A folder of GPTQ weights.

    Raises CheckpointError while opening: settings or shapes that do not fit, a layout that is not
    read (``pack_dtype`` other than int32, ``gptq_p``, Marlin), zero points that prove no version.
    """

    types = ("GPTQ",)

    def __init__(self, settings: Settings, stored: StoredTensors) -> None:
        self._stored = stored
        settings.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        settings.choice("is_marlin_format", (False,), False)
        settings.choice("pack_dtype", ("int32",), "int32")
        self._symmetric = settings.flag("sym", True)
        self._desc_act = settings.flag("desc_act", False)
        self._modules = {m.name + ".weight": m for m in self._find(settings)}
        if not self._modules:
            raise CheckpointError(settings.path, f"{settings.where}: no tensor ends in .qweight")
        self.tensors = self._logical()
        self.version = self._decide()

    def owns(self, name: str) -> bool:
        """See `FormatReader.owns`."""
        return name in self._modules

    def read(self, name: str) -> SourceTensor:
        """See `FormatReader.read`."""
        module = self._modules[name]
        raw = self._raw(module)
        evidence = Evidence()
        evidence.add(raw)
        verdict = evidence.verdict(self._symmetric)
        if verdict is not None and verdict is not self.version:
            raise self._stored.fail(
                module.name + ".qzeros",
                f"holds zero points of {verdict.value}, unlike the folder's {self.version.value}",
            )
        grid = _with_version(raw, self.version)
        return to_source(grid, f"GPTQ{module.bits}-{_group_name(module.group_size)}")

    def _find(self, settings: Settings) -> Iterator[_Module]:
        rules = _dynamic_rules(settings)
        for name in self._stored.infos:
            if not name.endswith(".qweight"):
                continue
            module = name.removesuffix(".qweight")
            merged = dict(settings.values)
            for pattern, changes in rules:
                if pattern.match(module):
                    merged |= changes
                    break
            own = Settings(settings.path, merged, settings.where)
            yield self._module(module, own.choice("bits", BITS), _group_size(own))

    def _module(self, module: str, bits: int, group_size: int | None) -> _Module:
        stored, weight = self._stored, module + ".qweight"
        rows, out = stored.expect(weight, ("I32",), (None, None), weight).shape
        if rows * 32 % bits or out * bits % 32:
            raise stored.fail(weight, f"has a shape that {bits}-bit codes do not fill")
        k = rows * 32 // bits
        groups = num_groups(k, group_size)
        zeros_shape = (groups, dense_words(out, bits))
        stored.expect(module + ".qzeros", ("I32",), zeros_shape, weight)
        stored.expect(module + ".scales", FLOAT_TYPES, (groups, out), weight)
        parts = ["qweight", "qzeros", "scales"]
        if module + ".g_idx" in stored.infos:
            stored.expect(module + ".g_idx", ("I32",), (k,), weight)
            parts.append("g_idx")
        elif self._desc_act and groups > 1:
            raise CheckpointError(
                stored.infos[weight].path, "is missing; desc_act needs it", module + ".g_idx"
            )
        if module + ".weight" in stored.infos:
            raise stored.fail(module + ".weight", f"is there beside {weight}")
        return _Module(module, bits, group_size, tuple(parts), out, k)

    def _logical(self) -> dict[str, TensorInfo]:
        hidden = {f"{m.name}.{part}" for m in self._modules.values() for part in m.parts}
        tensors = {n: info for n, info in self._stored.infos.items() if n not in hidden}
        for name, m in self._modules.items():
            weight = self._stored.infos[m.name + ".qweight"]
            tensors[name] = logical_info(name, "GPTQ", (m.out, m.k), weight)
        return tensors

    def _decide(self) -> Version:
        """The folder's version, by the values of some modules spread over it."""
        modules = list(self._modules.values())
        evidence = Evidence()
        for module in modules[:: -(-len(modules) // _SAMPLE)]:
            evidence.add(self._raw(module))
        verdict = evidence.verdict(self._symmetric)
        if verdict is None:
            name = modules[0].name + ".qzeros"
            means = " and ".join(f"{evidence.mean(v):.2f} as {v.value}" for v in Version)
            raise self._stored.fail(
                name, f"zero points prove neither version: codes are {means} steps off them"
            )
        return verdict

    def _raw(self, module: _Module) -> CodeGrid:
        stored = self._stored
        parts = {part: stored.read(f"{module.name}.{part}") for part in module.parts}
        stored.read_floats(module.name + ".scales")
        if "g_idx" in parts:
            index, groups = parts["g_idx"].array, num_groups(module.k, module.group_size)
            if index.min() < 0 or index.max() >= groups:
                raise stored.fail(
                    module.name + ".g_idx",
                    f"names groups {index.min()} to {index.max()}, but there are {groups}",
                )
        return _raw(parts, module.bits, module.group_size)


def _group_size(settings: Settings) -> int | None:
    if settings.values.get("group_size") == -1:
        return None
    return settings.count("group_size", 1, 1 << 20)


def _group_name(group_size: int | None) -> str:
    return "row" if group_size is None else f"g{group_size}"


def _dynamic_rules(settings: Settings) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """``dynamic``: patterns of modules with settings of their own, the first match wins."""
    rules: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
    dynamic = settings.values.get("dynamic")
    if dynamic is None:
        return []
    section = settings.section("dynamic", dynamic)
    for text, changes in section.values.items():
        if text.startswith("-:"):
            continue  # not quantized; the tensors say so themselves
        if not isinstance(changes, dict):
            raise section.fail(text, "an object")
        rules.append((section.pattern(text.removeprefix("+:")), changes))
    return rules


def config(
    grids: Mapping[str, CodeGrid],
    unquantized: list[str],
    version: Version,
    extra: Mapping[str, Any],
    creator: str,
) -> dict[str, Any]:
    """The ``quantization_config`` of a folder.

    grids        module name -> its grid; the most frequent kind is the rule, the others exceptions
    unquantized  linear modules left as they are, but for the head
    extra        ``damp_percent``, ``true_sequential``, ``static_groups``, ``mse``: how it was made
    """
    kinds = [(grid.bits, grid.group_size, grid.zeros is None) for grid in grids.values()]
    bits, group_size, sym = max(dict.fromkeys(kinds), key=kinds.count)
    dynamic: dict[str, Any] = {}
    for name, grid in grids.items():
        own = (grid.bits, grid.group_size, grid.zeros is None)
        if own != (bits, group_size, sym):
            dynamic[f"+:^{re.escape(name)}$"] = {
                "bits": grid.bits,
                "group_size": -1 if grid.group_size is None else grid.group_size,
                "sym": grid.zeros is None,
            }
    for name in unquantized:
        dynamic[f"-:^{re.escape(name)}$"] = {}
    result: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": -1 if group_size is None else group_size,
        "desc_act": any(grid.group_index is not None for grid in grids.values()),
        "sym": sym,
        "lm_head": "lm_head" in grids,
        "checkpoint_format": version.value,
        "pack_dtype": "int32",
        "true_sequential": bool(extra.get("true_sequential", False)),
        "static_groups": bool(extra.get("static_groups", False)),
        "meta": {"quantizer": [creator]}
        | {key: extra[key] for key in ("damp_percent", "mse") if key in extra},
    }
    if "damp_percent" in extra:
        result["damp_percent"] = extra["damp_percent"]
    if dynamic:
        result["dynamic"] = dynamic
    return result
