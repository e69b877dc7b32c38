"""Damage of one group is found in the weights, and good formats are not accused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest

from support.grids import rounded
from support.tiny_models import Variant, build_folder
from trivet.checkpoint import resolve_model
from trivet.checkpoint.formats import write
from trivet.config import ModelConfig, WeightFormat
from trivet.evaluate.checks import identity, weights
from trivet.evaluate.corruptions import CORRUPTIONS, corrupted
from trivet.evaluate.results import Finding
from trivet.evaluate.sensitivity import measure_sensitivity
from trivet.evaluate.subject import LocalSubject
from trivet.loader import LoadedModel, load_model
from trivet.models import open_model
from trivet.models.gguf_export import write_gguf
from trivet.models.reference import to_float
from trivet.native.packing import LINEARS
from trivet.native.reference_linear import to_bf16
from trivet.native.weights import WeightTensor
from trivet.quant.rtn import convert

TEXT_IDS = [(7 * at) % 300 + 3 for at in range(96)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support import tiny_models

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_models.build_folder(path, "smollm2")
    return path


@functools.cache
def _load(folder: Path, form: str) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), weights=form, threads=1))


@pytest.mark.parametrize(
    "form",
    [
        "bf16", "w8a8", "w8a8+row", "w8a8-g32", "w4a8-g32", "w4a8-g32-zp",
        "w8a8-g16-min", "w4a8-g16", "w4a8-row-zp", "w4a16-g64-min", "fp8-g32",
    ],
)  # fmt: skip
def test_good_formats_pass(folder: Path, form: str) -> None:
    found = weights.check(_load(folder, form), _load(folder, "bf16"), TEXT_IDS)
    assert found.finding is Finding.PASS, found.reason
    assert found.metrics["groups"] > 100


@pytest.mark.parametrize("form", ["w8a8-g32", "w4a8-g32"])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_the_smallest_damage_is_found(folder: Path, kind: str, form: str) -> None:
    base, model = _load(folder, "bf16"), _load(folder, form)
    broken = corrupted(model, kind, seed=1)
    found = [
        weights.check(broken, base, TEXT_IDS),
        identity.check(LocalSubject(broken, 64), LocalSubject(base, 64)),
    ]
    assert Finding.REJECT in [check.finding for check in found], found
    whole = weights.check(model, base, TEXT_IDS)  # the file itself is as it was
    assert whole.finding is Finding.PASS, whole.reason


def test_a_group_of_small_weights_is_held_against_its_own_scale() -> None:
    """Off by one in a group a tenth as large as the others, whose scale is small beside them."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((64, 128)).astype(np.float32)
    values[5, 32:64] *= 0.1
    good = convert(values, WeightFormat.parse("w8a8-g32")).weight
    assert good.scales is not None
    assert good.scales[5, 1] < 0.01
    broken = dataclasses.replace(good, codes=good.codes.copy())
    broken.codes[5, 32:64] = np.minimum(broken.codes[5, 32:64], 126) + 1
    wanted = WeightTensor(WeightFormat.parse("bf16"), to_bf16(values))
    ones = np.ones(128, np.float32)
    for weight, is_sound in ((good, True), (broken, False)):
        found = weights._Audit()
        _, rms, mean = weights._errors(weight, wanted, ones, (np.ones(64, np.float32), ones))
        weights._find_outliers(found, "w", rms, mean, weights._FLOORS[8])
        assert (found.faults == []) == is_sound


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel, LoadedModel]:
    """A float model, its Q4_K_M mix (v apart from q and k), and its 4-bit codes in act-order."""
    wide = Variant(hidden=256, heads=4, kv_heads=2, ffn=256, layers=2)
    path = tmp_path_factory.mktemp("mixed")
    source = build_folder(path / "hf", wide)
    write_gguf(path / "m.gguf", source, "Q4_K_M")
    model = open_model(resolve_model(source))
    grids = {}
    for layer, role in itertools.product(range(2), ("q", "k", "v", "o", "gate", "up", "down")):
        values = to_float(model.matrix(role, layer))
        k = values.shape[1]
        order = np.random.default_rng(layer + len(role)).permutation(np.arange(k) // 32)
        grids[model.file_name(role, layer)] = rounded(values, 4, 32, order=order.astype(np.int32))
    write(path / "gptq", source_folder=source, weights=grids, format="gptq")
    base = load_model(ModelConfig(model=str(source), weights="bf16", threads=1))
    mix, ordered = (
        load_model(ModelConfig(model=str(path / name), threads=1)) for name in ("m.gguf", "gptq")
    )
    assert "layers.1.v" in mix.packed.tensors
    assert ordered.packed.tensors["layers.0.o"].order is not None
    assert "layers.0.up" in ordered.packed.tensors  # its order is not the gate's
    return base, mix, ordered


def test_roles_that_lie_apart_and_columns_in_another_order_pass(
    mixed: tuple[LoadedModel, LoadedModel, LoadedModel],
) -> None:
    base, mix, ordered = mixed
    fused = load_model(dataclasses.replace(mix.config, weights="w8a8-g32"))
    assert "layers.1.qkv" in fused.packed.tensors
    for own, other in ((mix, base), (fused, mix), (ordered, base), (mix, mix), (ordered, ordered)):
        found = weights.check(own, other, TEXT_IDS)
        assert found.finding is Finding.PASS, found.reason
    for own in (mix, ordered):
        units = measure_sensitivity(own, base, TEXT_IDS[:40])
        assert {unit.name for unit in units} == {
            f"layers.{layer}.{linear}" for layer in range(2) for linear in LINEARS
        }
        assert all(unit.saved_bytes > 0 and unit.mean_kl > 0 for unit in units)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        "scale doubled, one group", "quantized twice, one weight", "rows of q permuted, one layer",
        "weight of another layer", "KV scale lost, V of one head", "left unquantized, one weight",
    ],
)  # fmt: skip
def test_damage_is_found_in_roles_that_lie_apart(
    mixed: tuple[LoadedModel, LoadedModel, LoadedModel], kind: str, which: int
) -> None:
    found = weights.check(corrupted(mixed[which], kind, seed=2), mixed[0], TEXT_IDS)
    assert found.finding is Finding.REJECT, found.metrics


