"""Which type each tensor of a named mix gets: llama.cpp's rules, by layer, tensor and width."""

from __future__ import annotations

from collections import Counter

import pytest

from trivet.checkpoint.ggml.mixes import (
    MIXES,
    ModelShape,
    file_type,
    mix_name,
    tensor_types,
)
from trivet.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]


def _shapes(layers: int, hidden: int = 4096, ffn: int = 14336, tied: bool = False) -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": (1000, hidden),
        "output_norm.weight": (hidden,),
        "rope_freqs.weight": (64,),
    }
    if not tied:
        shapes["output.weight"] = (1000, hidden)
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (hidden, hidden),
            f"blk.{i}.attn_q.bias": (hidden,),
            f"blk.{i}.attn_k.weight": (hidden // 4, hidden),
            f"blk.{i}.attn_v.weight": (hidden // 4, hidden),
            f"blk.{i}.attn_output.weight": (hidden, hidden),
            f"blk.{i}.ffn_gate.weight": (ffn, hidden),
            f"blk.{i}.ffn_up.weight": (ffn, hidden),
            f"blk.{i}.ffn_down.weight": (hidden, ffn),
        }
    return shapes


def _kinds(
    mix: str, shapes: Shapes, layers: int = 32, queries: int = 4, importance: bool = False
) -> dict[str, str]:
    model = ModelShape(layers, queries)
    chosen = tensor_types(mix, shapes, model, has_importance=importance)
    return {name: choice.kind for name, choice in chosen.items()}


def _layers(kinds: dict[str, str], part: str, kind: str) -> list[int]:
    return [
        int(name.split(".")[1])
        for name, found in kinds.items()
        if name.endswith(f".{part}.weight") and found == kind
    ]


# n = 32: the first and last eighth, and every third between.
_MORE = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]


