"""compressed-tensors: packed or plain integers, or fp8, with a scheme per group of layers.

Per linear [out, in], b bits, G groups along the input:

    pack-quantized   weight_packed int32 [out, words(in)]  codes + 2^(b-1), packed along the input
                     weight_scale [out, G] ([out, 1] channel, [1] tensor), weight_shape int64 [2]
                     weight_zero_point int32 [words(out), G], packed along the *output*; asymmetric only
                     weight_g_idx int32 [in], act-order only
    int-quantized    weight int8 [out, in], weight_scale, weight_zero_point int8 like the scale;
                     input_scale [1] with static activations
    float-quantized  weight F8_E4M3 [out, in], weight_scale [1], [out, 1] or blocks

words(n) is ceil(n * b / 32) since June 2026 (a dense stream); before, 3, 5, 6 and 7 bits had 32 // b
codes in a word and files of both kinds bear the same name: the width decides. Static int8 activations
(one scale, symmetric) of symmetric int8 rows are kept; other ``input_scale``s and scales of KV caches
are not used: activations are scaled as they come, the KV format is the runtime's.

Rules for activations that the format has no word for stand beside ``quantization_config`` under
`ACTIVATIONS`, where other readers pass over them: ``form``, the engine's form of the int-quantized
linears, and ``outlier_columns``, module name -> columns of its input, the largest first.
Source: compressed-tensors 0.20 (``compressors/``, ``quantization/quant_scheme.py``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.formats import fp8
from trivet.checkpoint.formats.bits import (
    dense_words,
    pack_dense,
    pack_padded,
    padded_words,
    unpack_dense,
    unpack_padded,
)
from trivet.checkpoint.formats.fp8 import Fp8Weight
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
from trivet.config import MAX_OUTLIERS, RowRule, WeightFormat
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.native.weights import WeightTensor

ACTIVATIONS = "trivet_activations"
INT8_ROWS = "CT8-row"  # source type of int-quantized rows
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
FORMATS = (PACKED, INT, FLOAT)
BITS = (2, 3, 4, 5, 6, 7, 8)
_STRATEGIES = ("tensor", "channel", "group", "block")
_WEIGHT_OF = {PACKED: "weight_packed", INT: "weight", FLOAT: "weight"}


def encode(grid: CodeGrid, *, padded: bool = False) -> dict[str, Stored]:
    """The pack-quantized tensors of a grid, by their suffix.

    padded  the layout of before June 2026
    """
    out, k = grid.shape
    pack = pack_padded if padded else pack_dense
    parts = {
        "weight_packed": Stored("I32", pack(grid.codes, grid.bits)),
        "weight_scale": stored_scales(grid.scales),
        "weight_shape": Stored("I64", np.array([out, k], np.int64)),
    }
    if grid.zeros is not None:
        packed = pack(np.ascontiguousarray(grid.zeros.T), grid.bits)
        parts["weight_zero_point"] = Stored("I32", np.ascontiguousarray(packed.T))
    if grid.group_index is not None:
        parts["weight_g_idx"] = Stored("I32", grid.group_index.astype(np.int32))
    return parts


def encode_int8(grid: CodeGrid, input_scale: float | None = None) -> dict[str, Stored]:
    """The int-quantized tensors of an 8-bit grid with one scale per row, by their suffix.

    input_scale  the step of static activations
    Raises QuantError: other bits, groups.
    """
    if grid.bits != 8 or grid.num_groups != 1:
        raise QuantError(
            f"{grid.bits} bits in {grid.num_groups} groups a row are not int-quantized;"
            " expected 8 bits with one scale a row"
        )
    signed = (grid.codes.astype(np.int16) - grid.middle).astype(np.int8)
    parts = {"weight": Stored("I8", signed), "weight_scale": stored_scales(grid.scales)}
    if grid.zeros is not None:
        zeros = (grid.zeros.astype(np.int16) - grid.middle).astype(np.int8)
        parts["weight_zero_point"] = Stored("I8", zeros)
    if input_scale is not None:
        parts["input_scale"] = Stored("F32", np.array([input_scale], np.float32))
    return parts


def encode_fp8(weight: Fp8Weight) -> dict[str, Stored]:
    """The float-quantized tensors of a weight, by their suffix."""
    scales = weight.scales
    if weight.granularity == "tensor":
        scales = scales.reshape(1)
    return {
        "weight": Stored("F8_E4M3", weight.codes),
        "weight_scale": Stored("F32", np.ascontiguousarray(scales)),
    }


def stored_scales(scales: NDArray[np.float16] | NDArray[np.float32]) -> Stored:
    """Scales in the narrowest float type that keeps every one of them."""
    if scales.dtype == np.float16:
        return Stored("F16", np.ascontiguousarray(scales))
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return Stored("BF16", (bits >> 16).astype(np.uint16))
    return Stored("F32", np.ascontiguousarray(scales, np.float32))


def decode(parts: Mapping[str, Stored], bits: int, group_size: int | None) -> CodeGrid:
    """The grid of pack-quantized tensors whose shapes fit each other; the inverse of `encode`."""
    out, k = (int(side) for side in parts["weight_shape"].array)
    packed = parts["weight_packed"].array
    unpack = unpack_padded if is_padded(packed, bits, k) else unpack_dense
    codes = unpack(packed, bits, k)
    scales = _per_row(parts["weight_scale"].floats(), out)
    zeros = None
    if "weight_zero_point" in parts:
        stored = parts["weight_zero_point"]
        if stored.dtype == "I8":  # one for the tensor is not packed
            zeros = (_per_row(stored.array, out) + np.int16(1 << bits - 1)).astype(np.uint8)
        else:
            across = np.ascontiguousarray(stored.array.T)
            zeros = np.ascontiguousarray(unpack(across, bits, out).T)
    index = parts["weight_g_idx"].array if "weight_g_idx" in parts else None
    return normalized(CodeGrid(bits, group_size, codes, scales, zeros, index))


def decode_int8(parts: Mapping[str, Stored], group_size: int | None) -> CodeGrid:
    """The grid of int-quantized tensors; the inverse of `encode_int8`."""
    signed = parts["weight"].array
    out = signed.shape[0]
    zeros = None
    if "weight_zero_point" in parts:
        zeros = (_per_row(parts["weight_zero_point"].array, out) + np.int16(128)).astype(np.uint8)
    codes = (signed.astype(np.int16) + 128).astype(np.uint8)
    scales = _per_row(parts["weight_scale"].floats(), out)
    return normalized(CodeGrid(8, group_size, codes, scales, zeros))


def is_padded(words: NDArray[np.int32], bits: int, count: int) -> bool:
    """Whether packed codes [out, in] are in the layout of before June 2026.

    The width says so; of narrow weights both layouts have one width, then it is the bits at the top
    of each word, which padded words leave empty. Zero points follow their weight.
    """
    if 32 % bits == 0 or words.shape[1] != padded_words(count, bits):
        return False
    if words.shape[1] != dense_words(count, bits):
        return True
    used = 32 // bits * bits
    return not (words.view(np.uint32) >> np.uint32(used)).any()


def _per_row(values: NDArray[Any], out: int) -> NDArray[Any]:
    """Values of a tensor or of rows as [out, G]."""
    if values.size == 1:
        return np.full((out, 1), values.reshape(-1)[0], values.dtype)
    return np.ascontiguousarray(values.reshape(out, -1))


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """One entry of ``config_groups``: how its layers' weights are stored."""

    format: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    has_index: bool
    is_static: bool  # int-quantized: one stored scale for the activations
    targets: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, top_format: Any) -> _Scheme:
        """Raises CheckpointError: a scheme that is not read, by the key that says so."""
        own = Settings(
            settings.path,
            {"format": top_format} | {k: v for k, v in settings.values.items() if v is not None},
            settings.where,
        )
        format = own.choice("format", FORMATS)
        weights = own.section("weights", own.values.get("weights"))
        is_float = format == FLOAT
        weights.choice("type", ("float",) if is_float else ("int",), "int")
        bits = weights.choice("num_bits", (8,) if format != PACKED else BITS, 8)
        strategy = weights.choice("strategy", _STRATEGIES, _default_strategy(weights.values))
        group_size = None
        if strategy == "group" and weights.values.get("group_size") != -1:
            group_size = weights.count("group_size", 1, 1 << 20)
        symmetric = weights.flag("symmetric", True)
        if is_float and not symmetric:
            raise weights.fail("symmetric", "true beside type float")
        if strategy == ("group" if is_float else "block"):
            raise weights.fail("strategy", f"another one for {format}")
        order = weights.values.get("actorder")
        if order not in (None, False, True, "weight", "static", "group", "dynamic"):
            raise weights.fail("actorder", "null, weight, static, group or dynamic")
        return cls(
            format,
            bits,
            symmetric,
            strategy,
            group_size,
            fp8.block_size(weights, "block_structure") if strategy == "block" else None,
            order in (True, "group", "dynamic"),
            format == INT and symmetric and _is_static(own.values.get("input_activations")),
            tuple(own.names("targets")),
        )


