"""Losses against per-token loops in float64; gradients against calculus and finite differences."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.rl.losses import (
    POLICY_LOSSES,
    LossOutput,
    PolicyLossOptions,
    PolicyTokens,
    entropy_bonus,
    kl_loss,
    ppo,
    value_loss,
)
from mrl.rl.metrics import TokenMetrics, merge_metrics

property_test = settings(max_examples=60, deadline=None, derandomize=True)
OPTIONS = PolicyLossOptions(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


@dataclass
class Tokens:
    """Float64 arrays [N]; masked entries are NaN."""

    new: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    is_weights: np.ndarray
    mask: np.ndarray

    def policy_tokens(self, dtype: torch.dtype, log_probs: Tensor) -> PolicyTokens:
        old, advantages, weights, is_weights = (
            torch.tensor(x, dtype=dtype) for x in (self.old, self.advantages, self.weights, self.is_weights)
        )
        return PolicyTokens(log_probs, old, advantages, weights, is_weights, torch.tensor(self.mask))


@st.composite
def token_batches(draw: st.DrawFn, spreads: tuple[float, ...] = (0.0, 0.3, 3.0, 40.0)) -> Tokens:
    size = draw(st.integers(0, 24))
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.uniform(-6, 0, size)
    new = old + rng.normal(0, draw(st.sampled_from(spreads)), size)
    advantages = rng.normal(0, 1, size) * rng.integers(0, 2, size)  # half of them exactly 0
    arrays = [new, old, advantages, rng.uniform(0, 2, size), rng.uniform(0, 2, size)]
    # Values that fp32 holds exactly, so that one oracle serves both precisions.
    arrays = [np.where(mask, x.astype(np.float32), np.nan).astype(np.float64) for x in arrays]
    new, old, advantages, weights, is_weights = arrays
    return Tokens(new, old, advantages, weights, is_weights, mask)


def ppo_oracle(tokens: Tokens, options: PolicyLossOptions) -> tuple[float, np.ndarray]:
    """Weighted sum of -J with J = min(r A, clip(r) A), and max(J, c A) where A < 0; and its gradient by hand."""
    total, gradient = 0.0, np.zeros(len(tokens.mask))
    for i in np.flatnonzero(tokens.mask):
        a, w = tokens.advantages[i], tokens.weights[i] * tokens.is_weights[i]
        log_ratio = tokens.new[i] - tokens.old[i]
        r = math.exp(min(max(log_ratio, -20.0), 20.0))
        surrogate, slope = r * a, r * a if abs(log_ratio) < 20 else 0.0
        clipped = min(max(r, 1 - options.clip_low), 1 + options.clip_high) * a
        if clipped < surrogate:
            surrogate, slope = clipped, 0.0
        if a < 0 and options.dual_clip is not None and options.dual_clip * a > surrogate:
            surrogate, slope = options.dual_clip * a, 0.0
        total -= w * surrogate
        gradient[i] = -w * slope
    return total, gradient


all_options = st.builds(
    PolicyLossOptions,
    clip_low=st.sampled_from([0.1, 0.2]),
    clip_high=st.sampled_from([0.2, 0.28, 5.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)


@property_test
@given(token_batches(), all_options)
def test_ppo_value_and_gradient(tokens: Tokens, options: PolicyLossOptions) -> None:
    expected, expected_gradient = ppo_oracle(tokens, options)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-5)):
        log_probs = torch.tensor(tokens.new, dtype=dtype, requires_grad=True)
        output = ppo(tokens.policy_tokens(dtype, log_probs), options)
        assert output.loss_sum.dtype == dtype
        scale = max(1.0, float(np.abs(expected_gradient).sum()), abs(expected))
        assert output.loss_sum.item() == pytest.approx(expected, rel=tolerance, abs=tolerance * scale)
        output.loss_sum.backward()
        assert log_probs.grad is not None
        np.testing.assert_allclose(log_probs.grad, expected_gradient, rtol=tolerance, atol=tolerance)
        assert bool((log_probs.grad[torch.tensor(~tokens.mask)] == 0).all())


@property_test
@given(token_batches(), all_options)
def test_ppo_metrics(tokens: Tokens, options: PolicyLossOptions) -> None:
    log_probs = torch.tensor(tokens.new, requires_grad=True)
    output = ppo(tokens.policy_tokens(torch.float64, log_probs), options)
    metrics = output.metrics
    valid = np.flatnonzero(tokens.mask)
    log_ratios = [float(tokens.new[i] - tokens.old[i]) for i in valid]
    ratios = [math.exp(min(max(d, -20.0), 20.0)) for d in log_ratios]
    advantages = [float(tokens.advantages[i]) for i in valid]
    low = sum(a < 0 and r < 1 - options.clip_low for r, a in zip(ratios, advantages, strict=True))
    high = sum(a > 0 and r > 1 + options.clip_high for r, a in zip(ratios, advantages, strict=True))
    held = sum(
        a < 0 and options.dual_clip is not None and r > options.dual_clip
        for r, a in zip(ratios, advantages, strict=True)
    )
    expected = {
        "pg_loss": ppo_oracle(tokens, options)[0],
        "ppo_kl": -math.fsum(log_ratios),
        "ratio": math.fsum(ratios),
        "ratio_clipped_low": low,
        "ratio_clipped_high": high,
        "pg_clipfrac": low + high,
        "pg_clipfrac_lower": held,
    }
    assert set(metrics.mean) == set(expected)
    for name, value in expected.items():
        total, count = metrics.mean[name]
        assert int(count) == len(valid)
        assert not total.requires_grad
        assert float(total) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert float(metrics.max["ratio_max"]) == pytest.approx(max(ratios, default=-math.inf), rel=1e-9)
    assert int(metrics.sum["log_ratio_clamped"]) == sum(abs(d) > 20 for d in log_ratios)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (0.0, 2.0, -2.0, -2.0),  # ratio 1: plain policy gradient
        (math.log(1.5), 1.0, -1.28, 0.0),  # good token, already 50 % likelier: held at 1 + clip_high
        (math.log(0.5), 1.0, -0.5, -0.5),  # good token made rarer: full gradient
        (math.log(0.5), -1.0, 0.8, 0.0),  # bad token, already halved: held at 1 - clip_low
        (math.log(2.0), -1.0, 2.0, 2.0),  # bad token made likelier: full gradient
        (math.log(4.0), -1.0, 3.0, 0.0),  # ... beyond dual_clip: held at 3
        (50.0, -1.0, 3.0, 0.0),
        (-50.0, 1.0, -math.exp(-20.0), 0.0),
    ],
)
def test_ppo_rows(log_ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_probs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    output = ppo(PolicyTokens(log_probs, -one, advantage * one, one), OPTIONS)
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-12)
    assert log_probs.grad is not None
    assert float(log_probs.grad) == pytest.approx(slope, rel=1e-12, abs=1e-15)


def test_first_mini_batch_has_ratio_one() -> None:
    log_probs = torch.linspace(-3, 0, 5, requires_grad=True)
    tokens = PolicyTokens(log_probs, log_probs.detach().clone(), torch.linspace(-1, 1, 5), torch.ones(5))
    metrics = POLICY_LOSSES["ppo"](tokens, OPTIONS).metrics
    assert float(metrics.max["ratio_max"]) == 1.0
    assert [float(metrics.mean[name][0]) for name in ("ratio", "ppo_kl", "pg_clipfrac")] == [5.0, 0.0, 0.0]


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, math.nan])
def test_dual_clip_must_exceed_one(dual_clip: float) -> None:
    with pytest.raises(ValueError, match="must be greater than 1; null switches it off"):
        PolicyLossOptions(clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)


def test_clip_range_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        PolicyLossOptions(clip_low=-0.2, clip_high=0.2, dual_clip=None)


def test_unknown_policy_loss_names_the_known() -> None:
    with pytest.raises(ValueError, match="unknown policy loss 'reinforce'; known: ppo"):
        POLICY_LOSSES["reinforce"]


def value_oracle(v: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    """(loss, d loss / d v, whether the clipped term is the larger) of one token."""
    loss, slope = 0.5 * (v - target) ** 2, v - target
    if clip is None:
        return loss, slope, False
    clipped = min(max(v, old - clip), old + clip)
    clipped_loss = 0.5 * (clipped - target) ** 2
    if clipped_loss > loss:
        return clipped_loss, 0.0, True
    return loss, slope, False


@property_test
@given(token_batches(), st.sampled_from([None, 0.2, 1.0]))
def test_value_loss(tokens: Tokens, value_clip: float | None) -> None:
    values = torch.tensor(tokens.new, requires_grad=True)
    old, returns, weights = (torch.tensor(x) for x in (tokens.old, tokens.advantages, tokens.weights))
    output = value_loss(values, old, returns, weights, value_clip, torch.tensor(tokens.mask))
    output.loss_sum.backward()
    valid = np.flatnonzero(tokens.mask)
    rows = [value_oracle(tokens.new[i], tokens.old[i], tokens.advantages[i], value_clip) for i in valid]
    expected = math.fsum(tokens.weights[i] * row[0] for i, row in zip(valid, rows, strict=True))
    gradient = np.zeros(len(tokens.mask))
    for i, row in zip(valid, rows, strict=True):
        gradient[i] = tokens.weights[i] * row[1]
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    np.testing.assert_allclose(values.grad, gradient, rtol=1e-10, atol=1e-10)
    mean = output.metrics.mean
    assert {name: int(count) for name, (_, count) in mean.items()} == dict.fromkeys(
        ["vf_loss", "vf_clipfrac", "vpred_mean"], len(valid)
    )
    assert float(mean["vf_loss"][0]) == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert float(mean["vf_clipfrac"][0]) == sum(row[2] for row in rows)
    assert float(mean["vpred_mean"][0]) == pytest.approx(math.fsum(tokens.new[i] for i in valid), abs=1e-9)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # within the clip
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved towards the target beyond the clip: held
        (0.0, 1.0, 3.0, 4.5, -3.0),  # moved away beyond the clip: full loss and gradient
    ],
)
def test_value_rows(value: float, old: float, target: float, loss: float, slope: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    output = value_loss(values, torch.tensor([old]), torch.tensor([target]), torch.ones(1), 0.2)
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    assert values.grad is not None
    assert float(values.grad) == pytest.approx(slope, rel=1e-12)


@property_test
@given(token_batches(), st.sampled_from(["k1", "k2", "k3", "abs"]), st.sampled_from([0.0, 0.001, 1.0]))
def test_kl_loss(tokens: Tokens, kind: str, coef: float) -> None:
    log_probs = torch.tensor(tokens.new, requires_grad=True)
    output = kl_loss(
        log_probs, torch.tensor(tokens.old), torch.tensor(tokens.weights), coef, kind, torch.tensor(tokens.mask)
    )
    output.loss_sum.backward()
    total, gradient, clamped = 0.0, np.zeros(len(tokens.mask)), 0
    for i in np.flatnonzero(tokens.mask):
        d = tokens.new[i] - tokens.old[i]
        within = abs(d) < 20
        clamped += not within
        c = min(max(d, -20.0), 20.0)
        value, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
            "k3": (math.exp(-c) - 1 + c, 1 - math.exp(-c) if within else 0.0),
            "abs": (abs(d), float(np.sign(d))),
        }[kind]
        total += tokens.weights[i] * value
        gradient[i] = coef * tokens.weights[i] * slope
    assert output.loss_sum.item() == pytest.approx(coef * total, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(log_probs.grad, gradient, rtol=1e-9, atol=1e-9)
    assert float(output.metrics.mean["kl_loss"][0]) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert int(output.metrics.sum["kl_loss_clamped"]) == clamped


@property_test
@given(token_batches())
def test_entropy_bonus(tokens: Tokens) -> None:
    entropy = torch.tensor(tokens.is_weights, requires_grad=True)
    output = entropy_bonus(entropy, torch.tensor(tokens.weights), 0.01, torch.tensor(tokens.mask))
    output.loss_sum.backward()
    valid = np.flatnonzero(tokens.mask)
    expected = -0.01 * math.fsum(tokens.weights[i] * tokens.is_weights[i] for i in valid)
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(entropy.grad, np.where(tokens.mask, -0.01 * tokens.weights, 0.0), rtol=1e-12)
    total, count = output.metrics.mean["entropy"]
    assert float(total) == pytest.approx(math.fsum(tokens.is_weights[i] for i in valid), rel=1e-12)
    assert int(count) == len(valid)


def losses_of(x: Tensor) -> dict[str, LossOutput]:
    """Every loss on one differentiable input [N], at points away from the kinks of the clips."""
    n = x.shape[0]
    rng = np.random.default_rng(3)
    old = torch.tensor([-0.9, -1.3, -1.0, -0.6, -2.0, -1.05], dtype=torch.float64)[:n]
    advantages = torch.tensor([1.0, -1.0, 0.7, -0.3, -2.0, 0.4], dtype=torch.float64)[:n]
    weights, is_weights = torch.tensor(rng.uniform(0.5, 2, (2, n)))
    return {
        "ppo": ppo(PolicyTokens(x, old, advantages, weights, is_weights), OPTIONS),
        "ppo without dual clip": ppo(PolicyTokens(x, old, advantages, weights), PolicyLossOptions(0.2, 0.2, None)),
        "value": value_loss(x, old, advantages, weights, 0.15),
        "entropy": entropy_bonus(x, weights, 0.3),
    } | {f"kl {kind}": kl_loss(x, old, weights, 0.5, kind) for kind in ("k1", "k2", "k3", "abs")}


@pytest.mark.parametrize("name", sorted(losses_of(torch.full((6,), -1.0))))
def test_gradients_by_finite_differences(name: str) -> None:
    x = torch.tensor([-1.1, -1.0, -1.45, -0.65, -0.7, -1.01], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: losses_of(x)[name].loss_sum, (x,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", sorted(losses_of(torch.full((6,), -1.0))))
def test_empty_micro_batch_and_half_precision(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    output = losses_of(empty)[name]
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert all(int(count) == 0 for _, count in output.metrics.mean.values())
    half = losses_of(torch.full((6,), -1.0, dtype=torch.bfloat16))[name]
    assert half.loss_sum.dtype in (torch.float32, torch.float64)


@property_test
@given(token_batches(spreads=(0.3,)), st.lists(st.integers(0, 24), max_size=4))
def test_sums_and_metrics_do_not_depend_on_the_micro_batch_split(tokens: Tokens, cuts: list[int]) -> None:
    """Packed without a mask (as the engine calls it) and split anywhere, sums add up to those of the masked whole."""
    new = torch.tensor(tokens.new)
    whole = tokens.policy_tokens(torch.float64, new)
    expected = ppo(whole, OPTIONS)
    keep = torch.tensor(np.flatnonzero(tokens.mask))
    edges = [0, *sorted(min(c, len(keep)) for c in cuts), len(keep)]
    parts = []
    for start, stop in itertools.pairwise(edges):
        at = keep[start:stop]
        is_weights = whole.is_weights
        assert is_weights is not None
        parts.append(
            ppo(
                PolicyTokens(new[at], whole.old_log_probs[at], whole.advantages[at], whole.weights[at], is_weights[at]),
                OPTIONS,
            )
        )
    total = sum(float(part.loss_sum) for part in parts)
    assert total == pytest.approx(float(expected.loss_sum), rel=1e-12, abs=1e-12)
    merged = merge_metrics(*(part.metrics for part in parts))
    for name, (value, count) in expected.metrics.mean.items():
        assert float(merged.mean[name][0]) == pytest.approx(float(value), rel=1e-12, abs=1e-12)
        assert int(merged.mean[name][1]) == int(count)
    assert float(merged.max["ratio_max"]) == float(expected.metrics.max["ratio_max"])
    assert int(merged.sum["log_ratio_clamped"]) == int(expected.metrics.sum["log_ratio_clamped"])


def test_merged_mean_is_weighted_by_tokens() -> None:
    """Ten tokens of 1 and one token of 12: 2, not the mean of means 6.5."""
    parts = [
        TokenMetrics(mean={"x": (torch.tensor(10.0), torch.tensor(10))}, max={"y": torch.tensor(1.0)}),
        TokenMetrics(mean={"x": (torch.tensor(12.0), torch.tensor(1))}, sum={"z": torch.tensor(4)}),
    ]
    merged = merge_metrics(*parts)
    total, count = merged.mean["x"]
    assert float(total / count) == 2.0
    assert float(merged.max["y"]) == 1.0
    assert int(merged.sum["z"]) == 4
    assert float(parts[0].mean["x"][0]) == 10.0
