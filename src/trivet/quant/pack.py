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
from trivet.checkpoint.tokenizer import TokenizerData, quick_json
from trivet.config import Scheme, WeightFormat
from trivet.errors import CheckpointError, QuantError
from trivet.models import Model, ModelSpec, rope_tables
from trivet.native.packing import (
    Layout,
    PackedWeight,
    ScaleType,
    can_concatenate,
    concatenate,
    pack,
)
from trivet.native.weights import WeightTensor
from trivet.quant.load import Progress
from trivet.quant.rtn import Converted, convert, frobenius, own_format, source_type

_FLOATS = ("F32", "F16", "BF16")
Bias = NDArray[np.float32] | None
TABLE_FORMAT = WeightFormat(8, 32)  # embedding and head of quantized models
_ROW_GROUP = 128  # groups of 8 bits that hold what had one scale a row in 4
_LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def make_cache(
    source: ModelSource,
    model: Model,
    target: WeightFormat | None,
    path: Path,
    key: dict[str, Any],
    progress: Progress | None,
) -> PackedFile:
    """Read, convert and write a model, and map the result.

    source, model  the model, opened      target  None: the file's own formats
    path           where the cache goes; the caller holds its lock
    key            what `cache_key` gives; stored
    Raises CheckpointError: the model is unsound or changes meanwhile. OSError: the disk is full.
    """
    capacity = (1 << 16) + 1024 * (8 + 6 * model.spec.num_layers)
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


def least_bytes(model: Model, target: WeightFormat | None) -> int:
    """What a cache takes at least, known before anything is read: matrices and rope tables.

    target  None: the file's own formats, where floats become bf16 and no grid becomes smaller
    """
    total = 4 * model.spec.max_positions * model.spec.head_dim
    for job in _jobs(model.spec, target):
        infos = [model.checkpoint.info(model.file_name(role, job.layer)) for role in job.roles]
        if job.target is None:
            for info in infos:
                is_float = info.dtype in _FLOATS
                total += 2 * math.prod(info.shape) if is_float else info.num_bytes
        else:
            rows = sum(math.prod(info.shape[:-1]) for info in infos)
            layout = Layout(job.target, rows, infos[0].shape[-1], ScaleType.F16)
            total += sum(
                math.prod(shape) * dtype.itemsize for dtype, shape in layout.parts.values()
            )
    return total


def _source_sha256(source: ModelSource) -> str:
    digest = hashlib.sha256()
    for path in source.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class _Job:
    """One packed weight: which roles of which layer are fused into it, and the format asked for."""

    name: str
    roles: tuple[str, ...]
    layer: int
    target: WeightFormat | None
    is_table: bool = False