def _is_static(activations: Any) -> bool:
    """Whether a scheme says int8 activations with one symmetric scale that is stored."""
    if not isinstance(activations, dict):
        return False
    want = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return all(activations.get(key) in (None, value) for key, value in want.items())


def _default_strategy(weights: Mapping[str, Any]) -> str:
    return "group" if weights.get("group_size") is not None else "tensor"


@dataclasses.dataclass(frozen=True)
class _Module:
    """One quantized linear of the folder."""

    name: str
    scheme: _Scheme
    parts: tuple[str, ...]
    out: int
    k: int
    fp8_layout: tuple[str, tuple[int, int]] | None  # what `fp8.scale_block` found


class CompressedTensorsReader(FormatReader):
    """A folder of compressed-tensors weights.

    Raises CheckpointError while opening: a format, a transform or a sparsity that is not read, a layer
    that no group or more than one kind of group claims, shapes that do not fit.
    """

    types = ("CT",)

    def __init__(self, settings: Settings, stored: StoredTensors, activations: Any = None) -> None:
        """activations: what config.json holds under `ACTIVATIONS`, None where it holds nothing."""
        self._stored = stored
        self._form, self._outliers = _activations(settings, activations)
        self._schemes = _schemes(settings)
        self._modules = {m.name + ".weight": m for m in self._find(settings)}
        if not self._modules:
            raise CheckpointError(
                settings.path,
                f"{settings.where}: no tensor ends in .weight_packed or .weight_scale",
            )
        hidden = {f"{m.name}.{part}" for m in self._modules.values() for part in m.parts}
        suffixes = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale")
        tensors = {
            name: info
            for name, info in stored.infos.items()
            if name not in hidden and not name.endswith(suffixes)
        }
        for name, m in self._modules.items():
            weight = stored.infos[f"{m.name}.{_WEIGHT_OF[m.scheme.format]}"]
            tensors[name] = logical_info(name, "CT", (m.out, m.k), weight)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def owns(self, name: str) -> bool:
        """See `FormatReader.owns`."""
        return name in self._modules

    def read(self, name: str) -> SourceTensor:
        """See `FormatReader.read`."""
        module = self._modules[name]
        scheme, stored = module.scheme, self._stored
        if module.fp8_layout is not None:
            weight, scale = f"{module.name}.weight", f"{module.name}.weight_scale"
            return fp8.to_source(fp8.read_weight(stored, weight, scale, module.fp8_layout))
        parts = {part: stored.read(f"{module.name}.{part}") for part in module.parts}
        stored.read_floats(module.name + ".weight_scale")
        if scheme.format == INT:
            grid = decode_int8(parts, scheme.group_size)
            if grid.zeros is None and (scheme.is_static or self._form is not None):
                return self._rows(module, grid)
        else:
            self._check_shape(module, parts)
            parts = self._checked_index(module, parts)
            grid = decode(parts, scheme.bits, scheme.group_size)
        group = f"g{scheme.group_size}" if scheme.group_size else scheme.strategy
        kind = "row" if group == "channel" else group
        return to_source(grid, f"CT{scheme.bits}-{kind}")

    def _rows(self, module: _Module, grid: CodeGrid) -> WeightTensor:
        """int8 rows with what the folder says of their activations."""
        amax = outliers = None
        wanted = self._form
        if module.scheme.is_static:
            name = module.name + ".input_scale"
            scale = self._stored.read_floats(name).reshape(-1).astype(np.float32)
            amax = np.float32(127) * scale
            if not (amax >= np.finfo(np.float32).tiny).all() or not np.isfinite(amax).all():
                raise self._stored.fail(name, f"is {scale[0]}, expected a number above zero")
            wanted = wanted or WeightFormat(8, rule=RowRule.STATIC)
        weight = self._stored.infos[module.name + ".weight"]
        if module.name in self._outliers:
            outliers = np.array(self._outliers[module.name], np.int32)
            if int(outliers.max()) >= module.k:
                reason = f"has {module.k} columns; {ACTIVATIONS} names the column {outliers.max()}"
                raise CheckpointError(weight.path, reason, module.name)
        elif wanted is not None and wanted.outliers:
            reason = f"is missing in outlier_columns of {ACTIVATIONS}"
            raise CheckpointError(weight.path, reason, module.name)
        form = WeightFormat(8, rule=RowRule.ROW)
        signed = (grid.codes.astype(np.int16) - grid.middle).astype(np.int8)
        return WeightTensor(
            form, signed, grid.scales.astype(np.float32), exact=True, source=INT8_ROWS, amax=amax,
            outliers=outliers, wanted=None if wanted == form else wanted,
        )  # fmt: skip

    def _find(self, settings: Settings) -> Iterator[_Module]:
        match = _matcher(settings, self._schemes)
        for name, info in self._stored.infos.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
            elif name.endswith(".weight_scale"):
                module = name.removesuffix(".weight_scale")
                if module + ".weight_packed" in self._stored.infos:
                    continue
                if module + ".weight" not in self._stored.infos:
                    raise CheckpointError(
                        info.path, f"is missing beside {name}", module + ".weight"
                    )
            else:
                continue
            yield self._module(module, match(module, info))

    def _module(self, module: str, scheme: _Scheme) -> _Module:
        stored, prefix = self._stored, module + "."
        if scheme.format == FLOAT:
            weight, scale = prefix + "weight", prefix + "weight_scale"
            out, k = stored.expect(weight, ("F8_E4M3",), (None, None), scale).shape
            layout = fp8.scale_block(stored, scale, weight, scheme.block)
            return _Module(module, scheme, ("weight", "weight_scale"), out, k, layout)
        if scheme.format == INT:
            weight = prefix + "weight"
            out, k = stored.expect(weight, ("I8",), (None, None), prefix + "weight_scale").shape
            parts = ["weight", "weight_scale"]
        else:
            out, k = self._packed_shape(prefix, scheme)
            weight = prefix + "weight_packed"
            parts = ["weight_packed", "weight_scale", "weight_shape"]
        groups = num_groups(k, scheme.group_size)
        scales = (out, groups)
        if scheme.strategy == "tensor":
            stored.expect(prefix + "weight_scale", FLOAT_TYPES, self._single(prefix), weight)
        else:
            stored.expect(prefix + "weight_scale", FLOAT_TYPES, scales, weight)
        if not scheme.symmetric:
            self._expect_zeros(prefix, scheme, out, k, groups, weight)
            parts.append("weight_zero_point")
        if scheme.is_static:
            stored.expect(
                prefix + "input_scale", FLOAT_TYPES, self._single(prefix, "input_scale"), weight
            )
        if prefix + "weight_g_idx" in stored.infos:
            stored.expect(prefix + "weight_g_idx", ("I32",), (k,), weight)
            parts.append("weight_g_idx")
        elif scheme.has_index and groups > 1:
            raise CheckpointError(
                stored.infos[weight].path, "is missing; actorder needs it", prefix + "weight_g_idx"
            )
        return _Module(module, scheme, tuple(parts), out, k, None)

    def _single(self, prefix: str, suffix: str = "weight_scale") -> tuple[int, ...]:
        info = self._stored.infos.get(prefix + suffix)
        return info.shape if info is not None and info.shape in ((), (1, 1)) else (1,)

    def _expect_zeros(
        self, prefix: str, scheme: _Scheme, out: int, k: int, groups: int, weight: str
    ) -> None:
        name, stored = prefix + "weight_zero_point", self._stored
        if scheme.format == INT or scheme.strategy == "tensor":
            shape = self._single(prefix) if scheme.strategy == "tensor" else (out, groups)
            stored.expect(name, ("I8",), shape, weight)
            return
        words = stored.infos[weight].shape[1]
        layouts = (dense_words, padded_words)
        rows = {
            words_of(out, scheme.bits) for words_of in layouts if words_of(k, scheme.bits) == words
        }
        info = stored.expect(name, ("I32",), (None, groups), weight)
        if info.shape[0] not in rows:
            shown = " or ".join(map(str, sorted(rows)))
            raise stored.fail(name, f"has {info.shape[0]} rows, expected {shown}")

    def _packed_shape(self, prefix: str, scheme: _Scheme) -> tuple[int, int]:
        """[out, in] as weight_shape says, checked against the packed width."""
        stored = self._stored
        weight, shape_name = prefix + "weight_packed", prefix + "weight_shape"
        rows, words = stored.expect(weight, ("I32",), (None, None), weight).shape
        stored.expect(shape_name, ("I64", "I32"), (2,), weight)
        out, k = (int(side) for side in stored.read(shape_name).array)
        if out != rows or k < 1 or k >= 1 << 40:
            raise stored.fail(shape_name, f"says [{out}, {k}], but there are {rows} packed rows")
        widths = {dense_words(k, scheme.bits), padded_words(k, scheme.bits)}
        if words not in widths:
            shown = " or ".join(map(str, sorted(widths)))
            raise stored.fail(
                weight, f"is {words} words wide; {k} codes of {scheme.bits} bits take {shown}"
            )
        return out, k

    def _check_shape(self, module: _Module, parts: Mapping[str, Stored]) -> None:
        said = tuple(int(side) for side in parts["weight_shape"].array)
        if said != (module.out, module.k):
            raise self._stored.fail(module.name + ".weight_shape", "was changed while it was read")

    def _checked_index(self, module: _Module, parts: Mapping[str, Stored]) -> dict[str, Stored]:
        """Without an index that is unset (all -1). Raises CheckpointError: no such group."""
        kept = dict(parts)
        if "weight_g_idx" in parts:
            index, groups = (
                parts["weight_g_idx"].array,
                num_groups(module.k, module.scheme.group_size),
            )
            if (index == -1).all():
                del kept["weight_g_idx"]
            elif index.min() < 0 or index.max() >= groups:
                raise self._stored.fail(
                    module.name + ".weight_g_idx",
                    f"names groups {index.min()} to {index.max()}, but there are {groups}",
                )
        return kept


