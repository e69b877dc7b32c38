"""Methods on plain arrays: figures of the reference table, and properties that hold for any input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from trivet.errors import ConfigError, QuantError
from trivet.quant.blas import Workers, single_threaded
from trivet.quant.grid import Grid, dequantize
from trivet.quant.methods.awq import quantize_clipped
from trivet.quant.methods.gptq import (
    GptqConfig,
    Hessian,
    _invert_upper,
    output_error,
    quantize_gptq,
    quantize_nearest,
    row_runs,
)
from trivet.quant.methods.rtn import quantize_rtn

Float32 = NDArray[np.float32]

# Relative error of Gaussian weights in groups of 32, 64, 128: signed maximum, with search, zero point.
TABLE = {
    2: ((0.362, 0.395, 0.424), (0.332, 0.351, 0.363), (0.406, 0.457, 0.503)),
    3: ((0.174, 0.192, 0.208), (0.164, 0.177, 0.186), (0.173, 0.195, 0.216)),
    4: ((0.0860, 0.0949, 0.1031), (0.0823, 0.0903, 0.0967), (0.0808, 0.0911, 0.1006)),
    8: ((0.0053, 0.0059, 0.0064), (0.0053, 0.0059, 0.0064), (0.0048, 0.0054, 0.0059)),
}


def gaussian(rows: int, columns: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def relative(weight: Float32, kept: Float32) -> float:
    return float(np.linalg.norm(kept - weight) / np.linalg.norm(weight))


def correlated(
    columns: int, exponent: float, seed: int = 0, rows: int | None = None
) -> tuple[Float32, Float32]:
    """Inputs with covariance eigenvalues i^-exponent, rotated axes and lognormal scales: two draws."""
    rng = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(rng.standard_normal((columns, columns)))
    roots = np.arange(1, columns + 1.0) ** (-exponent / 2)
    scales = np.exp(0.5 * rng.standard_normal(columns))
    draws = [
        (rng.standard_normal((rows or 4 * columns, columns)) * roots @ axes.T * scales).astype(
            np.float32
        )
        for _ in range(2)
    ]
    return draws[0], draws[1]


def gram(x: Float32) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    result: NDArray[np.float64] = wide.T @ wide
    return result


@pytest.mark.parametrize(("bits", "place"), list(itertools.product(TABLE, range(3))))
def test_round_to_nearest_has_the_known_error(bits: int, place: int) -> None:
    group = (32, 64, 128)[place]
    weight = gaussian(1024, 512)
    signed, searched, zero_point = (row[place] for row in TABLE[bits])
    nearest = quantize_rtn(weight, Grid(bits, group), search=False)
    assert relative(weight, dequantize(nearest)) == pytest.approx(signed, rel=0.02)
    asym = quantize_rtn(weight, Grid(bits, group, symmetric=False), search=False)
    assert relative(weight, dequantize(asym)) == pytest.approx(zero_point, rel=0.02)
    best = quantize_rtn(weight, Grid(bits, group))
    assert relative(weight, dequantize(best)) <= searched * 1.02


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", ["static", "desc_act", "none"])
def test_gptq_beats_round_to_nearest_on_fresh_inputs(
    bits: int, group: int | None, symmetric: bool, act_order: str
) -> None:
    weight, grid = gaussian(48, 128), Grid(bits, group, symmetric)
    seen, fresh = correlated(128, 1.0)
    config = GptqConfig(act_order=act_order)
    with single_threaded(), Workers(2) as workers:
        hessian = Hessian.of(gram(seen), len(seen), config)
        result = quantize_gptq(weight, hessian, grid, config, workers)
    nearest = dequantize(quantize_nearest(weight, grid))
    before = output_error(nearest - weight, gram(fresh))
    after = output_error(dequantize(result) - weight, gram(fresh))
    assert after < 0.7 * before
    assert result.codes.max() <= grid.max_code
    assert result.codes.min() >= (1 if bits == 8 and symmetric else 0)
    has_index = act_order == "desc_act" and group is not None
    assert (result.group_index is not None) == has_index


def test_static_act_order_and_refinement_each_lower_the_error() -> None:
    weight, grid = gaussian(256, 256), Grid(4, 64)
    seen, fresh = correlated(256, 1.0, rows=6144)
    errors = []
    with single_threaded(), Workers(1) as workers:
        for config in (
            GptqConfig(act_order="none", refine=0, search=False),
            GptqConfig(refine=0, search=False),
            GptqConfig(refine=0),
            GptqConfig(refine=2),
        ):
            hessian = Hessian.of(gram(seen), len(seen), config)
            result = quantize_gptq(weight, hessian, grid, config, workers)
            errors.append(output_error(dequantize(result) - weight, gram(fresh)))
    assert errors[1] < errors[0]
    assert errors[3] < errors[2] < errors[1] * 1.02
    nearest = output_error(dequantize(quantize_nearest(weight, grid)) - weight, gram(fresh))
    assert errors[0] < 0.5 * nearest
    assert errors[-1] < 0.35 * nearest


def test_gptq_gives_the_same_bits_for_any_number_of_threads() -> None:
    weight, grid = gaussian(2100, 64), Grid(4, 32)
    seen, _ = correlated(64, 1.0)
    config = GptqConfig()
    found = []
    for threads in (1, 2, 5):
        with single_threaded(), Workers(threads) as workers:
            hessian = Hessian.of(gram(seen), len(seen), config)
            found.append(quantize_gptq(weight, hessian, grid, config, workers))
    for other in found[1:]:
        np.testing.assert_array_equal(other.codes, found[0].codes)
        np.testing.assert_array_equal(other.scales, found[0].scales)


@pytest.mark.parametrize("rows", [1, 64, 159, 160, 576, 700, 1536])
def test_rows_are_worked_on_in_equal_runs(rows: int) -> None:
    """So that two threads end together; the borders depend on nothing but the rows."""
    runs = row_runs(rows)
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == rows
    sizes = [end - begin for begin, end in runs]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 320
    assert len(runs) >= (2 if rows >= 160 else 1)


@pytest.mark.parametrize("size", [1, 100, 129, 400])
def test_a_triangle_is_inverted_by_halves(size: int) -> None:
    rng = np.random.default_rng(size)
    triangle = np.triu(rng.standard_normal((size, size)) / size) + np.eye(size)
    inverse = _invert_upper(triangle)
    np.testing.assert_allclose(inverse @ triangle, np.eye(size), atol=1e-12)
    assert not np.tril(inverse, -1).any()


def test_dead_columns_are_zero_and_cost_nothing() -> None:
    weight = gaussian(16, 64)
    seen, _ = correlated(64, 1.0)
    seen[:, 5] = 0
    config = GptqConfig()
    with single_threaded(), Workers(1) as workers:
        hessian = Hessian.of(gram(seen), len(seen), config)
        result = quantize_gptq(weight, hessian, Grid(4, 32), config, workers)
    assert hessian.dead.tolist().count(True) == 1
    assert np.abs(dequantize(result)[:, 5]).max() < np.abs(weight[:, 5]).max()


def test_damp_is_raised_only_as_needed_and_told() -> None:
    config = GptqConfig(damp=1e-17, shrink=0)
    few = np.ones((3, 64), np.float32)  # of rank one, exactly
    hessian = Hessian.of(gram(few), len(few), config)
    assert hessian.raised > 0
    assert hessian.damp > config.damp
    enough, _ = correlated(64, 0.5)
    assert Hessian.of(gram(enough), len(enough), GptqConfig()).raised == 0


def test_correlations_are_trusted_less_than_sizes() -> None:
    """Off the diagonal the Gram matrix shrinks; on inputs of other correlations the error falls."""
    weight, grid = gaussian(128, 192), Grid(4, 64)
    seen, _ = correlated(192, 0.5, rows=384)
    _, other = correlated(192, 0.5, seed=1)
    errors = []
    with single_threaded(), Workers(1) as workers:
        for shrink in (0.0, 0.15):
            config = GptqConfig(shrink=shrink)
            hessian = Hessian.of(gram(seen), len(seen), config)
            off = ~np.eye(192, dtype=bool)
            mean = gram(seen) / len(seen)
            np.testing.assert_allclose(hessian.gram[off], mean[off] * (1 - shrink))
            result = quantize_gptq(weight, hessian, grid, config, workers)
            errors.append(output_error(dequantize(result) - weight, gram(other)))
    assert errors[1] < errors[0]


def test_no_tokens_and_not_finite_inputs_are_refused() -> None:
    with pytest.raises(QuantError, match="no token"):
        Hessian.of(np.zeros((8, 8)), 0, GptqConfig())
    with pytest.raises(QuantError, match="not finite"):
        Hessian.of(np.full((8, 8), np.nan), 4, GptqConfig())


def test_clipping_is_never_worse_on_what_was_seen() -> None:
    weight = gaussian(320, 128)
    weight[:, 7] *= 6
    seen, _ = correlated(128, 0.5)
    config, grid = GptqConfig(), Grid(3, 64)
    hessian = Hessian.of(gram(seen), len(seen), config)
    with single_threaded(), Workers(1) as one, Workers(3) as three:
        plain = quantize_clipped(weight, grid, hessian, one, clip=False)
        clipped = quantize_clipped(weight, grid, hessian, one, clip=True)
        again = quantize_clipped(weight, grid, hessian, three, clip=True)
    np.testing.assert_array_equal(again.codes, clipped.codes)
    np.testing.assert_array_equal(again.scales, clipped.scales)
    own = np.zeros_like(hessian.gram)  # the search sees each group's own part
    for begin in range(0, 128, 64):
        part = slice(begin, begin + 64)
        own[part, part] = hessian.gram[part, part]
    assert output_error(dequantize(clipped) - weight, own) < output_error(
        dequantize(plain) - weight, own
    )


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="bits: 5"):
        Grid(5, 64)
    with pytest.raises(ConfigError, match="group_size: 48"):
        Grid(4, 48)
    with pytest.raises(ConfigError, match="act_order"):
        GptqConfig(act_order="dynamic")
    with pytest.raises(ConfigError, match="damp"):
        GptqConfig(damp=0)
    with pytest.raises(ConfigError, match="shrink"):
        GptqConfig(shrink=1)
    with pytest.raises(QuantError, match=r"group_size 128 does not divide 576.*32, 64, row"):
        Grid(4, 128).group_of(576)


def test_a_weight_of_zeros_stays_zero() -> None:
    zeros = np.zeros((4, 64), np.float32)
    for grid in (Grid(4, 32), Grid(4, 32, symmetric=False)):
        assert not dequantize(quantize_rtn(zeros, grid)).any()


def test_a_scale_beyond_fp16_is_refused() -> None:
    with pytest.raises(QuantError, match="too large for fp16"):
        quantize_rtn(gaussian(2, 32) * np.float32(1e7), Grid(4, 32))
