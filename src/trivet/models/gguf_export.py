"""A model as a GGUF file that llama.cpp loads: from a Hugging Face folder, or from another GGUF file.

`plan_gguf` says which type each tensor gets, how many bytes that is and what falls back, before a
weight is read; `write_gguf` does it, one run of rows at a time. Names, row order, metadata and rope
divisors are llama.cpp's own converter's (conversion/base.py, llama.py, qwen.py). A tensor whose
type does not change is copied bit for bit.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import GGUFCheckpoint, ModelSource, SourceTensor, resolve_model
from trivet.checkpoint.ggml import FLOAT_TYPES, TYPES, decode, encode
from trivet.checkpoint.ggml.imatrix import ImportanceMatrix
from trivet.checkpoint.ggml.mixes import (
    MIXES,
    Choice,
    ModelShape,
    file_type,
    is_matrix,
    mix_name,
    tensor_types,
)
from trivet.checkpoint.gguf_vocab import tokenizer_metadata
from trivet.checkpoint.gguf_write import TensorPlan, gguf_bytes, write_gguf_file
from trivet.errors import CheckpointError, QuantError
from trivet.models.family import GGUF_ROPE_FACTORS
from trivet.models.load import Model, has_bias, matrix_shapes, open_model, take_rows
from trivet.models.reference import to_float
from trivet.models.spec import ModelSpec, RopeSpec, rope_frequencies
from trivet.native.weights import WeightTensor

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Progress = Callable[[str, int, int], None]

OWN = "own"  # instead of a mix: every tensor keeps the type it has
_RUN_VALUES = 1 << 21  # values turned into float32 at once, per thread
_RUN_BYTES = (
    32  # of a run for each value: floats, blocks, and what is read back to measure the error
)


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file to be written.

    source_kind     its type now
    wanted          what the mix asked for where the row length forbids it, else None
    has_importance  whether the importance matrix knows its columns
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    source_kind: str
    wanted: str | None
    has_importance: bool

    @property
    def num_bytes(self) -> int:
        return TensorPlan(self.name, self.kind, self.shape).num_bytes


@dataclasses.dataclass(frozen=True)
class GGUFPlan:
    """What `write_gguf` will write. ``num_bytes`` is the exact size of the file."""

    mix: str
    tensors: tuple[PlannedTensor, ...]
    metadata: dict[str, Any] = dataclasses.field(repr=False)
    num_bytes: int
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Bits per value over all tensors."""
        values = sum(math.prod(tensor.shape) for tensor in self.tensors)
        return 8 * sum(tensor.num_bytes for tensor in self.tensors) / values

    def memory_bytes(self, threads: int) -> int:
        """About what `write_gguf` holds at once: the largest tensor as read, and the runs at work."""
        largest = max(math.prod(tensor.shape) for tensor in self.tensors)
        return 4 * largest + (threads + 1) * _RUN_BYTES * min(_RUN_VALUES, largest)


@dataclasses.dataclass(frozen=True)
class WrittenTensor:
    """What became of a tensor: relative Frobenius error of its values, 0 when they are the same."""

    name: str
    kind: str
    source_kind: str
    num_bytes: int
    rel_error: float
    has_importance: bool


@dataclasses.dataclass(frozen=True)
class WrittenGGUF:
    """A finished file."""

    path: Path
    mix: str
    num_bytes: int
    tensors: tuple[WrittenTensor, ...]
    notes: tuple[str, ...]


Source = Model | ModelSource | str | os.PathLike[str]


def _opened(source: Source) -> Model:
    if isinstance(source, Model):
        return source
    return open_model(source if isinstance(source, ModelSource) else resolve_model(source))