def _activations(
    settings: Settings, value: Any
) -> tuple[WeightFormat | None, Mapping[str, list[int]]]:
    """What `ACTIVATIONS` says: the form of int-quantized linears, outlier columns by module."""
    if value is None:
        return None, {}
    if not isinstance(value, dict):
        raise CheckpointError(settings.path, f"{ACTIVATIONS} is not an object")
    own = Settings(settings.path, value, ACTIVATIONS)
    try:
        form = WeightFormat.parse(value.get("form") or "")
    except (ConfigError, TypeError):
        form = None
    if form is None or not form.is_row or form.rule is RowRule.STATIC:
        raise own.fail("form", "w8a8, w8a8+row or w8a8[+hadamard64]+outliersM")
    columns = value.get("outlier_columns") or {}
    if not isinstance(columns, dict):
        raise own.fail("outlier_columns", "an object of lists of columns")
    for module, entry in columns.items():
        is_list = isinstance(entry, list) and all(
            type(c) is int and 0 <= c < 1 << 28 for c in entry
        )
        if not is_list or not entry or len(set(entry)) != len(entry) or len(entry) > MAX_OUTLIERS:
            named = own.section("outlier_columns", columns)
            raise named.fail(module, f"1 to {MAX_OUTLIERS} columns, each once")
    return form, columns