def test_an_embedding_stored_twice_is_no_damage(folder: Path) -> None:
    base, model = _load(folder, "bf16"), _load(folder, "w8a8-g32")
    assert "embed" not in base.packed.file.tensors
    tensors = dict(model.packed.file.tensors)
    tensors["embed"] = dataclasses.replace(tensors["head"], name="embed")
    file = dataclasses.replace(model.packed.file, tensors=tensors)
    two = dataclasses.replace(model, packed=dataclasses.replace(model.packed, file=file))
    for own, other in ((two, base), (two, model), (model, two)):
        found = weights.check(own, other, TEXT_IDS)
        assert found.finding is Finding.PASS, found.reason


def test_a_zero_point_of_a_row_is_found(folder: Path) -> None:
    broken = corrupted(_load(folder, "w4a8-row-zp"), "zero off by one, one group", seed=1)
    found = weights.check(broken, _load(folder, "bf16"), TEXT_IDS)
    assert found.finding is Finding.REJECT, found.metrics


def test_another_format_than_asked_for_is_named(folder: Path) -> None:
    model = _load(folder, "w8a8-g32")
    claimed = dataclasses.replace(
        model, config=dataclasses.replace(model.config, weights="w4a8-g32")
    )
    found = weights.check(claimed, _load(folder, "bf16"), TEXT_IDS)
    assert found.finding is Finding.REJECT
    assert "not w4a8-g32" in found.reason


def test_sensitivity_names_the_damaged_unit_first(folder: Path) -> None:
    base = _load(folder, "bf16")
    model = corrupted(_load(folder, "w8a8-g32"), "weight of another layer", seed=3)
    units = measure_sensitivity(model, base, TEXT_IDS)
    assert len(units) == 4 * base.packed.spec.num_layers
    found = weights.check(model, base, TEXT_IDS)
    assert units[0].mean_kl > 5 * units[1].mean_kl
    assert units[0].name in str(found.metrics["unlike"]) + found.reason
    assert all(unit.saved_bytes > 0 for unit in units)
