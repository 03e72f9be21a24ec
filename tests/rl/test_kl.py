"""KL estimators, the KL-shaped reward, the coefficient's controllers and the rollout correction."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.rl.correction import mismatch_metrics, token_importance_weights
from mrl.rl.kl import (
    KL_ESTIMATORS,
    AdaptiveKl,
    FixedKl,
    build_kl_controller,
    kl_in_reward,
    reference_kl,
    score_at_last_token,
)

property_test = settings(max_examples=60, deadline=None, derandomize=True)


def clip20(x: float) -> float:
    return min(max(x, -20.0), 20.0)


KL_FORMULAS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-clip20(d)) - 1 + clip20(d),
    "abs": abs,
}


@st.composite
def log_prob_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Two [B, R] float32 log-probabilities, NaN where masked, and a mask with gaps and empty rows."""
    num_rows, num_columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    cells = num_rows * num_columns
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).view(num_rows, num_columns)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
    first = rng.uniform(-8, 0, (num_rows, num_columns))
    second = first + rng.normal(0, spread, first.shape)
    pair = [torch.tensor(x, dtype=torch.float32) for x in (first, second)]
    for x in pair:
        x[~mask] = torch.nan
    return pair[0], pair[1], mask


@property_test
@given(st.floats(-100, 100))
@example(0.0)
@example(20.0)
@example(-20.0)
@example(-1000.0)
def test_estimators(d: float) -> None:
    assert set(KL_ESTIMATORS) == set(KL_FORMULAS)
    for name, formula in KL_FORMULAS.items():
        value = float(KL_ESTIMATORS[name](torch.tensor(d, dtype=torch.float64)))
        assert value == pytest.approx(formula(d), rel=1e-12, abs=1e-12)
        if name != "k1":
            assert value >= 0


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl_of_two_distributions(name: str) -> None:
    """Expectation over the whole (five-token) vocabulary, in place of sampling."""
    rng = np.random.default_rng(0)
    policy, reference = (x / x.sum() for x in rng.uniform(0.1, 1, (2, 5)))
    true_kl = math.fsum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    estimates = KL_ESTIMATORS[name](torch.tensor(np.log(policy) - np.log(reference)))
    assert float((torch.tensor(policy) * estimates).sum()) == pytest.approx(true_kl, rel=1e-12)


def test_unknown_estimator_names_the_known() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: abs, k1, k2, k3"):
        KL_ESTIMATORS["k4"]


@property_test
@given(log_prob_pairs(), st.sampled_from(sorted(KL_FORMULAS)), st.sampled_from([0.0, 0.01, 2.0]))
def test_kl_in_reward(pair: tuple[Tensor, Tensor, Tensor], kind: str, coef: float) -> None:
    log_probs, ref_log_probs, mask = pair
    scores = torch.arange(1.0, mask.shape[0] + 1)
    scores[~mask.any(1)] = torch.nan  # dropped samples have no score
    rewards, metrics = kl_in_reward(scores, log_probs, ref_log_probs, mask, coef, kind)
    expected, kl_sum, count, clamped = np.zeros(mask.shape), 0.0, 0, 0
    for row in range(mask.shape[0]):
        valid = [t for t in range(mask.shape[1]) if mask[row, t]]
        for t in valid:
            d = float(np.float32(log_probs[row, t]) - np.float32(ref_log_probs[row, t]))
            kl = KL_FORMULAS[kind](d)
            expected[row, t] = -coef * kl
            kl_sum, count, clamped = kl_sum + kl, count + 1, clamped + (abs(d) > 20)
        if valid:
            expected[row, valid[-1]] += float(scores[row])
    assert rewards.dtype == torch.float32
    np.testing.assert_allclose(rewards, expected, rtol=2e-6, atol=3e-6 * max(coef, 1.0))
    total, tokens = metrics.mean["reward_kl_penalty"]
    assert int(tokens) == count
    assert float(total) == pytest.approx(kl_sum, rel=1e-5, abs=1e-5)
    assert int(metrics.sum["reward_kl_penalty_clamped"]) == clamped
    logged = reference_kl(log_probs, ref_log_probs, mask).mean
    assert logged.keys() == {"ref_kl_k1", "ref_kl_k2", "ref_kl_k3", "ref_kl_abs"}
    assert float(logged[f"ref_kl_{kind}"][0]) == pytest.approx(kl_sum, rel=1e-5, abs=1e-5)
    assert int(logged[f"ref_kl_{kind}"][1]) == count


def test_score_at_last_token() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
    rewards = score_at_last_token(torch.tensor([1.0, 2.0, 3.0, torch.nan, 5.0]), mask)
    assert rewards.tolist() == [[0, 0, 1, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]]
    with pytest.raises(ValueError, match="score of sample 0 is inf"):
        score_at_last_token(torch.tensor([torch.inf]), mask[:1])


def test_k1_reward_of_a_known_row() -> None:
    """coef 0.1, log-ratios 0.5, -0.25, score 2: rewards -0.05 and 0.025 + 2."""
    mask = torch.tensor([[True, True, False]])
    rewards, _ = kl_in_reward(
        torch.tensor([2.0]),
        torch.tensor([[-1.0, -2.0, torch.nan]]),
        torch.tensor([[-1.5, -1.75, torch.nan]]),
        mask,
        coef=0.1,
        kind="k1",
    )
    np.testing.assert_allclose(rewards, [[-0.05, 2.025, 0.0]], rtol=1e-6)


