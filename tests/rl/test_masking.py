"""Masked statistics against NumPy on the compacted float64 values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.rl.masking import (
    explained_variance,
    last_valid_index,
    masked_max,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    require_finite_scores,
)

property_test = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def masked_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """x[B, R] float32 with NaN or infinity in masked slots, and mask[B, R] with gaps and empty rows."""
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    cells = num_rows * num_columns
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=cells, max_size=cells)))
    x = torch.tensor(
        draw(st.lists(st.floats(-1e4, 1e4, width=32), min_size=cells, max_size=cells)), dtype=torch.float32
    )
    x[~mask] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return x.view(num_rows, num_columns), mask.view(num_rows, num_columns)


def compact(x: Tensor, mask: Tensor) -> np.ndarray:
    return np.array([float(v) for v, m in zip(x.flatten(), mask.flatten(), strict=True) if m], dtype=np.float64)


@property_test
@given(masked_batches())
def test_sum_mean_var_max(batch: tuple[Tensor, Tensor]) -> None:
    x, mask = batch
    kept = compact(x, mask)
    assert masked_sum(x, mask).dtype == torch.float64
    np.testing.assert_allclose(masked_sum(x, mask), kept.sum(), rtol=1e-12, atol=1e-9)
    for row in range(x.shape[0]):
        np.testing.assert_allclose(
            masked_sum(x, mask, dim=1)[row], compact(x[row], mask[row]).sum(), rtol=1e-12, atol=1e-9
        )
    assert float(masked_max(x, mask)) == (kept.max() if kept.size else -np.inf)
    if kept.size:
        np.testing.assert_allclose(masked_mean(x, mask), kept.mean(), rtol=1e-12, atol=1e-9)
    else:
        assert masked_mean(x, mask).isnan()
    if kept.size > 1:
        np.testing.assert_allclose(masked_var(x, mask), kept.var(ddof=1), rtol=1e-9, atol=1e-12)
    else:
        assert masked_var(x, mask).isnan()


@property_test
@given(masked_batches())
def test_whiten(batch: tuple[Tensor, Tensor]) -> None:
    x, mask = batch
    kept = compact(x, mask)
    whitened = masked_whiten(x, mask)
    assert whitened.dtype == x.dtype
    assert bool((whitened[~mask] == 0).all())
    if kept.size == 0:
        return
    expected = kept - kept.mean()
    if kept.size > 1 and kept.std(ddof=1) > 1e-6 * np.abs(kept).max():
        expected = expected / kept.std(ddof=1)
    np.testing.assert_allclose(compact(whitened, mask), expected, rtol=1e-5, atol=1e-6)


def test_whiten_is_exact_far_from_zero() -> None:
    """Sum-of-squares in fp32 would lose the spread of 1 beside the offset of 1e4 entirely."""
    x = torch.tensor([[10001.0, 9999.0, 10001.0, 9999.0, torch.nan]])
    mask = torch.tensor([[True, True, True, True, False]])
    expected = 1 / np.sqrt(4 / 3)
    np.testing.assert_allclose(
        masked_whiten(x, mask)[0], [expected, -expected, expected, -expected, 0], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("value", [0.35, 0.0, 1e6])
def test_whiten_does_not_amplify_rounding(value: float) -> None:
    x = torch.full((2, 4), value)
    x[0, 0] *= 1 + 2e-7  # a last-bit difference
    assert bool((masked_whiten(x, torch.ones(2, 4, dtype=torch.bool)).abs() <= 1e-6 * max(value, 1.0)).all())


def test_whiten_of_one_token_has_no_scale() -> None:
    mask = torch.tensor([[False, True, False]])
    assert masked_whiten(torch.tensor([[torch.nan, 3.0, torch.nan]]), mask).tolist() == [[0.0, 0.0, 0.0]]


@property_test
@given(masked_batches(), st.integers(0, 2**31))
def test_explained_variance(batch: tuple[Tensor, Tensor], seed: int) -> None:
    returns, mask = batch
    values = returns + torch.randn(returns.shape, generator=torch.Generator().manual_seed(seed))
    kept_returns, kept_values = compact(returns, mask), compact(values, mask)
    result = explained_variance(values, returns, mask)
    if kept_returns.size < 2 or kept_returns.var(ddof=1) == 0:
        assert result.isnan()
        return
    expected = 1 - (kept_returns - kept_values).var(ddof=1) / kept_returns.var(ddof=1)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@property_test
@given(masked_batches())
def test_last_valid_index(batch: tuple[Tensor, Tensor]) -> None:
    _, mask = batch
    expected = [max((t for t, valid in enumerate(row) if valid), default=-1) for row in mask.tolist()]
    assert last_valid_index(mask).tolist() == expected


def test_last_valid_index_of_width_zero() -> None:
    assert last_valid_index(torch.zeros(3, 0, dtype=torch.bool)).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_must_be_finite_where_they_count(bad: float) -> None:
    mask = torch.tensor([[True, False], [True, True]])
    scores = torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match=r"score of sample 1 is (nan|inf|-inf)"):
        require_finite_scores(scores, mask)
    require_finite_scores(scores, mask & torch.tensor([[True], [False]]))