def _schemes(settings: Settings) -> list[_Scheme]:
    """The groups of a config. Raises CheckpointError: one that is not read, by its key."""
    top = settings.values.get("format")
    if top not in (None, "mixed-precision", *FORMATS):
        raise settings.fail("format", ", ".join((*FORMATS, "mixed-precision")))
    transform = settings.values.get("transform_config")
    if transform and (not isinstance(transform, dict) or transform.get("config_groups")):
        raise settings.fail("transform_config", "none: transforms at run time are not supported")
    sparsity = settings.values.get("sparsity_config")
    if sparsity and (
        not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense")
    ):
        raise settings.fail("sparsity_config", "none or format dense")
    groups = settings.section("config_groups", settings.values.get("config_groups"))
    if not groups.values:
        raise settings.fail("config_groups", "at least one group")
    own_format = None if top == "mixed-precision" else top
    return [
        _Scheme.of(groups.section(name, value), own_format) for name, value in groups.values.items()
    ]


def _matcher(
    settings: Settings, schemes: Sequence[_Scheme]
) -> Callable[[str, TensorInfo], _Scheme]:
    """Which scheme a quantized module has: one kind needs no targets, of several they decide.

    As in the source, an exact name wins over a pattern and a pattern over the class ``Linear``.
    """
    kinds = {dataclasses.replace(scheme, targets=()) for scheme in schemes}
    if len(kinds) == 1:
        only = schemes[0]
        return lambda module, info: only
    patterns = [
        (settings.pattern(target.removeprefix("re:")), scheme)
        for scheme in schemes
        for target in scheme.targets
        if target.startswith("re:")
    ]

    def match(module: str, info: TensorInfo) -> _Scheme:
        found = [s for s in schemes if module in s.targets]
        found = found or [s for pattern, s in patterns if pattern.match(module)]
        found = found or [s for s in schemes if "Linear" in s.targets]
        if not found:
            raise CheckpointError(
                info.path, "is in none of config_groups by name, pattern or Linear", module
            )
        return found[0]

    return match


