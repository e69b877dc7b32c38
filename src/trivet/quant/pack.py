"""Packing: a model's tensors into the formats and the layout of the packed cache.

Reads one tensor at a time, brings it into its format, fuses what reads the same input and appends it
to the file. What happened to each tensor is kept in the file and reported.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import SourceTensor
from trivet.checkpoint.cache import cache_key
from trivet.checkpoint.packed import PackedFile, PackedTensor, PackedWriter
from trivet.checkpoint.resolve import ModelSource
from trivet.checkpoint.source import FloatMatrix
from trivet.checkpoint.tokenizer import TokenizerData, quick_json
from trivet.config import Scheme, WeightFormat
from trivet.errors import CheckpointError, QuantError
from trivet.models import Model, rope_tables
from trivet.native.packing import (
    LINEARS,
    Layout,
    PackedWeight,
    ScaleType,
    can_concatenate,
    concatenate,
    pack,
)
from trivet.native.weights import WeightTensor, dequantize
from trivet.quant.load import Progress, Target
from trivet.quant.rtn import Converted, convert, frobenius, own_format

_FLOATS = ("F32", "F16", "BF16")
Bias = NDArray[np.float32] | None
TABLE_FORMAT = WeightFormat(8, 32)  # embedding and head of quantized models
_NARROWED = "in 8 bits beside quantized weights; --weights stored keeps its 16"
_ROW_GROUP = 128  # groups of 8 bits that hold what had one scale a row in 4
_WIDENED = {Scheme.SYM: Scheme.SYM, Scheme.ZP: Scheme.SYM, Scheme.MIN: Scheme.MIN}  # 4 bits in 8


def make_cache(
    source: ModelSource,
    model: Model,
    target: Target,
    path: Path,
    key: dict[str, Any],
    progress: Progress | None,
) -> PackedFile:
    """Read, convert and write a model, and map the result.

    source, model  the model, opened
    path           where the cache goes; the caller holds its lock
    key            what `cache_key` gives; stored
    Raises CheckpointError: the model is unsound or changes meanwhile. OSError: the disk is full.
    """
    capacity = (1 << 16) + 1024 * (8 + 9 * model.spec.num_layers)
    with PackedWriter(path, capacity) as writer:
        header = pack_model(model, target, writer, progress)
        data = _within(model.tokenizer_data(), model.spec.vocab_size, source.path)
        raw = quick_json(data.json).encode()
        offset = writer.blob(raw)
        spec = dataclasses.replace(model.spec, bos_id=data.bos_id, eos_ids=data.eos_ids)
        header |= {
            "key": key,
            "spec": spec.to_json(),
            "identity": _source_sha256(source),
            "tokenizer": [offset, len(raw)],
            "tokenizer_settings": data.settings(),
        }
        if cache_key(source, key["weights"]) != key:
            raise CheckpointError(source.path, "was changed while it was read")
        writer.commit(header)
    return PackedFile.open(path)


def least_bytes(model: Model, target: Target) -> int:
    """What a cache takes at least, known before anything is read: matrices and rope tables.

    Of the file's own formats, floats become bf16 or `TABLE_FORMAT` and no grid becomes smaller.
    """
    total = 4 * model.spec.max_positions * model.spec.head_dim
    for job in _jobs(model, target):
        infos = [model.checkpoint.info(model.file_name(role, job.layer)) for role in job.roles]
        form = job.target
        if job.narrows and infos[0].dtype in _FLOATS:
            form = TABLE_FORMAT
        if form is None:
            for info in infos:
                is_float = info.dtype in _FLOATS
                total += 2 * math.prod(info.shape) if is_float else info.num_bytes
            continue
        rows = sum(math.prod(info.shape[:-1]) for info in infos)
        layout = Layout(form, rows, infos[0].shape[-1], ScaleType.F16)
        total += sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.parts.values())
    return total


def _source_sha256(source: ModelSource) -> str:
    digest = hashlib.sha256()
    for path in source.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Job:
    """One packed weight: which roles of which layer are fused into it, and the format asked for.

    target    None: its own
    is_table  rows of it are looked up
    narrows   what has 16 bits of its own becomes 8
    """

    name: str
    roles: tuple[str, ...]
    layer: int
    target: WeightFormat | None
    is_table: bool = False
    narrows: bool = False


def pack_model(
    model: Model, target: Target, writer: PackedWriter, progress: Progress | None
) -> dict[str, Any]:
    """Convert and write all tensors; returns the header's entries ``form``, ``content``, ``notes``.

    Tensors: ``head`` and, unless tied, ``embed``; ``final_norm``; ``rope.cos`` and ``rope.sin``; per
    layer ``attn_norm``, ``qkv``, ``o``, ``mlp_norm``, ``gate_up``, ``down``. q, k, v and gate, up are
    fused along N; where they differ in format or in the order of their columns, ``q``, ``k``, ``v`` or
    ``gate``, ``up`` stand in their place. The table that is looked up (``embed``, or a tied ``head``)
    is bf16 or int8 groups, whatever the rest is.
    """
    spec = model.spec
    jobs = list(_jobs(model, target))
    for done, pieces in enumerate(_converted(model, jobs), 1):
        for piece in pieces:
            weight = piece.converted.weight
            writer.add_weight(
                piece.name,
                piece.packed,
                piece.bias,
                source=weight.source,
                exact=weight.exact,
                rel_error=piece.converted.rel_error,
                note=piece.converted.note,
            )
        if progress is not None:
            progress("packing", done, len(jobs))
    writer.add_floats("final_norm", model.norm("final_norm"))
    for layer in range(spec.num_layers):
        for role in ("attn_norm", "mlp_norm"):
            writer.add_floats(f"layers.{layer}.{role}", model.norm(role, layer))
    cos, sin = rope_tables(spec)
    writer.add_floats("rope.cos", cos)
    writer.add_floats("rope.sin", sin)
    return {
        "form": _form(writer.tensors),
        "content": writer.content_sha256(),
        "notes": _notes(writer.tensors, target),
    }


def _jobs(model: Model, target: Target) -> Iterator[_Job]:
    spec, form = model.spec, target.form
    table = form if form is None or form.bits == 16 else TABLE_FORMAT
    narrows = form is None and not target.keeps_tables and _is_quantized(model)
    tied = spec.tied_embeddings
    yield _Job("head", ("embed" if tied else "head",), 0, table, is_table=tied, narrows=narrows)
    if not tied:
        yield _Job("embed", ("embed",), 0, table, is_table=True, narrows=narrows)
    for layer in range(spec.num_layers):
        for name, roles in LINEARS.items():
            yield _Job(f"layers.{layer}.{name}", roles, layer, form)


def _is_quantized(model: Model) -> bool:
    """Whether most linears of the file are quantized; a few may have been kept in floats."""
    names = [
        model.file_name(role, layer)
        for layer in range(model.spec.num_layers)
        for roles in LINEARS.values()
        for role in roles
    ]
    floats = sum(model.checkpoint.info(name).dtype in _FLOATS for name in names)
    return 2 * floats < len(names)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor of the file, ready to be written. converted: its weight still in row order."""

    name: str
    converted: Converted
    packed: PackedWeight
    bias: Bias


