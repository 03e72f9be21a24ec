"""Advantage estimators against the golden rows and against direct evaluation of their formulas."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.rl.advantages import ADVANTAGES, AdvantageInputs, Advantages, gae, grpo, register_advantage
from mrl.rl.kl import score_at_last_token
from mrl.rl.registry import Registry
from mrl.rl.truncation import apply_truncation

property_test = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """values, rewards [B, R] float32 with NaN where masked; mask[B, R] with gaps, rows of one token and empty rows."""
    num_rows, num_columns = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    cells = num_rows * num_columns
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).view(num_rows, num_columns)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e4]))
    values, rewards = (torch.tensor(rng.normal(0, scale, (num_rows, num_columns)), dtype=torch.float32) for _ in "vr")
    values[~mask] = torch.nan
    rewards[~mask] = torch.nan
    return values, rewards, mask


def gae_oracle(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: list[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """A_t = sum_k (gamma lam)^k delta_{t+k} over each row's valid tokens alone, as an explicit double loop."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        at = [t for t in range(mask.shape[1]) if mask[row, t]]
        v = [float(values[row, t]) for t in at]
        r = [float(rewards[row, t]) for t in at]
        after = [*v[1:], v[-1] if bootstrap[row] else 0.0] if v else []
        deltas = [r[i] + gamma * after[i] - v[i] for i in range(len(at))]
        for i, t in enumerate(at):
            advantages[row, t] = math.fsum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(at)))
            returns[row, t] = advantages[row, t] + v[i]
    return advantages, returns


@pytest.mark.parametrize(
    ("values", "mask", "expected"),
    [
        ([0.2, 0.4, 0.5, 0.6, torch.nan, torch.nan], [1, 1, 1, 1, 0, 0], [0.7282, 0.5560, 0.4800, 0.4000, 0, 0]),
        ([0.2, 0.4, 0.5, 0.6, 0.7, 0.3], [1, 1, 0, 0, 1, 1], [0.7242, 0.5518, 0, 0, 0.2650, 0.7000]),
        ([0.2, 0.4, torch.nan, torch.nan, 0.7, 0.3], [1, 1, 0, 0, 1, 1], [0.7242, 0.5518, 0, 0, 0.2650, 0.7000]),
    ],
)
def test_gae_golden(values: list[float], mask: list[int], expected: list[float]) -> None:
    valid = torch.tensor([mask], dtype=torch.bool)
    rewards = score_at_last_token(torch.tensor([1.0]), valid)
    advantages, returns = gae(torch.tensor([values]), rewards, valid, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages[0], expected, atol=5e-5)
    target = [a + v if m else 0.0 for a, v, m in zip(expected, values, mask, strict=True)]
    np.testing.assert_allclose(returns[0], target, atol=5e-5)


