"""ggml's types: values and bytes equal the gguf package's, and the searches find good scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from trivet.checkpoint.ggml import FLOAT_TYPES, TYPES, decode, encode, kquants
from trivet.errors import QuantError

Float32 = NDArray[np.float32]
BLOCKS = [name for name in TYPES if name not in FLOAT_TYPES]
K_QUANTS = [name for name in BLOCKS if name.endswith("_K")]
REFERENCE = [name for name in TYPES if name not in K_QUANTS]  # the package encodes these


def _values(rows: int = 24, columns: int = 512, seed: int = 0) -> Float32:
    """Ordinary rows, then zeros, constants, one sign, tiny, large, outliers and -0."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    x[1] = 0
    x[2, :256] = 0
    x[3], x[4] = 0.25, -0.25
    x[5], x[6] = np.abs(x[5]), -np.abs(x[6])
    x[7] *= np.float32(1e-8)
    x[8] *= np.float32(1e4)
    x[9, ::37] = 8
    x[10, ::2] = -0.0
    x[11] = rng.laplace(size=columns).astype(np.float32)
    x[12, 5:] = 0
    return x


def _theirs(kind: str, raw: NDArray[np.uint8]) -> Float32:
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return np.asarray(values, np.float32)


def _assert_same_bits(ours: Float32, theirs: Float32) -> None:
    nan = np.isnan(theirs)
    assert (np.isnan(ours) == nan).all()
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_sizes_and_ids_equal_the_package() -> None:
    for kind in TYPES.values():
        theirs = gguf.GGMLQuantizationType[kind.name]
        assert kind.id == theirs.value
        assert (kind.values, kind.num_bytes) == gguf.GGML_QUANT_SIZES[theirs]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_any_bytes_decode_as_in_the_package(kind: str) -> None:
    """Random bytes: every code, every scale, negative and NaN ones too."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (40, TYPES[kind].row_bytes(512)), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    _assert_same_bits(decode(kind, raw), _theirs(kind, raw))


@pytest.mark.parametrize("kind", list(TYPES))
def test_encoded_values_decode_as_in_the_package(kind: str) -> None:
    x = _values()
    for importance in (None, np.linspace(0, 2, x.shape[1], dtype=np.float32)):
        raw = encode(kind, x, importance)
        assert raw.shape == (len(x), TYPES[kind].row_bytes(x.shape[1]))
        _assert_same_bits(decode(kind, raw), _theirs(kind, raw))


@pytest.mark.parametrize("kind", REFERENCE)
def test_bytes_equal_the_package(kind: str) -> None:
    x = _values()
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(encode(kind, x), want.view(np.uint8).reshape(len(x), -1))


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_on_the_grid_stays(kind: str) -> None:
    """Zeros and constants are exact; encoding what was decoded changes next to nothing."""
    x = _values()
    kept = decode(kind, encode(kind, x))
    np.testing.assert_array_equal(kept[1], 0)
    again = decode(kind, encode(kind, kept))
    scale = np.abs(x).max(axis=1, keepdims=True)
    share = {"Q2_K": 0.2, "Q3_K": 0.1}.get(kind, 0.03)
    assert (np.abs(again - kept) <= share * scale + 1e-30).mean() > 0.99


# What llama.cpp's own quantizer (ggml_quantize_chunk of llama-cpp-python 0.3.36) leaves of the same
# values: relative error without importance, and weighted relative error with it.
_LLAMA_CPP = {
    "Q4_0": (0.08618, 0.07846),
    "Q5_0": (0.04289, 0.03884),
    "Q2_K": (0.29682, 0.24018),
    "Q3_K": (0.15137, 0.13569),
    "Q4_K": (0.07155, 0.06538),
    "Q5_K": (0.03629, 0.03330),
    "Q6_K": (0.01778, 0.01629),
}
# Here ggml's weights of the error and the importance alone disagree by a little.
_NEARLY = {"Q4_1": (0.07824, 0.06444), "Q5_1": (0.03804, 0.03131)}


def _gaussian() -> tuple[Float32, Float32]:
    rng = np.random.default_rng(0)
    importance = np.exp(rng.standard_normal(1536)).astype(np.float32)
    return (rng.standard_normal((64, 1536)) * 0.05).astype(np.float32), importance


def _error(x: Float32, kept: Float32, weights: Float32 | float = 1.0) -> float:
    change = (kept - x).astype(np.float64)
    wide = x.astype(np.float64)
    return float(np.sqrt((change**2 * weights).sum() / (wide**2 * weights).sum()))


@pytest.mark.parametrize("kind", [*_LLAMA_CPP, *_NEARLY])
def test_errors_are_at_most_those_of_llama_cpp(kind: str) -> None:
    x, importance = _gaussian()
    plain, weighted = (_LLAMA_CPP | _NEARLY)[kind]
    room = 1.005 if kind in _NEARLY else 1.0
    assert _error(x, decode(kind, encode(kind, x))) <= plain + 5e-6
    found = _error(x, decode(kind, encode(kind, x, importance)), importance)
    assert found <= weighted * room + 5e-6


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k != "Q8_0"])
def test_importance_lowers_the_error_that_matters(kind: str) -> None:
    x, importance = _gaussian()
    plain = _error(x, decode(kind, encode(kind, x)), importance)
    assert _error(x, decode(kind, encode(kind, x, importance)), importance) < 0.98 * plain


@pytest.mark.parametrize("kind", BLOCKS)
def test_columns_without_importance_are_not_lost(kind: str) -> None:
    x, importance = _gaussian()
    importance[:256] = 0
    kept = decode(kind, encode(kind, x, importance))
    assert _error(x[:, :256], kept[:, :256]) < 0.5
    nothing = decode(kind, encode(kind, x, np.zeros_like(importance)))
    assert _error(x, nothing) < 0.5


@pytest.mark.parametrize("kind", list(TYPES))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(kind: str, value: float) -> None:
    x = _values()
    x[3, 17] = value
    with pytest.raises(QuantError, match="NaN or infinite"):
        encode(kind, x)


@pytest.mark.parametrize("kind", [k for k in TYPES if k != "F32"])
def test_values_too_large_for_the_type_are_refused(kind: str) -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, 3] = 3.4e38 if kind == "BF16" else 1e8
    with pytest.raises(QuantError, match=f"too large for {kind}"):
        encode(kind, x)


def test_runs_do_not_change_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, importance = _gaussian()
    for kind in ("Q4_1", "Q4_K", "Q6_K"):
        whole = encode(kind, x, importance)
        monkeypatch.setattr("trivet.checkpoint.ggml._RUN_VALUES", 1 << 12)
        np.testing.assert_array_equal(encode(kind, x, importance), whole)
        np.testing.assert_array_equal(encode(kind, x[:7], importance), whole[:7])
        monkeypatch.undo()


def test_q4_k_splits_into_codes_scales_and_minima() -> None:
    x, _ = _gaussian()
    raw = encode("Q4_K", x).reshape(-1, 144)
    codes, scales, minima = kquants.split("Q4_K", raw)
    assert minima is not None
    values = scales[:, :, None] * codes.reshape(-1, 8, 32) - minima[:, :, None]
    np.testing.assert_array_equal(values.reshape(x.shape), decode("Q4_K", raw.reshape(64, -1)))