def plan_gguf(
    source: Source,
    type_or_mix: str = OWN,
    imatrix: ImportanceMatrix | None = None,
    keep: Sequence[tuple[str, str]] = (),
    name: str | None = None,
) -> GGUFPlan:
    """Decide types, metadata and size of a GGUF file.

    source       a model, or what `resolve_model` accepts
    type_or_mix  a name of `mixes.MIXES` (``Q4_K_M``), ``pure:TYPE``, or ``own``
    keep         (regular expression searched in the GGUF name, type), before the mix
    name         ``general.name``; None: the file's own, or the folder's
    Raises ConfigError: no such mix, a pattern without a match; CheckpointError: the tokenizer or the
    importance matrix does not fit.
    """
    model = _opened(source)
    mix = OWN if type_or_mix.lower() == OWN else mix_name(type_or_mix)
    tensors = list(_tensors(model))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    notes: list[str] = []
    if mix == OWN:
        chosen = {tensor.name: _own_choice(tensor) for tensor in tensors}
        changed = [name for name, choice in chosen.items() if choice.wanted]
        if changed:
            notes.append(f"{len(changed)} tensors have no type in GGUF and become F32")
        chosen = {name: Choice(choice.kind) for name, choice in chosen.items()}
    else:
        spec = model.spec
        shape = ModelShape(
            spec.num_layers,
            spec.num_heads // spec.num_kv_heads,
            spec.family == "llama"
            and spec.num_layers == 80
            and spec.num_heads != spec.num_kv_heads,
        )
        chosen = tensor_types(mix, shapes, shape, has_importance=imatrix is not None, keep=keep)
    planned = [
        PlannedTensor(
            tensor.name,
            chosen[tensor.name].kind,
            tensor.shape,
            tensor.source_kind,
            chosen[tensor.name].wanted,
            imatrix is not None
            and is_matrix(tensor.name, tensor.shape)
            and imatrix.mean(tensor.name, tensor.shape[-1]) is not None,
        )
        for tensor in tensors
    ]
    notes += _fallback_notes(planned, imatrix)
    metadata, more = _metadata(model, mix, planned, imatrix, name)
    notes += more
    size = gguf_bytes(metadata, [TensorPlan(t.name, t.kind, t.shape) for t in planned])
    return GGUFPlan(mix, tuple(planned), metadata, size, tuple(notes))


def _fallback_notes(
    planned: Sequence[PlannedTensor], imatrix: ImportanceMatrix | None
) -> Iterator[str]:
    moved = Counter((t.wanted, t.kind) for t in planned if t.wanted is not None)
    for (wanted, kind), count in sorted(moved.items()):
        yield f"{count} tensors are {kind} instead of {wanted}: their width is not a multiple of 256"
    if imatrix is not None:
        without = [
            t.name
            for t in planned
            if not t.has_importance
            and TYPES[t.kind].values > 1
            and t.kind != "Q8_0"
            and t.source_kind != t.kind
        ]
        if without:
            yield (
                f"{len(without)} quantized tensors have no importance ({', '.join(without[:3])}"
                f"{', ...' if len(without) > 3 else ''})"
            )


# --- tensors -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of the file and how it is read. ``role`` None: the rope divisors."""

    name: str
    shape: tuple[int, ...]
    source_kind: str
    role: str | None
    layer: int = 0


