"""A recipe survives its file; a bad file is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.errors import CheckpointError, ConfigError, TrivetError
from trivet.recipe import Recipe, is_recipe, load_recipe

_SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.booleans(),
)
_KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
_TABLES = st.dictionaries(
    _KEYS,
    st.one_of(
        _SCALARS,
        st.lists(_SCALARS, max_size=3),
        st.dictionaries(_KEYS, _SCALARS, max_size=3),
        st.lists(st.dictionaries(_KEYS, _SCALARS, max_size=3), min_size=1, max_size=3),
    ),
    max_size=4,
)


def _roundtrip(recipe: Recipe, folder: Path) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    return load_recipe(path)


def test_all_fields_survive(tmp_path: Path) -> None:
    recipe = Recipe(
        model="demo",
        weights="w4a8-g32-min",
        kv="int8",
        draft="ngram",
        draft_tokens=4,
        max_model_len=4096,
        max_num_seqs=8,
        max_step_tokens=256,
        max_prefill_chunk=0,
        workers="mixed:1",
        evidence={"machine": {"cpu": 'a "b" \\c\n'}, "rungs": [{"name": "bf16", "gain": 1.5}]},
    )
    assert _roundtrip(recipe, tmp_path) == recipe
    assert recipe.settings()["max_prefill_chunk"] == 0


@given(evidence=_TABLES)
def test_any_evidence_survives(tmp_path_factory: pytest.TempPathFactory, evidence: object) -> None:
    recipe = Recipe(model="demo", evidence=evidence)  # type: ignore[arg-type]
    assert _roundtrip(recipe, tmp_path_factory.mktemp("recipe")) == recipe


def test_a_relative_model_is_taken_from_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    assert _roundtrip(Recipe(model="model.gguf"), tmp_path).model == str(tmp_path / "model.gguf")
    assert _roundtrip(Recipe(model="demo"), tmp_path).model == "demo"
    (tmp_path / "folder").mkdir()
    assert _roundtrip(Recipe(model="folder"), tmp_path).model == "folder"  # not a model
    for name in ("folder", "demo"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert _roundtrip(Recipe(model="folder"), tmp_path).model == str(tmp_path / "folder")
    assert _roundtrip(Recipe(model="demo"), tmp_path).model == "demo"  # reserved


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "version is missing; add version = 1"),
        ("version = true\nmodel = 'demo'", "version must be 1, found True"),
        ("version = 1.0\nmodel = 'demo'", "version must be 1, found 1.0"),
        ("version = 1\nmodel = ''", "model is empty"),
        ("version = 2\nmodel = 'demo'", "version"),
        ("version = 1", "model is missing"),
        ("version = 1\nmodel = 'demo'\nweight = 'bf16'", "unknown key weight"),
        ("version = 1\nmodel = 'demo'\n[limits]\nmax_seqs = 1", "unknown key limits.max_seqs"),
        ("version = 1\nmodel = 3", "model must be a string"),
        ("version = 1\nmodel = 'demo'\n[limits]\nmax_num_seqs = '8'", "must be an integer"),
        ("version = 1\nmodel = 'demo'\n[limits]\nmax_num_seqs = true", "must be an integer"),
        ("version = 1\nmodel = 'demo'\n[limits]\nmax_num_seqs = -8", "must not be negative"),
        ("version = 1\nmodel = 'demo'\nlimits = 3", "limits must be a table"),
        ("version = 1\nmodel = 'demo'\nweights = 'w3'", "weights"),
        ("version = 1\nmodel = 'demo'\nkv = 'fp4'", "kv"),
        ("version = 1\nmodel = 'demo'\n[speculation]\ndraft = 'magic'", "draft"),
        ("version = = 1", "not valid TOML"),
        ("[" * 5000, "not valid TOML"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(TrivetError, match=reason) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, CheckpointError | ConfigError)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    for name in ("absent.toml", "latin.toml", "."):
        with pytest.raises(CheckpointError):
            load_recipe(tmp_path / name)


def test_what_counts_as_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("")
    assert is_recipe(str(tmp_path / "a.toml"))
    assert not is_recipe(str(tmp_path / "b.toml"))
    assert not is_recipe("demo")
