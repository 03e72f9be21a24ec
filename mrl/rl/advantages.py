"""Advantage estimators: a registry of functions from rewards to one advantage per response token.

To add one, register a function under the name that `algorithm.adv_estimator` selects:

    @register_advantage("mine")
    def mine(inputs: AdvantageInputs) -> Advantages: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.rl.masking import (
    RELATIVE_STD_EPSILON,
    last_valid_index,
    masked_fill_zero,
    masked_sum,
    masked_whiten,
    require_finite_scores,
)
from mrl.rl.registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """The whole rollout batch and the settings of the estimators.

    rewards[B, R] float: per-token rewards (see mrl.rl.kl). mask[B, R] bool. group[B] int64: samples of one prompt share
    an id. values[B, R] float: the critic's value of the state before each token; None without a critic.
    bootstrap[B] bool: responses cut at the length limit that continue with their last value; None for none.
    gamma, lam, whiten: gae only. norm_by_std: grpo only.
    """

    rewards: Tensor
    mask: Tensor
    group: Tensor
    values: Tensor | None
    bootstrap: Tensor | None
    gamma: float
    lam: float
    whiten: bool
    norm_by_std: bool


@dataclass(frozen=True)
class Advantages:
    """advantages[B, R] float32, 0 where masked; returns[B, R] float32: the critic's target, None without a critic."""

    advantages: Tensor
    returns: Tensor | None


AdvantageFn = Callable[[AdvantageInputs], Advantages]
ADVANTAGES: Registry[AdvantageFn] = Registry("advantage estimator")
register_advantage = ADVANTAGES.register


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where *next* is the next valid token:
    masked tokens in between are stepped over, neither discounted nor read. After the last valid token A_next is 0 and
    V_next is 0, or that token's own value where `bootstrap`.

    Args: values, rewards [B, R] float; mask [B, R] bool; bootstrap [B] bool.
    Returns: (advantages, returns = advantages + values), [B, R] float32, unwhitened, 0 where masked; computed in
    float64.
    """
    # Transposed once, so that each step of the recursion reads contiguous memory.
    values_RB = masked_fill_zero(values.double(), mask).T.contiguous()
    rewards_RB = masked_fill_zero(rewards.double(), mask).T.contiguous()
    mask_RB = mask.T.contiguous()
    advantages_RB = torch.zeros_like(values_RB)
    next_advantage_B = values_RB.new_zeros(values.shape[0])
    next_value_B = next_advantage_B
    if bootstrap is not None:
        next_value_B = masked_fill_zero(_last_valid(values.double(), mask), bootstrap)
    for t in reversed(range(values.shape[1])):
        valid_B = mask_RB[t]
        delta_B = rewards_RB[t] + gamma * next_value_B - values_RB[t]
        next_advantage_B = torch.where(valid_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(valid_B, values_RB[t], next_value_B)
        advantages_RB[t] = next_advantage_B
    advantages = masked_fill_zero(advantages_RB.T, mask)
    return advantages.float(), (advantages + values_RB.T).float()


def grpo(scores: Tensor, group: Tensor, mask: Tensor, norm_by_std: bool) -> Tensor:
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300; without std: Dr.GRPO, arXiv:2503.20783).

    A = (score - mean of its group) / std of its group (Bessel's correction, no additive epsilon), or without the
    division. Dropped samples count in neither mean nor std. The advantage is 0 in a group of one, and in a group whose
    scores are equal: std at most RELATIVE_STD_EPSILON times the largest |score|.

    Args: scores [B] float; group [B] int64, any ids in any order; mask [B, R] bool.
    Returns: [B, R] float32, the sample's advantage on each valid token and 0 elsewhere; computed in float64.
    Raises ValueError where a sample that counts has a score that is NaN or infinite.
    """
    require_finite_scores(scores, mask)
    counts_B = mask.any(1)
    scores_B = masked_fill_zero(scores.double(), counts_B)
    ids, index_B = group.unique(return_inverse=True)

    def group_sum(x_B: Tensor) -> Tensor:
        return x_B.new_zeros(len(ids)).index_add(0, index_B, masked_fill_zero(x_B, counts_B))

    size_G = group_sum(torch.ones_like(scores_B))
    mean_G = group_sum(scores_B) / size_G.clamp(min=1)
    centred_B = scores_B - mean_G[index_B]
    std_G = (group_sum(centred_B.square()) / (size_G - 1).clamp(min=1)).sqrt()
    largest_G = torch.zeros_like(std_G).scatter_reduce(0, index_B, scores_B.abs(), "amax")
    informative_G = (size_G > 1) & (std_G > RELATIVE_STD_EPSILON * largest_G)
    scale_G = std_G if norm_by_std else torch.ones_like(std_G)
    advantages_B = torch.where(informative_G[index_B], centred_B / scale_G[index_B], 0.0)
    return masked_fill_zero(advantages_B[:, None].expand(mask.shape), mask).float()


@register_advantage("gae")
def _gae(inputs: AdvantageInputs) -> Advantages:
    """GAE; returns come from the unwhitened advantages."""
    assert inputs.values is not None, "gae needs the critic's values"
    advantages, returns = gae(inputs.values, inputs.rewards, inputs.mask, inputs.gamma, inputs.lam, inputs.bootstrap)
    return Advantages(masked_whiten(advantages, inputs.mask) if inputs.whiten else advantages, returns)


@register_advantage("grpo")
def _grpo(inputs: AdvantageInputs) -> Advantages:
    """GRPO on each sample's summed rewards (its score, minus the KL penalty where that is in the reward)."""
    scores = masked_sum(inputs.rewards, inputs.mask, dim=1)
    return Advantages(grpo(scores, inputs.group, inputs.mask, inputs.norm_by_std), None)


def _last_valid(x: Tensor, mask: Tensor) -> Tensor:
    """Each row's entry at its last valid token, [B]; 0 for a row without one."""
    at_last = torch.arange(mask.shape[1], device=mask.device) == last_valid_index(mask)[:, None]
    return masked_fill_zero(x, at_last).sum(1)
