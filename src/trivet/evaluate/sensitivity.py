"""Which layer hurts? Each unit of a model is quantized alone and its divergence measured.

A unit is one linear of the engine: q, k and v together, the output projection, gate and up
together, the down projection; per layer. The baseline's file is mapped and one unit of it replaced by
the candidate's, so nothing is packed again, and KL(baseline || mixed) is taken on a short text.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from trivet import native
from trivet.checkpoint.packed import PackedTensor
from trivet.config import PAGE_TOKENS, KVFormat
from trivet.evaluate.scoring import LogSoftmax, Scorer
from trivet.loader import LoadedModel
from trivet.native.api import ModelRunner
from trivet.native.packing import LINEARS, linear_names
from trivet.quant import PackedModel

_PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Unit:
    """One unit quantized alone: divergence in nats and bytes saved."""

    name: str
    mean_kl: float
    saved_bytes: int

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """Two packed models as one: the baseline's tensors but for some of the candidate's."""

    packed: PackedModel
    buffer: memoryview
    tensors: dict[str, PackedTensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packed, name)


def measure_sensitivity(
    candidate: LoadedModel,
    baseline: LoadedModel,
    input_ids: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[Unit]:
    """Every unit that differs, the most harmful first.

    input_ids  the short text, at most the context; all rows count
    """
    own, base = candidate.packed, baseline.packed
    shift = -(-len(base.buffer) // _PAGE_BYTES) * _PAGE_BYTES
    both = mmap.mmap(-1, shift + len(own.buffer))
    view = np.frombuffer(both, np.uint8)
    view[: len(base.buffer)] = np.frombuffer(base.buffer, np.uint8)
    view[shift : shift + len(own.buffer)] = np.frombuffer(own.buffer, np.uint8)
    arena = baseline.new_arena(-(-len(input_ids) // PAGE_TOKENS))
    scorer = Scorer(baseline.runner, arena)
    wanted = [LogSoftmax.of(rows) for rows in scorer.chunks(input_ids, len(input_ids))]
    linears = [(layer, linear) for layer in range(base.spec.num_layers) for linear in LINEARS]
    units = []
    for number, (layer, linear) in enumerate(linears):
        if progress is not None:
            progress(number, len(linears))
        kept, taken = (linear_names(p.tensors, layer, linear) for p in (base, own))
        tensors = {name: tensor for name, tensor in base.tensors.items() if name not in kept}
        tensors |= {name: _shifted(own.tensors[name], shift) for name in taken}
        mixed = _Mixed(base, memoryview(both), tensors)
        runner = native.load_model(
            cast(Any, mixed), threads=baseline.threads, kv=KVFormat(baseline.config.kv)
        )
        own_scorer = Scorer(cast(ModelRunner, runner), arena)
        kl = [
            expected.kl_rows(LogSoftmax.of(rows))
            for expected, rows in zip(
                wanted, own_scorer.chunks(input_ids, len(input_ids)), strict=True
            )
        ]
        saved = sum(base.tensors[name].num_bytes for name in kept)
        saved -= sum(own.tensors[name].num_bytes for name in taken)
        name = f"layers.{layer}.{linear}"
        units.append(Unit(name, float(np.concatenate(kl).mean()), saved))
    return sorted(units, key=lambda unit: -unit.mean_kl)


def _shifted(tensor: PackedTensor, by: int) -> PackedTensor:
    """A tensor whose parts lie ``by`` bytes later."""
    parts = ("codes", "scales", "minima", "zeros", "order", "sums", "bias")
    moved = {
        name: value + by for name in parts if (value := getattr(tensor, name, None)) is not None
    }
    return dataclasses.replace(tensor, **moved)
