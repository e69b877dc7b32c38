"""From a model's name to a mapped packed cache: found when it is current, made when it is not.

Packing reads one tensor at a time, brings it into its format, fuses what reads the same input and
appends it to the file. What happened to each tensor is kept in the file and reported.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint import SourceTensor, Tokenizer, TokenizerData, resolve_model
from trivet.checkpoint.cache import cache_key, cache_paths, find_cache, writing
from trivet.checkpoint.packed import CONTRACT_VERSION, PackedFile, PackedTensor, PackedWriter
from trivet.checkpoint.source import ModelSource
from trivet.config import PAGE_TOKENS, SPAN_TOKENS, WeightFormat
from trivet.errors import CheckpointError, ConfigError, QuantError
from trivet.models import Model, ModelSpec, open_model, rope_tables
from trivet.native.packing import PackedWeight, can_concatenate, concatenate, pack
from trivet.native.weights import WeightTensor
from trivet.quant.rtn import Converted, convert, frobenius, own_format, source_type

Progress = Callable[[str, int, int], None]
Bias = NDArray[np.float32] | None
AUTO = "auto"
TABLE_FORMAT = WeightFormat(8, 32)  # embedding and head of quantized models
_LINEARS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """What became of one tensor: its source's type, its form, whether it is exact, and the error."""

    name: str
    source: str
    form: str
    shape: tuple[int, int]
    exact: bool
    rel_error: float
    note: str


@dataclasses.dataclass(frozen=True)
class PackedModel:
    """A model ready to run: numbers, mapped weights, and a tokenizer on demand.

    buffer        the whole mapped file, page-aligned and read-only; offsets of tensors count from it
    weights_form  the full form of the linear weights, ``w8a8+hadamard64`` and the like
    numerics_id   hash of everything that fixes the logits, but for the KV format (invariant I8)
    identity      hash of the source's bytes
    cache_state   ``hit``, ``packed`` (there was none) or ``repacked`` (it was stale or damaged)
    """

    spec: ModelSpec
    file: PackedFile
    weights_form: str
    numerics_id: str
    identity: str
    cache_state: str
    notes: tuple[str, ...] = ()
    _tokenizers: list[Tokenizer] = dataclasses.field(default_factory=list, repr=False)

    @property
    def path(self) -> Path:
        """The packed cache file."""
        return self.file.path

    @property
    def buffer(self) -> memoryview:
        """The whole mapping."""
        return self.file.buffer

    @property
    def tensors(self) -> Mapping[str, PackedTensor]:
        """All tensors by name; names are listed in `trivet.quant.load.pack_model`."""
        return self.file.tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, norms and biases; rope tables are not counted."""
        return sum(t.num_bytes for t in self.tensors.values() if not t.name.startswith("rope."))

    @property
    def rope_cos(self) -> NDArray[np.float32]:
        """cos table, float32 [positions, head_dim / 2]."""
        return self.file.floats("rope.cos")

    @property
    def rope_sin(self) -> NDArray[np.float32]:
        """sin table, float32 [positions, head_dim / 2]."""
        return self.file.floats("rope.sin")

    @property
    def report(self) -> list[TensorReport]:
        """One entry for every weight matrix of the file."""
        return [
            TensorReport(
                t.name, t.source, WeightFormat.parse(t.format).full_form, (t.n, t.k), t.exact,
                t.rel_error, t.note,
            )
            for t in self.tensors.values()
            if t.kind != "f32"
        ]  # fmt: skip

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built at the first call."""
        if not self._tokenizers:
            text = self.file.bytes_at("tokenizer").decode()
            data = TokenizerData.from_settings(text, self.file.header["tokenizer_settings"])
            self._tokenizers.append(Tokenizer(data, self.path))
        return self._tokenizers[0]

    def verify(self) -> None:
        """Compare the weights with the hash made at packing. Raises CheckpointError."""
        if self.file.content_sha256() != self.file.header.get("content"):
            raise CheckpointError(self.path, "the weights are damaged; delete the file to repack")


