"""Named mixes of ggml types, Q4_K_M and its family: which type each tensor of a model gets.

The rules are llama.cpp's, so that a file of the same name has the same types and size wherever it
was made. Source: llama-quant.cpp (llama_tensor_get_type_impl, tensor_type_fallback). Left out:
architectures and types that are not written here (experts, Falcon, IQ types).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from trivet.checkpoint.ggml.blocks import TYPES
from trivet.errors import ConfigError

# Name -> (type of most tensors, general.file_type).
MIXES: dict[str, tuple[str, int]] = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "Q5_0": ("Q5_0", 8),
    "Q5_1": ("Q5_1", 9),
    "Q8_0": ("Q8_0", 7),
    "Q2_K": ("Q2_K", 10),
    "Q3_K_S": ("Q3_K", 11),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_L": ("Q3_K", 13),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_K_M": ("Q5_K", 17),
    "Q6_K": ("Q6_K", 18),
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
PURE = "pure:"  # prefix: every matrix gets the one type, as far as its width allows

_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What the rules ask about a model. ``is_70b``: Llama with 80 layers and grouped queries."""

    num_layers: int
    queries_per_kv_head: int
    is_70b: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """The type of one tensor. ``wanted`` is what the mix asked for where the width forbids it."""

    kind: str
    wanted: str | None = None


def mix_name(name: str) -> str:
    """The canonical name of a mix: ``q4_k`` is ``Q4_K_M``; ``pure:`` and a type. Raises ConfigError."""
    upper = name.upper()
    if upper.startswith(PURE.upper()):
        kind = upper.removeprefix(PURE.upper())
        if kind in TYPES:
            return PURE + kind
    upper = ALIASES.get(upper, upper)
    if upper not in MIXES:
        raise ConfigError("gguf type", name, f"{', '.join(MIXES)}, or pure:TYPE")
    return upper


def file_type(mix: str) -> int:
    """``general.file_type`` of a mix; a pure file carries the number of the mix nearest to it."""
    kind = mix.removeprefix(PURE)
    same = [number for base, number in MIXES.values() if base == kind]
    return MIXES[mix][1] if mix in MIXES else same[0]


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether mixes apply to a tensor: matrices called weight; norms and vectors stay in float32."""
    return len(shape) >= 2 and name.endswith("weight") and not name.endswith("_norm.weight")


def fitting(kind: str, columns: int) -> Choice:
    """The type itself, or the one that llama.cpp takes when rows do not consist of whole blocks."""
    if columns % TYPES[kind].values == 0:
        return Choice(kind)
    other = _FALLBACK.get(kind, kind)
    if columns % TYPES[other].values:
        other = "F16"
    return Choice(other, kind)


def tensor_types(
    mix: str,
    shapes: Mapping[str, Sequence[int]],
    model: ModelShape,
    *,
    has_importance: bool = False,
    keep: Sequence[tuple[str, str]] = (),
) -> dict[str, Choice]:
    """The type of every tensor of a file, by name.

    mix     a name that `mix_name` returns
    shapes  every tensor of the file, GGUF names, shapes with the row length last
    keep    (regular expression searched in the name, type): the first that matches decides
    Raises ConfigError: a pattern that matches no matrix, or a type that is not known.
    """
    patterns = [(_compiled(pattern, kind), kind.upper()) for pattern, kind in keep]
    matched: set[int] = set()
    chosen: dict[str, Choice] = {}
    for name, shape in shapes.items():
        if not is_matrix(name, shape):
            chosen[name] = Choice("F32")
            continue
        found = [i for i, (pattern, _) in enumerate(patterns) if pattern.search(name)]
        matched.update(found)
        if found:
            wanted = patterns[found[0]][1]
        else:
            wanted = _wanted(mix, name, shape[-1], "output.weight" in shapes, model, has_importance)
        chosen[name] = fitting(wanted, shape[-1])
    for i, (pattern_text, kind) in enumerate(keep):
        if i not in matched:
            allowed = (
                "a pattern that matches a matrix by its GGUF name, such as blk.0.attn_q.weight"
            )
            raise ConfigError("keep", f"{pattern_text}={kind}", allowed)
    return chosen


def _compiled(pattern: str, kind: str) -> re.Pattern[str]:
    if kind.upper() not in TYPES:
        raise ConfigError("keep", f"{pattern}={kind}", ", ".join(TYPES))
    try:
        return re.compile(pattern)
    except re.error as error:
        allowed = f"a regular expression ({error})"
        raise ConfigError("keep", f"{pattern}={kind}", allowed) from None


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _wanted(
    mix: str, name: str, columns: int, has_output: bool, model: ModelShape, has_importance: bool
) -> str:
    if mix.startswith(PURE):
        return mix.removeprefix(PURE)
    base = MIXES[mix][0]
    if base in ("F32", "F16", "BF16"):
        return base
    if name == "output.weight" or (name == "token_embd.weight" and not has_output):
        if columns % TYPES[base].values:
            return "Q8_0"
        return base if base == "Q8_0" else "Q6_K"
    match = _LAYER.match(name)
    if match is None:
        return base
    layer, layers = int(match[1]), model.num_layers
    part = name.removeprefix(match[0]).removesuffix(".weight")
    if part == "attn_v":
        return _value_type(mix, base, layer, model)
    if part == "attn_output":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    if part == "ffn_down":
        return _down_type(mix, base, layer, layers, has_importance)
    return base


def _value_type(mix: str, base: str, layer: int, model: ModelShape) -> str:
    kind = base
    if mix == "Q2_K":
        kind = "Q4_K" if model.queries_per_kv_head >= 4 else "Q3_K"
    elif mix == "Q3_K_M":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (mix == "Q4_K_S" and layer < 4):
        kind = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, model.num_layers):
        kind = "Q6_K"
    return "Q5_K" if model.is_70b and kind in ("Q3_K", "Q4_K") else kind


def _down_type(mix: str, base: str, layer: int, layers: int, has_importance: bool) -> str:
    first_eighth = layer < layers // 8
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix == "Q3_K_L" or (mix == "Q4_K_S" and first_eighth):
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, layers):
        return "Q6_K"
    if mix in ("Q4_0", "Q5_0") and has_importance and first_eighth:
        return "Q4_1" if mix == "Q4_0" else "Q5_1"
    return base
