"""From a model's name to a mapped packed cache: found when it is current, made when it is not.

What only packing needs is imported when packing, so that a start from the cache stays quick.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trivet.checkpoint.cache import (
    CacheQuery,
    NoRoomError,
    no_place,
    require_room,
    writing,
)
from trivet.checkpoint.header import CONTRACT_VERSION
from trivet.checkpoint.packed import PackedFile, PackedTensor
from trivet.config import AUTO, PAGE_TOKENS, SPAN_TOKENS, STORED, WeightFormat, own_or_format
from trivet.errors import CheckpointError, ConfigError
from trivet.models import ModelSpec
from trivet.native.packing import LINEARS, linear_names
from trivet.sizing import format_bytes

if TYPE_CHECKING:
    from trivet.checkpoint import Tokenizer
    from trivet.models import Model

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model is packed to.

    form           format of the weights; None: the file's own
    keeps_tables   of the file's own: embedding and head stay in 16 bits where the rest is quantized
    """

    form: WeightFormat | None = None
    keeps_tables: bool = False


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
        """All tensors by name; names are listed in `trivet.quant.pack.pack_model`."""
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
            self._tokenizers.append(self.file.tokenizer())
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
    weights        a format or its name; ``auto`` keeps the file's own grids (floats become bf16), but
                   runs 16-bit embedding and head of a quantized model in 8 bits; ``stored`` does not
    max_model_len  shortens the context; longer than the model's is refused
    progress       called with (what, done, total) while packing
    Raises CheckpointError, ConfigError or QuantError, each in one line.
    """
    form = own_or_format(weights) if isinstance(weights, str) else weights
    query = CacheQuery.of(model, weights)
    found, stale = query.find(PackedFile.open)
    state = "hit"
    if found is None:
        found, stale, is_made = _packed_file(query, Target(form, weights == STORED), progress)
        if is_made:
            state = "packed" if stale is None else "repacked"
    packed = _packed_model(found, state, stale)
    if max_model_len is None:
        return packed
    if not 1 <= max_model_len <= packed.spec.max_positions:
        allowed = f"1 to {packed.spec.max_positions}, the model's context"
        raise ConfigError("max_model_len", max_model_len, allowed)
    shorter = dataclasses.replace(packed.spec, max_positions=max_model_len)
    return dataclasses.replace(packed, spec=shorter)


def _packed_file(
    query: CacheQuery, target: Target, progress: Progress | None
) -> tuple[PackedFile, str | None, bool]:
    """Make the cache in the first place that can take it, or find what another process has made.

    Returns it, why an older one could not serve, and whether it was made here.
    """
    from trivet.models import open_model
    from trivet.quant.pack import least_bytes, make_cache

    model: Model | None = None
    needed: int | None = None
    problems: list[NoRoomError] = []
    for path in query.paths:
        try:
            with writing(path, lambda: _tell_of_waiting(progress)):
                found, stale = query.find(PackedFile.open)  # another process may have been faster
                if found is not None:
                    return found, stale, False
                if model is None:
                    model = open_model(query.source)
                    needed = least_bytes(model, target)
                assert needed is not None, "the model is open"
                require_room(path, needed)
                if problems:
                    _tell_of_place(problems[-1], needed, path)
                made = make_cache(query.source, model, target, path, query.key, progress)
                return made, stale, True
        except NoRoomError as error:
            problems.append(error)
    raise no_place(problems, needed)


def _tell_of_place(problem: NoRoomError, needed: int, path: Path) -> None:
    """Where the cache goes instead: a line on standard error unless the program logs otherwise."""
    import logging

    logging.getLogger("trivet").warning(
        "note: %s; it needs at least %s and goes to %s",
        problem,
        format_bytes(needed),
        path.parent,
    )


def _tell_of_waiting(progress: Progress | None) -> None:
    if progress is not None:
        progress("waiting for another process that packs this model", 0, 1)


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
    outputs = {
        "q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size, "o": spec.hidden_size,
        "gate": spec.ffn_size, "up": spec.ffn_size, "down": spec.hidden_size,
    }  # fmt: skip
    inputs = {"o": spec.q_size, "down": spec.ffn_size}
    for layer in range(spec.num_layers):
        for role in ("attn_norm", "mlp_norm"):
            shapes[f"layers.{layer}.{role}"] = (1, spec.hidden_size)
        for linear, roles in LINEARS.items():
            names = linear_names(file.tensors, layer, linear)
            rows = [outputs[role] for role in roles]
            for name, n in zip(names, rows if len(names) > 1 else [sum(rows)], strict=True):
                shapes[name] = (n, inputs.get(linear, spec.hidden_size))
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None or (tensor.n, tensor.k) != shape:
            raise CheckpointError(file.path, f"is missing or not {list(shape)}; delete it", name)
        is_vector = name.startswith("rope.") or name.endswith("_norm")
        is_looked_up = name == "embed" or (name == "head" and spec.tied_embeddings)
        if (tensor.kind == "f32") != is_vector or (
            is_looked_up and (tensor.kind not in ("bf16", "int8_group") or tensor.order is not None)
        ):
            raise CheckpointError(file.path, f"cannot be of kind {tensor.kind}; delete it", name)