def load_packed(
    model: str | os.PathLike[str],
    weights: WeightFormat | str = AUTO,
    *,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> PackedModel:
    """Find or make the packed cache of a model in a weight format, and map it.

    model          a folder, a .gguf file, a hub id or ``demo``
    weights        a format or its name; ``auto`` keeps the file's own grid, floats become bf16
    max_model_len  shortens the context; longer than the model's is refused
    progress       called with (what, done, total) while packing
    Raises CheckpointError, ConfigError or QuantError, each in one line.
    """
    if isinstance(weights, str) and weights != AUTO:
        weights = WeightFormat.parse(weights)
    requested = weights.name if isinstance(weights, WeightFormat) else AUTO
    source = resolve_model(model)
    key = cache_key(source, requested)
    paths = cache_paths(source, requested)
    found, stale = find_cache(paths, key)
    state = "hit"
    if found is None:
        with writing(paths) as path:
            found, stale = find_cache(paths, key)  # another process may have been faster
            if found is None:
                target = weights if isinstance(weights, WeightFormat) else None
                found = _make_cache(source, target, path, key, progress)
                state = "packed" if stale is None else "repacked"
    packed = _packed_model(found, state, stale)
    if max_model_len is None:
        return packed
    if not 1 <= max_model_len <= packed.spec.max_positions:
        allowed = f"1 to {packed.spec.max_positions}, the model's context"
        raise ConfigError("max_model_len", max_model_len, allowed)
    shorter = dataclasses.replace(packed.spec, max_positions=max_model_len)
    return dataclasses.replace(packed, spec=shorter)


def _packed_model(file: PackedFile, state: str, stale: str | None) -> PackedModel:
    header = file.header
    try:
        spec = ModelSpec.from_json(header["spec"])
        form, content, identity = header["form"], header["content"], header["identity"]
        notes = tuple(header["notes"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(file.path, "has a header that is not sound; delete it") from None
    _check_tables(file, spec)
    if stale is not None:
        notes = (f"the packed cache was made again: {stale}", *notes)
    forms = sorted({t.format for t in file.tensors.values() if t.kind != "f32"})
    facts = [CONTRACT_VERSION, content, header["spec"], form, forms, PAGE_TOKENS, SPAN_TOKENS]
    numerics_id = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return PackedModel(spec, file, form, numerics_id, identity, state, notes)


def _check_tables(file: PackedFile, spec: ModelSpec) -> None:
    """Every tensor the spec asks for is there with its shape."""
    shapes = {
        "final_norm": (1, spec.hidden_size),
        "rope.cos": (spec.max_positions, spec.head_dim // 2),
        "rope.sin": (spec.max_positions, spec.head_dim // 2),
        "head": (spec.vocab_size, spec.hidden_size),
    }
    if not spec.tied_embeddings:
        shapes["embed"] = shapes["head"]
    for layer in range(spec.num_layers):
        shapes |= {
            f"layers.{layer}.attn_norm": (1, spec.hidden_size),
            f"layers.{layer}.mlp_norm": (1, spec.hidden_size),
            f"layers.{layer}.qkv": (spec.q_size + 2 * spec.kv_size, spec.hidden_size),
            f"layers.{layer}.o": (spec.hidden_size, spec.q_size),
            f"layers.{layer}.gate_up": (2 * spec.ffn_size, spec.hidden_size),
            f"layers.{layer}.down": (spec.hidden_size, spec.ffn_size),
        }
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None or (tensor.n, tensor.k) != shape:
            raise CheckpointError(file.path, f"is missing or not {list(shape)}; delete it", name)
        is_vector = name.startswith("rope.") or name.endswith("_norm")
        is_looked_up = name == "embed" or (name == "head" and spec.tied_embeddings)
        if (tensor.kind == "f32") != is_vector or (
            is_looked_up and tensor.kind not in ("bf16", "int8_group")
        ):
            raise CheckpointError(file.path, f"cannot be of kind {tensor.kind}; delete it", name)


def _make_cache(
    source: ModelSource,
    target: WeightFormat | None,
    path: Path,
    key: dict[str, Any],
    progress: Progress | None,
) -> PackedFile:
    model = open_model(source)
    capacity = (1 << 16) + 1024 * (8 + 6 * model.spec.num_layers)
    try:
        with PackedWriter(path, capacity) as writer:
            header = pack_model(model, target, writer, progress)
            data = model.tokenizer_data()
            raw = data.json.encode()
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
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None
    return PackedFile.open(path)


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
    weights = [part.weight for part in parts]
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


def _common_format(sources: list[SourceTensor], is_table: bool) -> WeightFormat:
    """The file's own format where all sources share it; else one that loses least.

    Symmetric grids with the same groups meet in 8 bits exactly; anything else is rounded to int8
    groups of 32. A table that is looked up cannot stay in 4 bits.
    """
    formats = {own_format(source) for source in sources}
    if len(formats) == 1:
        only = next(iter(formats))
        if not is_table or only.bits == 16 or (only.bits == 8 and only.group_size is not None):
            return only
    groups = {f.group_size for f in formats}
    group = next(iter(groups))
    if len(groups) == 1 and group is not None:
        return WeightFormat(8, group)
    return TABLE_FORMAT


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