def test_q4_k_m_of_an_eight_billion_llama() -> None:
    kinds = _kinds("Q4_K_M", _shapes(32))
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["token_embd.weight"] == "Q4_K"
    assert _layers(kinds, "attn_v", "Q6_K") == _MORE
    assert _layers(kinds, "ffn_down", "Q6_K") == _MORE
    assert Counter(kinds.values())["Q6_K"] == 33
    assert kinds["blk.0.attn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"
    assert kinds["blk.5.attn_q.bias"] == "F32"


@pytest.mark.parametrize(
    ("mix", "part", "kind", "layers"),
    [
        ("Q4_K_S", "attn_v", "Q5_K", [0, 1, 2, 3]),
        ("Q4_K_S", "ffn_down", "Q5_K", [0, 1, 2, 3]),
        ("Q5_K_M", "attn_v", "Q6_K", _MORE),
        ("Q5_K_S", "attn_v", "Q5_K", list(range(32))),
        ("Q3_K_M", "attn_v", "Q5_K", [0, 1]),
        ("Q3_K_M", "attn_v", "Q4_K", list(range(2, 32))),
        ("Q3_K_M", "ffn_down", "Q5_K", [0, 1]),
        ("Q3_K_M", "ffn_down", "Q4_K", list(range(2, 32))),
        ("Q3_K_M", "attn_output", "Q4_K", list(range(32))),
        ("Q3_K_L", "ffn_down", "Q5_K", list(range(32))),
        ("Q3_K_L", "attn_output", "Q5_K", list(range(32))),
        ("Q3_K_S", "ffn_down", "Q3_K", list(range(32))),
        ("Q2_K", "attn_v", "Q4_K", list(range(32))),
        ("Q2_K", "attn_output", "Q3_K", list(range(32))),
        ("Q2_K", "attn_q", "Q2_K", list(range(32))),
        ("Q6_K", "ffn_down", "Q6_K", list(range(32))),
        ("Q4_0", "ffn_down", "Q4_0", list(range(32))),
    ],
)
def test_exceptions_by_layer(mix: str, part: str, kind: str, layers: list[int]) -> None:
    assert _layers(_kinds(mix, _shapes(32)), part, kind) == layers


def test_few_queries_per_head_and_importance_change_rules() -> None:
    assert _kinds("Q2_K", _shapes(4), 4, queries=1)["blk.0.attn_v.weight"] == "Q3_K"
    kinds = _kinds("Q4_0", _shapes(32), importance=True)
    assert _layers(kinds, "ffn_down", "Q4_1") == [0, 1, 2, 3]
    large = tensor_types("Q4_K_S", _shapes(80), ModelShape(80, 8, is_70b=True))
    assert {large[f"blk.{i}.attn_v.weight"].kind for i in range(80)} == {"Q5_K"}


def test_a_tied_head_takes_the_type_of_the_output() -> None:
    assert _kinds("Q4_K_M", _shapes(2, tied=True), 2)["token_embd.weight"] == "Q6_K"
    assert _kinds("Q8_0", _shapes(2, tied=True), 2)["token_embd.weight"] == "Q8_0"
    assert _kinds("F16", _shapes(2, tied=True), 2)["token_embd.weight"] == "F16"


def test_widths_that_are_no_multiple_of_256_fall_back() -> None:
    shapes = _shapes(30, hidden=576, ffn=1536, tied=True)
    chosen = tensor_types("Q4_K_M", shapes, ModelShape(30, 3))
    assert chosen["token_embd.weight"].kind == "Q8_0"
    assert chosen["blk.10.attn_q.weight"].kind == "Q5_0"
    assert chosen["blk.10.attn_q.weight"].wanted == "Q4_K"
    assert chosen["blk.0.attn_v.weight"].kind == "Q8_0"
    assert chosen["blk.0.ffn_down.weight"].kind == "Q6_K"
    fallbacks = {"Q2_K": "Q4_0", "Q3_K_S": "Q4_0", "Q5_K_S": "Q5_1", "Q6_K": "Q8_0"}
    for mix, kind in fallbacks.items():
        assert _kinds(mix, shapes, 30, 3)["blk.10.ffn_up.weight"] == kind
    odd = tensor_types("Q4_K_M", _shapes(1, hidden=100, ffn=100), ModelShape(1, 1))
    assert odd["blk.0.ffn_down.weight"].kind == "F16"
    assert odd["output.weight"].kind == "F16"


def test_a_pure_mix_has_one_type() -> None:
    kinds = _kinds("pure:Q4_K", _shapes(8), 8)
    assert set(kinds.values()) == {"Q4_K", "F32"}
    assert file_type("pure:Q4_K") == 14


def test_kept_layers_are_fixed_by_pattern() -> None:
    keep = [(r"blk\.3\.", "Q8_0"), ("ffn_down", "q6_k")]
    chosen = tensor_types("Q4_0", _shapes(8), ModelShape(8, 4), keep=keep)
    assert chosen["blk.3.ffn_down.weight"].kind == "Q8_0"
    assert chosen["blk.4.ffn_down.weight"].kind == "Q6_K"
    assert chosen["blk.4.ffn_up.weight"].kind == "Q4_0"
    assert chosen["blk.3.attn_norm.weight"].kind == "F32"


@pytest.mark.parametrize(
    ("pattern", "kind", "word"), [("nothing", "Q8_0", "matches"), ("ffn", "Q9_X", "Q8_0")]
)
def test_a_pattern_must_match_and_its_type_exist(pattern: str, kind: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        tensor_types("Q4_0", _shapes(2), ModelShape(2, 4), keep=[(pattern, kind)])
    with pytest.raises(ConfigError, match="regular expression"):
        tensor_types("Q4_0", _shapes(2), ModelShape(2, 4), keep=[("(", "Q8_0")])


def test_names_of_mixes() -> None:
    assert mix_name("q4_k_m") == mix_name("Q4_K") == "Q4_K_M"
    assert mix_name("PURE:q4_k") == "pure:Q4_K"
    assert {name: file_type(name) for name in MIXES} == {
        "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
        "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
        "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    }  # fmt: skip
    for name in ("Q4_K_X", "IQ4_XS", "", "pure:", "pure:Q4_K_M"):
        with pytest.raises(ConfigError, match="gguf type"):
            mix_name(name)