@property_test
@given(
    ragged_batches(),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_gae(batch: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float, cut: list[bool]) -> None:
    values, rewards, mask = batch
    bootstrap = torch.tensor(cut[: mask.shape[0]])
    for flags, argument in ((bootstrap.tolist(), bootstrap), ([False] * mask.shape[0], None)):
        advantages, returns = gae(values, rewards, mask, gamma, lam, argument)
        expected_advantages, expected_returns = gae_oracle(values, rewards, mask, gamma, lam, flags)
        scale = float(values[mask].abs().max()) if mask.any() else 1.0
        assert advantages.dtype == returns.dtype == torch.float32
        np.testing.assert_allclose(advantages, expected_advantages, rtol=2e-7, atol=1e-6 * scale)
        np.testing.assert_allclose(returns, expected_returns, rtol=2e-7, atol=1e-6 * scale)
        assert bool((advantages[~mask] == 0).all())
        assert bool((returns[~mask] == 0).all())


def test_gae_bootstrap_by_hand() -> None:
    """V = [1, 2], no reward, cut after the second token: delta = [2 - 1, 2 - 2]; ended: delta = [1, -2]."""
    values = torch.tensor([[1.0, 2.0, torch.nan], [1.0, 2.0, torch.nan]])
    mask = torch.tensor([[True, True, False]]).expand(2, 3)
    advantages, _ = gae(values, torch.zeros(2, 3), mask, 1.0, 1.0, torch.tensor([True, False]))
    assert advantages.tolist() == [[1.0, 0.0, 0.0], [-1.0, -2.0, 0.0]]


def grpo_oracle(scores: list[float], group: list[int], counts: list[bool], norm_by_std: bool) -> list[float]:
    """Exact rational mean and standard deviation per group, from the standard library."""
    result = []
    for i, score in enumerate(scores):
        members = [Fraction(scores[j]) for j in range(len(scores)) if group[j] == group[i] and counts[j]]
        if not counts[i] or len(members) < 2:
            result.append(0.0)
            continue
        std = statistics.stdev(members)
        if std <= 1e-6 * max(abs(m) for m in members):
            result.append(0.0)
        else:
            result.append(float(Fraction(score) - statistics.mean(members)) / (float(std) if norm_by_std else 1.0))
    return result


score_values = st.one_of(st.sampled_from([0.0, 1.0, 0.35, -1.0]), st.floats(-100, 100, width=32))


@property_test
@given(st.lists(st.tuples(score_values, st.sampled_from([-7, 3, 2**40]), st.integers(0, 3)), min_size=1, max_size=12))
@example([(0.35, 3, 1)] * 8)
@example([(1.0, 3, 1)])
@example([(1.0, 3, 0), (0.0, 3, 0)])
def test_grpo(samples: list[tuple[float, int, int]]) -> None:
    scores = torch.tensor([s for s, _, _ in samples], dtype=torch.float32)
    group = [g for _, g, _ in samples]
    mask = torch.tensor([[t < length for t in range(4)] for _, _, length in samples])
    counts = mask.any(1).tolist()
    exact = [float(s) for s in scores]
    scores[~mask.any(1)] = torch.nan  # a dropped sample has no score
    for norm_by_std in (True, False):
        advantages = grpo(scores, torch.tensor(group), mask, norm_by_std)
        assert advantages.dtype == torch.float32
        expected = np.array(grpo_oracle(exact, group, counts, norm_by_std))[:, None] * mask.numpy()
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize(
    "scores",
    [
        [0.35] * 8,
        [0.0] * 8,
        [-123.456] * 3,
        [1e9, 1e9 + 64.0],  # neighbours in fp32
        [0.1 + 0.2, 0.3, 0.3],  # equal but for the last bit of a double
        [float(np.float32(0.7)), float(np.nextafter(np.float32(0.7), np.float32(1)))],  # ... of a float
    ],
)
def test_grpo_equal_rewards_give_exactly_zero(scores: list[float], norm_by_std: bool) -> None:
    mask = torch.ones(len(scores), 2, dtype=torch.bool)
    group = torch.zeros(len(scores), dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        advantages = grpo(torch.tensor(scores, dtype=dtype), group, mask, norm_by_std)
        assert bool((advantages == 0).all())


@pytest.mark.parametrize("unit", [1e-9, 1e-5, 1.0, 1e9])
def test_grpo_does_not_depend_on_the_unit_of_the_reward(unit: float) -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    advantages = grpo(torch.tensor([unit, 2 * unit]), torch.zeros(2, dtype=torch.long), mask, True)
    np.testing.assert_allclose(advantages[:, 0], [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-6)


def test_grpo_refuses_a_score_that_counts_and_is_nan() -> None:
    with pytest.raises(ValueError, match="score of sample 1 is nan"):
        grpo(torch.tensor([1.0, torch.nan]), torch.tensor([0, 0]), torch.ones(2, 3, dtype=torch.bool), True)


def advantage_inputs() -> AdvantageInputs:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    values = torch.tensor([[0.5, 0.1, 0.2, 9.0], [0.3, 9.0, 0.2, 0.8], [0.4, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    values[~mask] = torch.nan
    return AdvantageInputs(
        rewards=score_at_last_token(torch.tensor([1.0, 0.0, 3.0, torch.nan]), mask),
        mask=mask,
        group=torch.tensor([5, 5, 5, 5]),
        values=values,
        bootstrap=None,
        gamma=1.0,
        lam=0.9,
        whiten=True,
        norm_by_std=True,
    )


def test_registered_gae_whitens_advantages_but_not_returns() -> None:
    inputs = advantage_inputs()
    assert inputs.values is not None
    result = ADVANTAGES["gae"](inputs)
    raw, returns = gae_oracle(inputs.values, inputs.rewards, inputs.mask, 1.0, 0.9, [False] * 4)
    valid = inputs.mask.numpy()
    whitened = np.where(valid, (raw - raw[valid].mean()) / raw[valid].std(ddof=1), 0.0)
    np.testing.assert_allclose(result.advantages, whitened, rtol=1e-5, atol=1e-6)
    assert result.returns is not None
    np.testing.assert_allclose(result.returns, returns, rtol=1e-6, atol=1e-7)
    plain = ADVANTAGES["gae"](replace(inputs, whiten=False))
    np.testing.assert_allclose(plain.advantages, raw, rtol=1e-6, atol=1e-7)


def test_registered_grpo_uses_summed_rewards_and_ignores_the_dropped_sample() -> None:
    """Scores 1, 0, 3 (mean 4/3, variance 7/3); a KL penalty of 0.5 on a token changes its sample's score."""
    inputs = advantage_inputs()
    result = ADVANTAGES["grpo"](replace(inputs, values=None))
    assert result.returns is None
    std = math.sqrt(7 / 3)
    per_sample = np.array([(1 - 4 / 3) / std, (0 - 4 / 3) / std, (3 - 4 / 3) / std, 0.0])
    np.testing.assert_allclose(result.advantages, per_sample[:, None] * inputs.mask.numpy(), rtol=1e-6)
    rewards = inputs.rewards.clone()
    rewards[2, 0] -= 0.5
    penalised = ADVANTAGES["grpo"](replace(inputs, rewards=rewards, norm_by_std=False))
    np.testing.assert_allclose(penalised.advantages[:, 0], [1 - 3.5 / 3, -3.5 / 3, 2.5 - 3.5 / 3, 0.0], rtol=1e-6)


def test_registry_takes_a_function_once_and_names_what_it_knows() -> None:
    registry: Registry[int] = Registry("advantage estimator")
    assert registry.register("one")(1) == 1
    assert registry["one"] == 1
    assert list(registry) == ["one"]
    assert len(registry) == 1
    assert "one" in registry
    assert "two" not in registry
    with pytest.raises(ValueError, match="'one' is already registered"):
        registry.register("one")(2)
    with pytest.raises(ValueError, match="unknown advantage estimator 'two'; known: one"):
        registry["two"]
    with pytest.raises(ValueError, match="'gae' is already registered"):

        @register_advantage("gae")
        def other(inputs: AdvantageInputs) -> Advantages:
            raise NotImplementedError


def test_truncation() -> None:
    scores = torch.tensor([1.0, 2.0, torch.nan])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    truncated = torch.tensor([True, False, True])
    kept_scores, kept_mask = apply_truncation(scores, mask, truncated, "keep")
    assert torch.equal(kept_mask, mask)
    assert kept_scores.tolist()[:2] == [1.0, 2.0]
    zeroed, same_mask = apply_truncation(scores, mask, truncated, "zero_reward")
    assert zeroed.tolist() == [0.0, 2.0, 0.0]
    assert torch.equal(same_mask, mask)
    _, masked = apply_truncation(scores, mask, truncated, "mask")
    assert masked.tolist() == [[False, False], [True, False], [False, False]]
    assert scores[0] == 1.0
    assert bool(mask[0].all())
    with pytest.raises(ValueError, match=r"unknown algorithm.truncated 'drop'; known: keep, zero_reward, mask"):
        apply_truncation(scores, mask, truncated, "drop")


def test_a_masked_truncated_sample_leaves_its_group() -> None:
    scores, mask = torch.tensor([1.0, 0.0, 50.0]), torch.ones(3, 2, dtype=torch.bool)
    scores, mask = apply_truncation(scores, mask, torch.tensor([False, False, True]), "mask")
    advantages = grpo(scores, torch.zeros(3, dtype=torch.long), mask, norm_by_std=False)
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