def _converted(model: Model, jobs: list[_Job]) -> Iterator[list[_Piece]]:
    """Jobs done in order by a few threads (numpy releases the GIL), few of them at a time."""
    num_threads = min(4, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(num_threads, "trivet-pack") as pool:
        waiting = deque[concurrent.futures.Future[list[_Piece]]]()
        remaining = iter(jobs)
        try:
            for job in remaining:
                waiting.append(pool.submit(_convert_job, model, job))
                if len(waiting) > num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _convert_job(model: Model, job: _Job) -> list[_Piece]:
    """The tensors of a job: one, or one a role where they cannot be fused as they are."""
    try:
        parts = _one_range([_part(model.matrix(role, job.layer), job) for role in job.roles])
    except QuantError as error:
        name = model.file_name(job.roles[0], job.layer)
        raise CheckpointError(model.checkpoint.path, str(error), tensor=name) from None
    biases: list[Bias] = [None]
    if job.name not in ("head", "embed"):
        biases = [model.bias(role, job.layer) for role in job.roles]
    if can_concatenate([part.weight for part in parts]):
        present = [bias for bias in biases if bias is not None]
        fused = _fused(parts)
        bias = np.concatenate(present) if present else None
        return [_Piece(job.name, fused, pack(fused.weight), bias)]
    layer = job.name.rpartition(".")[0]
    return [
        _Piece(f"{layer}.{role}", part, pack(part.weight), bias)
        for role, part, bias in zip(job.roles, parts, biases, strict=True)
    ]


def _part(source: SourceTensor, job: _Job) -> Converted:
    """One role's weight in its format, with the norm that its error is a part of."""
    target = job.target
    if job.is_table:
        source = _looked_up(source)
    if target is None:
        target = _table_format(source) if job.is_table else own_format(source)
        if job.narrows and target.bits == 16:
            return dataclasses.replace(convert(source, TABLE_FORMAT), note=_NARROWED)
    return convert(source, target)


def _fused(parts: list[Converted]) -> Converted:
    """One weight of several in one format, or the only one."""
    if len(parts) == 1:
        return parts[0]
    weight = concatenate([part.weight for part in parts])
    error = norm = 0.0
    if any(part.error for part in parts):
        error = math.hypot(*(part.error for part in parts))
        norm = math.hypot(*(part.norm or frobenius(part.weight) for part in parts))
    notes = [part.note for part in parts if part.note]
    return Converted(weight, error, norm, "; ".join(dict.fromkeys(notes)))


def _one_range(parts: list[Converted]) -> list[Converted]:
    """Weights of one input with one range of static activations, the largest; the codes stay."""
    ranges = [part.weight.amax for part in parts if part.weight.amax is not None]
    if len(ranges) < len(parts):
        return parts
    amax = np.max(ranges, axis=0)
    return [
        dataclasses.replace(part, weight=dataclasses.replace(part.weight, amax=amax))
        for part in parts
    ]


def _table_format(source: SourceTensor) -> WeightFormat:
    """The file's own format where a table can have it; what is looked up cannot stay in 4 bits."""
    own = own_format(source)
    if own.is_row or own.scheme is Scheme.FP8:
        return TABLE_FORMAT
    if own.bits in (8, 16):
        return own
    return WeightFormat(8, own.group_size or _ROW_GROUP, _WIDENED[own.scheme])


def _looked_up(source: SourceTensor) -> SourceTensor:
    """A table with its columns in the input's order."""
    if not isinstance(source, WeightTensor) or source.order is None:
        return source
    note = "act-order: a table that is looked up has its columns in order"
    return FloatMatrix(dequantize(source), TABLE_FORMAT, source.source, note)


def _form(tensors: Mapping[str, PackedTensor]) -> str:
    """The full form of the layers' weights; of several, the one with most weights stands first."""
    forms: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.kind != "f32" and tensor.name.startswith("layers."):
            forms[WeightFormat.parse(tensor.format).full_form] += tensor.n * tensor.k
    return "+".join(name for name, _ in forms.most_common())


def _notes(tensors: Mapping[str, PackedTensor], target: Target) -> list[str]:
    """Lines for the user: what was not kept exactly although the file's own grid was asked for."""
    if target.form is not None:
        return []
    changed = [t for t in tensors.values() if t.kind != "f32" and not t.exact]
    if not changed:
        return []
    worst = max(changed, key=lambda t: t.rel_error)
    return [
        f"{len(changed)} of {sum(t.kind != 'f32' for t in tensors.values())} weights are requantized"
        f" (worst: {worst.name}, {worst.source} to {worst.format}, error {worst.rel_error:.2g})"
    ]


def _within(data: TokenizerData, vocab_size: int, path: Path) -> TokenizerData:
    """The tokenizer without end tokens that the model cannot produce.

    Raises CheckpointError: prompts would begin with a token that the model does not have.
    """
    if data.bos_id is not None and data.bos_id >= vocab_size:
        raise CheckpointError(
            path, f"begins prompts with token {data.bos_id}; its vocabulary has {vocab_size}"
        )
    eos_ids = tuple(token_id for token_id in data.eos_ids if token_id < vocab_size)
    return dataclasses.replace(data, eos_ids=eos_ids)
