"""Seeded damage of loaded models: what users met in broken checkpoints, each at its smallest extent.

For tests and benchmarks of the gate. A model's packed file is copied into memory and one place of it
changed; nothing on disk is touched. `CORRUPTIONS` names the kinds; a kind that a format cannot have
(a zero point where there is none) changes what the format has in its place.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trivet import native
from trivet.checkpoint import Tokenizer
from trivet.checkpoint.packed import PackedFile, PackedTensor
from trivet.config import KVFormat, WeightFormat
from trivet.loader import LoadedModel
from trivet.models import ModelSpec
from trivet.native.api import ModelRunner
from trivet.native.packing import LINEARS, linear_names, pack, unpack
from trivet.native.weights import WeightTensor, dequantize, hadamard_width
from trivet.quant.rtn import convert

_ALIGN = 4096
_CUT_TEXT = "In 1984 it's 3.14 of x86_64, isn't it?"


def corrupted(model: LoadedModel, kind: str, seed: int) -> LoadedModel:
    """A copy of a model with one kind of damage, drawn by the seed. The file on disk stays as it is."""
    packed = model.packed
    size = len(packed.buffer)
    largest = max(tensor.n_padded * tensor.k_padded for tensor in packed.tensors.values())
    memory = mmap.mmap(-1, size + 4 * largest + _ALIGN)  # room for one weight in a wider format
    memory[:size] = packed.buffer
    file = dataclasses.replace(
        packed.file, buffer=memoryview(memory), tensors=dict(packed.file.tensors)
    )
    rng = random.Random(f"{kind} {seed}")
    damage = _Damage(file, memory, rng, packed.spec, model.tokenizer, size)
    CORRUPTIONS[kind](damage)
    broken = dataclasses.replace(
        packed, file=file, spec=damage.spec, _tokenizers=[damage.tokenizer]
    )
    runner = native.load_model(broken, threads=model.threads, kv=KVFormat(model.config.kv))
    return dataclasses.replace(model, packed=broken, runner=cast(ModelRunner, runner))


@dataclasses.dataclass
class _Damage:
    """The file being damaged, its bytes, the draw of the place, and what else a model has.

    end  bytes of ``memory`` in use
    """

    file: PackedFile
    memory: mmap.mmap
    rng: random.Random
    spec: ModelSpec
    tokenizer: Tokenizer
    end: int

    @property
    def num_layers(self) -> int:
        return sum(name.endswith(".attn_norm") for name in self.file.tensors)

    def name(self, *linears: str, role: str | None = None) -> str:
        """A weight of a layer drawn by chance; of a linear's roles that lie apart any, or ``role``."""
        linear = self.rng.choice(linears or tuple(LINEARS))
        names = linear_names(self.file.tensors, self.rng.randrange(self.num_layers), linear)
        if len(names) > 1 and role is not None:
            return names[LINEARS[linear].index(role)]
        return names[0] if len(names) == 1 else self.rng.choice(names)

    def weight(self, name: str) -> WeightTensor:
        found = unpack(self.file.weight(name))
        return dataclasses.replace(
            found,
            codes=found.codes.copy(),
            scales=None if found.scales is None else found.scales.copy(),
            minima=None if found.minima is None else found.minima.copy(),
            zeros=None if found.zeros is None else found.zeros.copy(),
        )

    def tensors(self) -> dict[str, PackedTensor]:
        """The file's tensors, to be changed."""
        return cast(dict[str, PackedTensor], self.file.tensors)

    def append(self, name: str, weight: WeightTensor) -> None:
        """Put a weight of any layout behind the others; it stands for ``name`` from now on."""
        packed = pack(weight)
        layout, kind = packed.layout, packed.layout.kind.name.lower()
        offsets: dict[str, Any] = dict.fromkeys(
            (
                "codes",
                "scales",
                "minima",
                "zeros",
                "order",
                "sums",
                "amax",
                "outliers",
                "outlier_codes",
            )
        )
        view = np.frombuffer(self.memory, np.uint8)
        for part, array in packed.arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offsets[part] = -(-self.end // _ALIGN) * _ALIGN
            self.end = offsets[part] + len(raw)
            view[offsets[part] : self.end] = raw
        is_plain = kind == "bf16"
        self.tensors()[name] = dataclasses.replace(
            self.file.tensors[name],
            **offsets,
            kind=kind,
            n_padded=layout.n_padded,
            k_padded=layout.k_padded,
            group=0 if is_plain else layout.group,
            num_groups=0 if is_plain else layout.num_groups,
            scheme=layout.format.scheme.value,
            scale_type=None if is_plain else layout.scale_type.name.lower(),
            hadamard=hadamard_width(layout.k) if layout.format.is_rotated else 1,
            format=layout.format.name,
        )

    def change_tokenizer(self, **changes: Any) -> None:
        """Other tokenizer data."""
        self.tokenizer = Tokenizer(dataclasses.replace(self.tokenizer.data, **changes))

    def store(self, name: str, weight: WeightTensor) -> None:
        """Write a weight of the same layout back."""
        tensor = self.file.tensors[name]
        view = np.frombuffer(self.memory, np.uint8)
        for part, array in pack(weight).arrays.items():
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start = getattr(tensor, part)
            view[start : start + len(raw)] = raw

    def floats(self, name: str) -> NDArray[np.float32]:
        """A writable view of a float tensor."""
        tensor = self.file.tensors[name]
        return np.frombuffer(self.memory, np.float32, tensor.n * tensor.k, tensor.codes)

    def group(self, weight: WeightTensor) -> tuple[int, int, slice]:
        """(row, group, columns) of one group that is not all zero."""
        size = weight.format.group_size or 32
        while True:
            row = self.rng.randrange(weight.shape[0])
            group = self.rng.randrange(-(-weight.shape[1] // size))
            columns = slice(group * size, min(weight.shape[1], (group + 1) * size))
            if len(np.unique(weight.codes[row, columns])) > 4:
                return row, group, columns


def _in_group(change: Callable[[_Damage, WeightTensor, int, int, slice], None]) -> Any:
    """Damage of one group of one weight."""

    def run(damage: _Damage) -> None:
        name = damage.name()
        weight = damage.weight(name)
        change(damage, weight, *damage.group(weight))
        damage.store(name, weight)

    return run


def _limits(weight: WeightTensor) -> tuple[int, int]:
    return (0, 15) if weight.format.bits == 4 else (-127, 127)


def _zero_off_by_one(d: _Damage, w: WeightTensor, row: int, group: int, columns: slice) -> None:
    if w.zeros is not None:
        at = group if w.zeros.shape[1] > 1 else 0
        w.zeros[row, at] = (w.zeros[row, at] + 1) % 16
    else:
        codes = w.codes[row, columns].astype(np.int16) + 1
        w.codes[row, columns] = np.clip(codes, *_limits(w))


def _nibbles_swapped(d: _Damage, w: WeightTensor, row: int, group: int, columns: slice) -> None:
    codes = w.codes[row, columns].copy()
    even = len(codes) // 2 * 2
    codes[0:even:2], codes[1:even:2] = codes[1:even:2].copy(), codes[0:even:2].copy()
    w.codes[row, columns] = codes


def _reversed(d: _Damage, w: WeightTensor, row: int, group: int, columns: slice) -> None:
    w.codes[row, columns] = w.codes[row, columns][::-1].copy()


def _sign_flipped(d: _Damage, w: WeightTensor, row: int, group: int, columns: slice) -> None:
    if w.scales is not None:
        at = group if w.scales.shape[1] > 1 else 0
        w.scales[row, at] = -w.scales[row, at]


def _scale(value: float) -> Callable[[_Damage, WeightTensor, int, int, slice], None]:
    def change(d: _Damage, w: WeightTensor, row: int, group: int, columns: slice) -> None:
        if w.scales is not None:
            at = group if w.scales.shape[1] > 1 else 0
            with np.errstate(over="ignore", invalid="ignore"):
                w.scales[row, at] = w.scales[row, at] * value

    return change


def _group_shift(d: _Damage) -> None:
    """The scales of one row belong to the next group."""
    name = d.name()
    weight = d.weight(name)
    row, *_ = d.group(weight)
    if weight.scales is not None:
        axis = 0 if weight.scales.shape[1] == 1 else 1
        if axis:
            weight.scales[row] = np.roll(weight.scales[row], 1)
        else:
            weight.scales[:] = np.roll(weight.scales, 1, axis=0)
    d.store(name, weight)


def _transposed_scales(d: _Damage) -> None:
    name = d.name()
    weight = d.weight(name)
    if weight.scales is not None:
        weight.scales[:] = weight.scales.T.reshape(weight.scales.shape)
    d.store(name, weight)


def _quantized_twice(d: _Damage) -> None:
    """One weight was rounded to 4 bits before it came into its format."""
    name = d.name()
    weight = d.weight(name)
    stored = dataclasses.replace(weight, order=None)  # in the order of its groups
    first = convert(dequantize(stored), WeightFormat(4, 64)).weight
    twice = convert(dequantize(first), weight.format).weight
    d.store(name, dataclasses.replace(twice, order=weight.order))


def _unquantized(d: _Damage) -> None:
    """One weight of a quantized model was left as it was."""
    name = d.name()
    d.append(name, convert(dequantize(d.weight(name)), WeightFormat.parse("bf16")).weight)


def _tie_lost(d: _Damage) -> None:
    """Embedding and head, one tensor before, are two, and one token's row of the head is another's."""
    if d.spec.tied_embeddings:
        d.tensors()["embed"] = dataclasses.replace(d.file.tensors["head"], name="embed")
        d.spec = dataclasses.replace(d.spec, tied_embeddings=False)
    weight = d.weight("head")
    _copy_row(d, weight)
    d.append("head", weight)


def _value_scale_lost(d: _Damage) -> None:
    """V of one head is read without the scale it was written with."""
    name = d.name("qkv", role="v")
    weight = d.weight(name)
    start = 0
    if name.endswith(".qkv"):
        start = (d.spec.num_heads + d.spec.num_kv_heads) * d.spec.head_dim
    start += d.rng.randrange(d.spec.num_kv_heads) * d.spec.head_dim
    for part in (weight.scales, weight.minima):
        if part is not None:
            part[start : start + d.spec.head_dim] *= 2
    d.store(name, weight)


def _bos(d: _Damage) -> None:
    """A token put before every text where there was none, or the other way round."""
    content = json.loads(d.tokenizer.data.json)
    has_one = bool(d.tokenizer.encode(""))
    token_id = min(d.tokenizer.special_ids | d.tokenizer.eos_ids)
    token = d.tokenizer.id_to_token(token_id)
    first = [] if has_one else [{"SpecialToken": {"id": token, "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    d.change_tokenizer(json=json.dumps(content))


def _pre_tokenizer(d: _Damage) -> None:
    """Numbers and words are cut as another model does: the first such cut that changes any ids.

    A vocabulary without numbers of several digits, for one, does not need its rule for digits.
    """
    content = json.loads(d.tokenizer.data.json)
    found = content.get("pre_tokenizer")
    stages = (
        found["pretokenizers"] if found is not None and found["type"] == "Sequence" else [found]
    )
    stages = [stage for stage in stages if stage is not None]
    digits = {"type": "Digits", "individual_digits": True}
    spaces = [
        {**stage, "add_prefix_space": not stage["add_prefix_space"]}
        if stage["type"] == "ByteLevel"
        else stage
        for stage in stages
    ]
    before = d.tokenizer.encode(_CUT_TEXT)
    for other in (stages[1:], [digits, *stages], spaces):
        one = {"type": "Sequence", "pretokenizers": other} if other else None
        d.change_tokenizer(json=json.dumps(content | {"pre_tokenizer": one}))
        if d.tokenizer.encode(_CUT_TEXT) != before:
            return
    raise ValueError("no other way of cutting texts changes this tokenizer's ids")


def _normalizer(d: _Damage) -> None:
    """Texts are put into lower case first."""
    content = json.loads(d.tokenizer.data.json)
    content["normalizer"] = {"type": "Lowercase"}
    d.change_tokenizer(json=json.dumps(content))


def _template(d: _Damage) -> None:
    """The template does not open the answer."""
    template = d.tokenizer.data.chat_template or "{{ messages[0]['content'] }}"
    changed = template.replace("add_generation_prompt", "false")
    d.change_tokenizer(chat_template=changed if changed != template else template + "\n")


def _end_lost(d: _Damage) -> None:
    """One of the tokens that end a text does not any more."""
    d.spec = dataclasses.replace(d.spec, eos_ids=tuple(d.spec.eos_ids)[1:])


def _heads_swapped(d: _Damage) -> None:
    """The rows of q were permuted for another kind of rope, in one layer."""
    name = d.name("qkv", role="q")
    weight = d.weight(name)
    half = weight.shape[0] // 2 // 2 * 2
    order = np.arange(half).reshape(2, -1).T.reshape(-1)
    for part in (weight.codes, weight.scales, weight.minima, weight.zeros):
        if part is not None:
            part[:half] = part[:half][order]
    d.store(name, weight)


def _layer_of_another(d: _Damage) -> None:
    """One weight comes from another layer: a shard of another model or a wrong index."""
    name = d.name()
    own = d.file.tensors[name]
    _, number, role = name.split(".")
    others = (
        f"layers.{(int(number) + step) % d.num_layers}.{role}"
        for step in range(1, d.num_layers + 1)
    )
    found = d.file.tensors
    same = [o for o in others if o in found and found[o].layout == own.layout]
    d.store(name, d.weight(same[0]))


def _truncated(d: _Damage) -> None:
    """The last rows of one weight are zeros: a shard that ended early."""
    name = d.name()
    weight = d.weight(name)
    weight.codes[-1:] = 8 if weight.format.bits == 4 and weight.minima is None else 0
    if weight.scales is not None:
        weight.scales[-1:] = 0
    d.store(name, weight)


def _table_row(d: _Damage) -> None:
    """The embedding of one token is another token's."""
    weight = d.weight("head")
    _copy_row(d, weight)
    d.store("head", weight)


def _copy_row(d: _Damage, weight: WeightTensor) -> None:
    """One row becomes the next one's copy."""
    row = d.rng.randrange(weight.shape[0] - 1)
    for part in (weight.codes, weight.scales, weight.minima, weight.zeros):
        if part is not None:
            part[row] = part[row + 1]


def _norm(change: Callable[[NDArray[np.float32], int], None], role: str) -> Any:
    def run(damage: _Damage) -> None:
        layer = damage.rng.randrange(damage.num_layers)
        values = damage.floats(f"layers.{layer}.{role}" if role != "final_norm" else role)
        change(values, damage.rng.randrange(len(values)))

    return run


def _nan(values: NDArray[np.float32], at: int) -> None:
    values[at] = np.nan


def _doubled(values: NDArray[np.float32], at: int) -> None:
    values[at] *= 2


def _minus_one(values: NDArray[np.float32], at: int) -> None:
    values -= 1  # a norm stored as 1 + w and folded as w


def _rope(d: _Damage) -> None:
    """Another rope base."""
    for name in ("rope.cos", "rope.sin"):
        values = d.floats(name)
        values[len(values) // 2 :] = values[: len(values) - len(values) // 2]


CORRUPTIONS: dict[str, Callable[[_Damage], None]] = {
    "zero off by one, one group": _in_group(_zero_off_by_one),
    "nibbles swapped, one group": _in_group(_nibbles_swapped),
    "order of columns, one group": _in_group(_reversed),
    "sign of a scale, one group": _in_group(_sign_flipped),
    "scale is NaN, one group": _in_group(_scale(float("nan"))),
    "scale overflows, one group": _in_group(_scale(float("inf"))),
    "scale is zero, one group": _in_group(_scale(0.0)),
    "scale doubled, one group": _in_group(_scale(2.0)),
    "scale inverted twice, one group": _in_group(_scale(1.25)),
    "scales shifted by a group, one row": _group_shift,
    "scales transposed, one weight": _transposed_scales,
    "quantized twice, one weight": _quantized_twice,
    "left unquantized, one weight": _unquantized,
    "rows of q permuted, one layer": _heads_swapped,
    "weight of another layer": _layer_of_another,
    "shard cut, one row": _truncated,
    "embedding of one token": _table_row,
    "tie lost, head of one token": _tie_lost,
    "KV scale lost, V of one head": _value_scale_lost,
    "norm is NaN, one channel": _norm(_nan, "attn_norm"),
    "norm doubled, one channel": _norm(_doubled, "mlp_norm"),
    "norm folded without 1, one layer": _norm(_minus_one, "attn_norm"),
    "final norm doubled, one channel": _norm(_doubled, "final_norm"),
    "rope of another base": _rope,
    "BOS lost or added": _bos,
    "pre-tokenizer of another model": _pre_tokenizer,
    "normalizer of another model": _normalizer,
    "chat template does not open the answer": _template,
    "an end token lost": _end_lost,
}
