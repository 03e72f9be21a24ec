"""Aggregation weights against each mode's definition, sequence by sequence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rl.aggregation import AGGREGATIONS, token_weights

property_test = settings(max_examples=60, deadline=None, derandomize=True)


def mode_mean(losses: np.ndarray, mask: np.ndarray, mode: str, limit: int) -> float:
    """The mode's definition, sequence by sequence; sequences without a token do not count."""
    rows = [[losses[i, t] for t in range(mask.shape[1]) if mask[i, t]] for i in range(mask.shape[0])]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
    per_sequence = {
        "seq-mean-token-mean": [math.fsum(row) / len(row) for row in rows],
        "seq-mean-token-sum": [math.fsum(row) for row in rows],
        "seq-mean-token-sum-norm": [math.fsum(row) / limit for row in rows],
    }[mode]
    return math.fsum(per_sequence) / len(rows)


@property_test
@given(st.data())
def test_aggregation(data: st.DataObject) -> None:
    num_rows, num_columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    cells = num_rows * num_columns
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).reshape(num_rows, num_columns)
    losses = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).normal(size=mask.shape)
    for mode in AGGREGATIONS:
        weights = token_weights(torch.tensor(mask), mode, max_response_length=17)
        assert weights.dtype == torch.float32
        assert bool((weights[torch.tensor(~mask)] == 0).all())
        total = float((weights.double() * torch.tensor(losses)).sum()) / max(int(mask.sum()), 1)
        assert total == pytest.approx(mode_mean(losses, mask, mode, 17), rel=1e-5, abs=1e-6), mode


def test_aggregation_rows() -> None:
    """Lengths 3, 1 and 0 (dropped): N_tokens / N_seqs = 2."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    per_sequence: dict[str, tuple[float, float]] = {
        "token-mean": (1, 1),
        "seq-mean-token-mean": (2 / 3, 2),
        "seq-mean-token-sum": (2, 2),
        "seq-mean-token-sum-norm": (0.5, 0.5),
    }
    for mode, (first, second) in per_sequence.items():
        expected = np.array([[first, first, 0, first], [second, 0, 0, 0], [0, 0, 0, 0]])
        np.testing.assert_allclose(token_weights(mask, mode, max_response_length=4), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; known: token-mean, seq-mean-token-mean"):
        token_weights(mask, "mean", max_response_length=4)
