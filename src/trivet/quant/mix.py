"""``--mixed``: the formats that units may have, measured once and kept for the next budget."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trivet import files
from trivet.checkpoint import ModelSource, Tokenizer
from trivet.checkpoint.cache import cache_key, cache_paths
from trivet.errors import ConfigError
from trivet.models import Model
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.calibrate import CalibrationConfig, CalibrationSet
from trivet.quant.finished import VERSION
from trivet.quant.folder import Progress
from trivet.quant.grid import Grid
from trivet.quant.methods.mixed import Option, Unit, measure_units, mixed_plan, require_room
from trivet.quant.plan import Plan, Target, make_plan, parse_target
from trivet.quant.recipe import Recipe

# How units are measured: what was kept of another way is not read.
_RULE = "own divergence, output errors"
_TOKENS = 1 << 14  # to calibrate units on; an eighth as many are measured on


def mix(
    source: ModelSource,
    model: Model,
    plan: Plan,
    recipe: Recipe,
    own: Target,
    names: str,
    max_bytes: int | None,
    calibrate: CalibrationConfig,
    threads: int,
    progress: Progress,
) -> Plan:
    """The plan with each unit in its own format or one of ``names``, separated by commas.

    Raises ConfigError: no budget or one below the smallest mix, a format that cannot be one of them.
    """
    others = [parse_target(name.strip(), "mixed") for name in names.split(",")]
    grids = [other for other in others if isinstance(other, Grid) and other != own]
    if not isinstance(own, Grid) or len(grids) < len(others) or len(set(grids)) < len(grids):
        raise ConfigError(
            "mixed",
            names,
            "integer formats other than that of --bits, each once, as w4-g32,w8-g64",
        )
    if max_bytes is None:
        raise ConfigError("mixed", names, "together with --max-bytes")
    # Before the measuring: names the linear whose columns the groups of a format do not divide.
    for grid in grids:
        make_plan(model.spec, grid)
    require_room(plan, [own, *grids], max_bytes)
    few = dataclasses.replace(calibrate, samples=max(1, _TOKENS // calibrate.window))
    texts = few.build(Tokenizer(model.tokenizer_data(), source.path), model.spec.max_positions)
    units = _units(source, model, texts, [own, *grids], recipe, threads, progress)
    return mixed_plan(plan, units, max_bytes)


def _units(
    source: ModelSource,
    model: Model,
    texts: CalibrationSet,
    grids: Sequence[Grid],
    recipe: Recipe,
    threads: int,
    progress: Progress,
) -> list[Unit]:
    """Measured, or read from an earlier measuring of just this."""
    facts = [
        _RULE, VERSION, cache_key(source, "sensitivity"), texts.sha256,
        [grid.name for grid in grids], recipe.method, dataclasses.asdict(recipe.gptq),
        recipe.clip, np.__version__,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    kept = [path.with_suffix(".json") for path in cache_paths(source, f"sensitivity-{digest[:16]}")]
    for path in kept:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return _read(path, grids)

    def advance(done: int, total: int) -> None:
        progress("measuring sensitivity", done, total)

    with single_threaded(), Workers(threads) as workers:
        units = measure_units(model, texts, grids, recipe, workers, advance)
    for path in kept:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, json.dumps(_as_json(units), allow_nan=False))
            break
    return units


def _as_json(units: Sequence[Unit]) -> list[dict[str, Any]]:
    return [
        {
            "layer": unit.layer,
            "roles": unit.roles,
            "options": [[option.kl, option.bytes] for option in unit.options],
        }
        for unit in units
    ]


def _read(path: Path, grids: Sequence[Grid]) -> list[Unit]:
    return [
        Unit(
            unit["layer"],
            tuple(unit["roles"]),
            tuple(
                Option(grid, float(kl), int(size))
                for grid, (kl, size) in zip(grids, unit["options"], strict=True)
            ),
        )
        for unit in json.loads(path.read_text("utf-8"))
    ]