def _tensors(model: Model) -> Iterator[_Tensor]:
    """All tensors in llama.cpp's order: tables, then layer by layer, divisors last."""
    spec, names = model.spec, model.family.gguf_names
    table = (spec.vocab_size, spec.hidden_size)

    def one(role: str, layer: int, shape: tuple[int, ...]) -> _Tensor:
        kind = model.checkpoint.info(model.file_name(role, layer)).dtype
        return _Tensor(names[role].format(i=layer), shape, kind, role, layer)

    if not spec.tied_embeddings:
        yield one("head", 0, table)
    yield one("embed", 0, table)
    yield one("final_norm", 0, (spec.hidden_size,))
    for layer in range(spec.num_layers):
        yield one("attn_norm", layer, (spec.hidden_size,))
        for role, shape in matrix_shapes(spec).items():
            weight = one(role, layer, shape)
            yield weight
            if has_bias(spec, role):
                bias = weight.name.removesuffix("weight") + "bias"
                yield _Tensor(bias, shape[:1], "F32", f"{role}.bias", layer)
        yield one("mlp_norm", layer, (spec.hidden_size,))
    if spec.rope.scaling in ("llama3", "factors"):
        yield _Tensor(GGUF_ROPE_FACTORS, (spec.head_dim // 2,), "F32", None)


def _own_choice(tensor: _Tensor) -> Choice:
    """The type a tensor has, where GGUF knows it and it is a matrix."""
    if not is_matrix(tensor.name, tensor.shape):
        return Choice("F32")
    if tensor.source_kind in TYPES:
        return Choice(tensor.source_kind)
    return Choice("F32", tensor.source_kind)


def rope_divisors(spec: ModelSpec) -> Float32:
    """What ``rope_freqs.weight`` holds, float32 [head_dim / 2]."""
    scaled, _ = rope_frequencies(spec.rope, spec.head_dim)
    plain, _ = rope_frequencies(RopeSpec(spec.rope.theta), spec.head_dim)
    return (plain / scaled).astype(np.float32)


def _gguf_rows(model: Model, role: str) -> NDArray[np.intp] | None:
    """Order in which GGUF stores the rows of q and k for interleaved rotation; None: as they are."""
    if role.removesuffix(".bias") not in ("q", "k") or not model.family.gguf_permuted:
        return None
    half = model.spec.head_dim // 2
    heads = model.spec.num_heads if role.startswith("q") else model.spec.num_kv_heads
    halves = np.arange(heads * 2 * half).reshape(heads, 2, half)
    return halves.swapaxes(1, 2).reshape(-1)


def _vector(model: Model, tensor: _Tensor) -> Float32:
    role = tensor.role
    if role is None:
        return rope_divisors(model.spec)
    if role.endswith("_norm"):
        return model.norm(role, tensor.layer)
    bias = model.bias(role.removesuffix(".bias"), tensor.layer)
    assert bias is not None, tensor.name
    order = _gguf_rows(model, role)
    return bias if order is None else bias[order]


# --- metadata ------------------------------------------------------------------------------------


def _metadata(
    model: Model,
    mix: str,
    planned: Sequence[PlannedTensor],
    imatrix: ImportanceMatrix | None,
    name: str | None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    number = file_type(mix) if mix != OWN else _own_file_type(planned)
    closing: dict[str, Any] = {"general.quantization_version": 2, "general.file_type": number}
    if imatrix is not None:
        closing |= {
            "quantize.imatrix.dataset": ", ".join(imatrix.datasets),
            "quantize.imatrix.entries_count": len(imatrix.entries),
            "quantize.imatrix.chunks_count": imatrix.chunk_count,
        }
    if isinstance(model.checkpoint, GGUFCheckpoint):
        kept = {k: v for k, v in model.checkpoint.metadata.items() if k not in closing}
        for key in [k for k in kept if k.startswith(("split.", "quantize.imatrix."))]:
            del kept[key]
        kept.pop("general.alignment", None)
        if name is not None:
            kept["general.name"] = name
        return kept | closing, ()
    spec, path = model.spec, model.checkpoint.path
    arch = model.family.gguf
    tokenizer, notes = tokenizer_metadata(
        model.tokenizer_data(), spec.vocab_size, path / "tokenizer.json"
    )
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": name if name is not None else path.resolve().name,
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.context_length": _context(model),
        f"{arch}.embedding_length": spec.hidden_size,
        f"{arch}.feed_forward_length": spec.ffn_size,
        f"{arch}.attention.head_count": spec.num_heads,
        f"{arch}.attention.head_count_kv": spec.num_kv_heads,
        f"{arch}.attention.key_length": spec.head_dim,
        f"{arch}.attention.value_length": spec.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        f"{arch}.rope.dimension_count": spec.head_dim,
        f"{arch}.rope.freq_base": float(spec.rope.theta),
        f"{arch}.vocab_size": spec.vocab_size,
        **{f"{arch}.rope.scaling.{k}": v for k, v in _rope_scaling(spec.rope).items()},
        **tokenizer,
    }
    return metadata | closing, notes


def _context(model: Model) -> int:
    """The model's context as its config says it, not as this engine caps it."""
    value = model.checkpoint.metadata.get("max_position_embeddings")
    return value if isinstance(value, int) else model.spec.max_positions


def _rope_scaling(rope: RopeSpec) -> dict[str, Any]:
    if rope.scaling == "linear":
        return {"type": "linear", "factor": rope.factor}
    if rope.scaling != "yarn":
        return {}
    own = max(0.1 * math.log(rope.factor) + 1.0, 1.0)  # llama.cpp's, which attn_factor multiplies
    scaling = {
        "type": "yarn",
        "factor": rope.factor,
        "original_context_length": rope.original_positions,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
    }
    return scaling | (
        {} if rope.attention_factor == own else {"attn_factor": rope.attention_factor / own}
    )


def _own_file_type(planned: Sequence[PlannedTensor]) -> int:
    """The number of the mix whose base type most values have."""
    values: Counter[str] = Counter()
    for tensor in planned:
        if is_matrix(tensor.name, tensor.shape):
            values[tensor.kind] += math.prod(tensor.shape)
    kind = values.most_common(1)[0][0]
    return next(number for base, number in MIXES.values() if base == kind)


# --- writing -------------------------------------------------------------------------------------


def write_gguf(
    path: str | os.PathLike[str],
    source: Source,
    type_or_mix: str = OWN,
    imatrix: ImportanceMatrix | None = None,
    progress: Progress | None = None,
    *,
    keep: Sequence[tuple[str, str]] = (),
    name: str | None = None,
    threads: int | None = None,
) -> WrittenGGUF:
    """Write a model as a GGUF file; the bytes do not depend on the number of threads.

    Arguments as for `plan_gguf`. progress is called with (what, bytes done, bytes in all).
    Raises CheckpointError: the file exists, a tensor cannot be read or quantized, the disk is full.
    """
    target = Path(path)
    model = _opened(source)
    plan = plan_gguf(model, type_or_mix, imatrix, keep, name)
    count = threads if threads is not None else min(4, len(os.sched_getaffinity(0)))
    reports: list[WrittenTensor] = []
    pairs = list(zip(_tensors(model), plan.tensors, strict=True))

    def data() -> Iterator[Bytes]:
        done = 0
        with concurrent.futures.ThreadPoolExecutor(count, "trivet-gguf") as pool:
            for tensor, planned in pairs:
                error = norm = 0.0
                for raw, part in _ordered(pool, count, _pieces(model, tensor, planned, imatrix)):
                    error, norm = error + part[0], norm + part[1]
                    done += raw.size
                    yield raw
                    if progress is not None:
                        progress("writing", done, plan.num_bytes)
                rel_error = math.sqrt(error / norm) if norm else 0.0
                reports.append(
                    WrittenTensor(
                        planned.name,
                        planned.kind,
                        planned.source_kind,
                        planned.num_bytes,
                        rel_error,
                        planned.has_importance,
                    )
                )

    pieces = data()
    write_gguf_file(
        target, plan.metadata, [TensorPlan(t.name, t.kind, t.shape) for t in plan.tensors], pieces
    )
    assert next(pieces, None) is None, "the writer took all bytes"  # and the last tensor reports
    size = target.stat().st_size
    assert size == plan.num_bytes, (size, plan.num_bytes)
    return WrittenGGUF(target, plan.mix, size, tuple(reports), plan.notes)


Piece = tuple[Bytes, tuple[float, float]]  # bytes; square sums of the error and of the values


def _ordered(
    pool: concurrent.futures.Executor, count: int, jobs: Iterator[Callable[[], Piece]]
) -> Iterator[Piece]:
    """Run jobs on a pool, a few at a time, results in order."""
    waiting: deque[concurrent.futures.Future[Piece]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _pieces(
    model: Model, tensor: _Tensor, planned: PlannedTensor, imatrix: ImportanceMatrix | None
) -> Iterator[Callable[[], Piece]]:
    """Jobs that give the bytes of a tensor, one run of rows each."""
    if len(tensor.shape) == 1:
        values = _vector(model, tensor)
        yield lambda: (encode("F32", values[None]), (0.0, 0.0))
        return
    assert tensor.role is not None
    checkpoint = model.checkpoint
    if isinstance(checkpoint, GGUFCheckpoint) and planned.kind == planned.source_kind:
        raw = checkpoint.read_bytes(model.file_name(tensor.role, tensor.layer))
        checkpoint.read(model.file_name(tensor.role, tensor.layer))  # refuses NaN
        yield lambda: (raw, (0.0, 0.0))
        return
    source = model.matrix(tensor.role, tensor.layer)
    order = _gguf_rows(model, tensor.role)
    rows, columns = tensor.shape
    importance = imatrix.mean(tensor.name, columns) if imatrix is not None else None
    step = max(1, _RUN_VALUES // columns)

    def job(begin: int, end: int) -> Piece:
        chosen = np.arange(begin, end) if order is None else order[begin:end]
        part: SourceTensor = take_rows(source, chosen)
        if isinstance(part, WeightTensor) and part.format.bits == 16 and planned.kind == "BF16":
            return np.ascontiguousarray(part.codes).view(np.uint8), (0.0, 0.0)
        values = to_float(part)
        try:
            raw = encode(planned.kind, values, importance)
        except QuantError as error:
            raise CheckpointError(checkpoint.path, str(error), tensor=tensor.name) from None
        if planned.kind == "F32" or (
            planned.kind in FLOAT_TYPES and planned.kind == planned.source_kind
        ):
            return raw, (0.0, 0.0)
        change = decode(planned.kind, raw) - values
        return raw, (_square_sum(change), _square_sum(values))

    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        yield functools.partial(job, begin, end)


def _square_sum(values: Float32) -> float:
    return float(np.einsum("ij,ij->i", values, values, dtype=np.float64).sum())