def pack_model(
    model: Model, target: WeightFormat | None, writer: PackedWriter, progress: Progress | None
) -> dict[str, Any]:
    """Convert and write all tensors; returns the header's entries ``form``, ``content``, ``notes``.

    Tensors: ``head`` and, unless tied, ``embed``; ``final_norm``; ``rope.cos`` and ``rope.sin``; per
    layer ``attn_norm``, ``qkv``, ``o``, ``mlp_norm``, ``gate_up``, ``down``. q, k, v and gate, up are
    always fused along N. The table that is looked up (``embed``, or a tied ``head``) is bf16 or
    int8 groups, whatever the rest is. target None: the file's own formats.
    """
    spec = model.spec
    jobs = list(_jobs(spec, target))
    for done, (job, converted, packed, bias) in enumerate(_converted(model, jobs), 1):
        weight = converted.weight
        writer.add_weight(
            job.name,
            packed,
            bias,
            source=weight.source,
            exact=weight.exact,
            rel_error=converted.rel_error,
            note=converted.note,
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


def _jobs(spec: ModelSpec, target: WeightFormat | None) -> Iterator[_Job]:
    table = target if target is None or target.bits == 16 else TABLE_FORMAT
    tied = spec.tied_embeddings
    yield _Job("head", ("embed" if tied else "head",), 0, table, is_table=tied)
    if not tied:
        yield _Job("embed", ("embed",), 0, table, is_table=True)
    for layer in range(spec.num_layers):
        for name, roles in _LINEARS.items():
            yield _Job(f"layers.{layer}.{name}", roles, layer, target)


def _converted(
    model: Model, jobs: list[_Job]
) -> Iterator[tuple[_Job, Converted, PackedWeight, Bias]]:
    """Jobs done in order by a few threads (numpy releases the GIL), few of them at a time."""
    num_threads = min(4, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(num_threads, "trivet-pack") as pool:
        waiting = deque[tuple[_Job, concurrent.futures.Future[Any]]]()
        remaining = iter(jobs)
        try:
            for job in remaining:
                waiting.append((job, pool.submit(_convert_job, model, job)))
                if len(waiting) > num_threads:
                    done, future = waiting.popleft()
                    yield done, *future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, *future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _convert_job(model: Model, job: _Job) -> tuple[Converted, PackedWeight, Bias]:
    sources = [model.matrix(role, job.layer) for role in job.roles]
    try:
        converted = _fused(sources, job)
    except QuantError as error:
        name = model.file_name(job.roles[0], job.layer)
        raise CheckpointError(model.checkpoint.path, str(error), tensor=name) from None
    biases = [model.bias(role, job.layer) for role in job.roles] if not _is_table(job) else [None]
    present = [bias for bias in biases if bias is not None]
    return converted, pack(converted.weight), np.concatenate(present) if present else None


def _is_table(job: _Job) -> bool:
    return job.name in ("head", "embed")


def _fused(sources: list[SourceTensor], job: _Job) -> Converted:
    """One weight from the sources of a job, all in one format."""
    target = job.target if job.target is not None else _common_format(sources, job.is_table)
    parts = [convert(source, target) for source in sources]
    weights = _one_range([part.weight for part in parts])
    if not can_concatenate(weights):  # scales of some fit fp16 and of others do not
        weights = [_with_float_scales(weight) for weight in weights]
    notes = [part.note for part in parts if part.note]
    if len({own_format(source) for source in sources}) > 1 and job.target is None:
        kinds = "+".join(source_type(source) for source in sources)
        notes.append(f"fused from {kinds}")
    weight = concatenate(weights) if len(weights) > 1 else weights[0]
    error = norm = 0.0
    if any(part.error for part in parts):
        error = math.hypot(*(part.error for part in parts))
        norm = math.hypot(
            *(
                frobenius(source) if part.norm is None else part.norm
                for part, source in zip(parts, sources, strict=True)
            )
        )
    return Converted(weight, error, norm, "; ".join(dict.fromkeys(notes)))


def _one_range(weights: list[WeightTensor]) -> list[WeightTensor]:
    """Weights of one input with one range of static activations, the largest; the codes stay.

    Raises QuantError: they name different outlier columns of that input.
    """
    columns = [
        w.outliers for w in weights if w.outlier_codes is not None and w.outliers is not None
    ]
    if any(not np.array_equal(other, columns[0]) for other in columns):
        raise QuantError("linears that run as one name different outlier columns of their input")
    ranges = [w.amax for w in weights if w.amax is not None]
    if len(ranges) < len(weights):
        return weights
    return [dataclasses.replace(w, amax=np.max(ranges, axis=0)) for w in weights]


def _common_format(sources: list[SourceTensor], is_table: bool) -> WeightFormat:
    """The file's own format where all sources share it; else one that loses least.

    Grids without minima and with the same groups meet in 8 bits exactly, and so do grids with minima;
    anything else is rounded to int8 groups of 32. A table that is looked up cannot stay in 4 bits.
    """
    formats = {own_format(source) for source in sources}
    if len(formats) == 1:
        only = next(iter(formats))
        if not is_table or only.bits == 16 or (only.bits == 8 and not only.is_row):
            return only
    groups = {f.group_size for f in formats}
    with_minima = {f.scheme is Scheme.MIN for f in formats}
    if len(groups) > 1 or len(with_minima) > 1 or any(f.bits == 16 or f.is_row for f in formats):
        return TABLE_FORMAT
    scheme = Scheme.MIN if with_minima == {True} else Scheme.SYM
    return WeightFormat(8, next(iter(groups)) or _ROW_GROUP, scheme)


def _with_float_scales(weight: WeightTensor) -> WeightTensor:
    def wide(values: Any) -> Any:
        return None if values is None else values.astype(np.float32)

    return dataclasses.replace(weight, scales=wide(weight.scales), minima=wide(weight.minima))


def _form(tensors: Mapping[str, PackedTensor]) -> str:
    """The full form of the layers' weights; of several, the one with most weights stands first."""
    forms: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.kind != "f32" and tensor.name.startswith("layers."):
            forms[WeightFormat.parse(tensor.format).full_form] += tensor.n * tensor.k
    return "+".join(name for name, _ in forms.most_common())


def _notes(tensors: Mapping[str, PackedTensor], target: WeightFormat | None) -> list[str]:
    """Lines for the user: what was not kept exactly although the file's own grid was asked for."""
    if target is not None:
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