def config(
    weights: Mapping[str, CodeGrid | Fp8Weight],
    unquantized: list[str],
    formats: Mapping[str, str],
    static: Container[str] = (),
) -> dict[str, Any]:
    """The ``quantization_config`` of a folder.

    weights      module name -> its weight
    unquantized  linear modules left as they are; the most frequent scheme targets all others
    formats      module name -> one of `FORMATS`
    static       names of int-quantized modules with an input_scale
    """
    kinds: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, weight in weights.items():
        entry = _scheme_of(weight, formats[name], is_static=name in static)
        kinds.setdefault(repr(entry), (entry, []))[1].append(name)
    ordered = sorted(kinds.values(), key=lambda kind: -len(kind[1]))
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if i == 0 else [f"re:^{re.escape(n)}$" for n in names],
            **entry,
        }
        for i, (entry, names) in enumerate(ordered)
    }
    used = {entry["format"] for entry, _ in ordered}
    return {
        "quant_method": "compressed-tensors",
        "format": used.pop() if len(used) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": unquantized,
        "config_groups": groups,
    }


def _scheme_of(weight: CodeGrid | Fp8Weight, format: str, *, is_static: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    activations: dict[str, Any] | None = {
        "num_bits": 8,
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    }
    assert activations is not None
    if isinstance(weight, Fp8Weight):
        is_block = weight.granularity == "block"
        weights |= {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block" if is_block else weight.granularity,
            "group_size": None,
            "block_structure": list(weight.block) if is_block else None,
            "actorder": None,
        }
        activations["type"] = "float"
        if is_block:
            activations |= {"strategy": "group", "group_size": weight.block[1]}
    else:
        has_index = weight.group_index is not None
        weights |= {
            "num_bits": weight.bits,
            "type": "int",
            "symmetric": weight.zeros is None,
            "strategy": "channel" if weight.group_size is None else "group",
            "group_size": weight.group_size,
            "block_structure": None,
            "actorder": "group" if has_index else None,
        }
        activations["type"] = "int"
        if is_static:
            activations |= {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
        if format == PACKED:
            activations = None
    return {
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": format,
    }