def test_adaptive_controller_by_hand() -> None:
    controller = AdaptiveKl(coef=0.1, target_kl_per_token=0.01, horizon=1000)
    controller.update(0.011, num_samples=100)  # error +0.1
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1), rel=1e-12)
    controller.update(0.5, num_samples=100)  # error clipped to +0.2
    assert controller.coef == pytest.approx(0.101 * 1.02, rel=1e-12)
    controller.update(-3.0, num_samples=100)  # k1 may be negative: clipped to -0.2
    assert controller.coef == pytest.approx(0.101 * 1.02 * 0.98, rel=1e-12)
    before = controller.coef
    controller.update(0.0, num_samples=10**9)  # a huge batch corrects the whole error once, never past zero
    assert controller.coef == pytest.approx(before * 0.8, rel=1e-12)
    with pytest.raises(ValueError, match="KL per token is nan"):
        controller.update(math.nan, num_samples=1)


def test_controllers_resume() -> None:
    first, second = (AdaptiveKl(coef=0.1, target_kl_per_token=0.01, horizon=100) for _ in "ab")
    first.update(0.02, 10)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0.1
    for controller in (first, second):
        controller.update(0.002, 10)
    assert second.coef == first.coef
    fixed = FixedKl(0.3)
    fixed.update(5.0, 10)
    assert fixed.coef == 0.3
    fixed.load_state_dict(FixedKl(0.1).state_dict())
    assert fixed.coef == 0.3  # the configuration decides a fixed coefficient
    with pytest.raises(ValueError, match=r"kl_ctrl.type is fixed"):
        fixed.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"kl_ctrl.type is adaptive"):
        first.load_state_dict(fixed.state_dict())


def test_build_kl_controller() -> None:
    assert isinstance(build_kl_controller("fixed", 0.1, 0.01, 10), FixedKl)
    assert isinstance(build_kl_controller("adaptive", 0.1, 0.01, 10), AdaptiveKl)
    with pytest.raises(ValueError, match="unknown KL controller 'pid'; known: adaptive, fixed"):
        build_kl_controller("pid", 0.1, 0.01, 10)
    with pytest.raises(ValueError, match="target_kl_per_token"):
        build_kl_controller("adaptive", 0.1, 0.0, 10)


@property_test
@given(log_prob_pairs(), st.sampled_from([0.5, 1.0, 2.0, 1e3]))
def test_token_importance_weights(pair: tuple[Tensor, Tensor, Tensor], cap: float) -> None:
    old, rollout, mask = pair
    weights, metrics = token_importance_weights(old.requires_grad_(), rollout, mask, cap)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    differences = []
    for row in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[row, t]:
                assert weights[row, t] == 0
                continue
            d = float(np.float32(old[row, t].detach()) - np.float32(rollout[row, t]))
            differences.append(d)
            assert float(weights[row, t]) == pytest.approx(min(math.exp(clip20(d)), cap), rel=3e-6)
    expected = {
        "exp_abs_diff": [math.exp(min(abs(d), 20.0)) for d in differences],
        "kl": [-d for d in differences],
        "k3_kl": [math.exp(clip20(d)) - 1 - clip20(d) for d in differences],
        "is_weight": [math.exp(clip20(d)) for d in differences],
        "is_capped": [float(math.exp(clip20(d)) > cap) for d in differences],
    }
    assert set(metrics.mean) == set(expected)
    for name, per_token in expected.items():
        total, count = metrics.mean[name]
        assert int(count) == len(differences)
        assert float(total) == pytest.approx(math.fsum(per_token), rel=1e-6, abs=1e-9), name
    assert float(metrics.max["abs_diff_max"]) == pytest.approx(max(map(abs, differences), default=-math.inf))
    assert float(metrics.max["is_weight_max"]) == pytest.approx(max(expected["is_weight"], default=-math.inf), rel=1e-6)
    assert int(metrics.sum["log_ratio_clamped"]) == sum(abs(d) > 20 for d in differences)


def test_a_perfect_match_reads_one_and_zero() -> None:
    log_probs = torch.linspace(-5, 0, 6)
    metrics = mismatch_metrics(log_probs, log_probs.clone(), torch.ones(6, dtype=torch.bool))
    assert {name: float(total / count) for name, (total, count) in metrics.mean.items()} == {
        "exp_abs_diff": 1.0,
        "kl": 0.0,
        "k3_kl": 0.0,
        "is_weight": 1.0,
    }


def test_importance_weights_restore_the_trainers_expectation() -> None:
    """Over a whole vocabulary: sum_y rollout(y) w(y) f(y) = sum_y trainer(y) f(y) where no weight is capped."""
    rng = np.random.default_rng(1)
    trainer, rollout = (torch.tensor(x / x.sum()) for x in rng.uniform(0.5, 1, (2, 7)))
    f = torch.tensor(rng.normal(size=7))
    weights, _ = token_importance_weights(trainer.log(), rollout.log(), torch.ones(7, dtype=torch.bool), cap=10.0)
    assert float((rollout * weights * f).sum()) == pytest.approx(float((trainer * f).sum()), rel=1e-6)


def test_cap_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"rollout_correction.cap is 0.0"):
        token_importance_weights(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), cap=0.0)
