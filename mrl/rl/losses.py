"""Losses over the response tokens of a micro-batch. Each returns a weighted sum; the engine divides once, globally.

Tensors are packed [N] or of any one shape. `weights` are the aggregation weights of mrl.rl.aggregation; `mask` (bool,
None for all valid) marks the entries that count: the others may hold NaN and get a gradient of exactly 0.

To add a policy loss, register a function under the name that `actor.policy_loss` selects:

    @register_policy_loss("mine")
    def mine(tokens: PolicyTokens, options: PolicyLossOptions) -> LossOutput: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.rl.kl import KL_ESTIMATORS
from mrl.rl.masking import (
    as_float,
    clamp_log_ratio,
    count_clamped,
    masked_fill_zero,
    masked_log_ratio,
    masked_max,
    masked_sum,
)
from mrl.rl.metrics import TokenMetrics
from mrl.rl.registry import Registry


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss sees; equal shapes. Only log_probs carries a gradient.

    log_probs: of the policy in training. old_log_probs: of the policy that the ratio is taken against. weights:
    aggregation weights. is_weights: importance weights of the rollout correction (mrl.rl.correction), None for 1.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    is_weights: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossOptions:
    """clip_low, clip_high: the ratio may use [1 - clip_low, 1 + clip_high]; dual_clip: > 1, or None for none."""

    clip_low: float
    clip_high: float
    dual_clip: float | None

    def __post_init__(self) -> None:
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip_low ({self.clip_low}) and clip_high ({self.clip_high}) must not be negative")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip} but must be greater than 1; null switches it off")


@dataclass(frozen=True)
class LossOutput:
    """loss_sum: scalar with gradient, the weighted sum over valid tokens. metrics: the caller prefixes their names."""

    loss_sum: Tensor
    metrics: TokenMetrics


PolicyLossFn = Callable[[PolicyTokens, PolicyLossOptions], LossOutput]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")
register_policy_loss = POLICY_LOSSES.register


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, options: PolicyLossOptions) -> Tensor:
    """PPO's loss per token (Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric range: DAPO, arXiv:2503.14476).

    With r = exp(log_ratio): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). Where A < 0 and dual_clip = c, at most
    -A c (Ye et al. 2020, arXiv:1912.09729): a token that became far more likely despite a bad advantage cannot
    dominate.
    """
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if options.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * options.dual_clip), loss)


@register_policy_loss("ppo")
def ppo(tokens: PolicyTokens, options: PolicyLossOptions) -> LossOutput:
    """Clipped surrogate, sum_t weights_t * is_weights_t * loss_t, the log-ratio clamped to +-20.

    Metrics. mean: `pg_loss`; `ppo_kl`, the k1 estimate of KL(old || new) = mean(old - new), unclamped; `ratio`;
    `ratio_clipped_low` and `ratio_clipped_high`, the shares of tokens whose gradient the lower and the upper bound
    removed; `pg_clipfrac`, their sum; `pg_clipfrac_lower`, the share held by dual_clip. max: `ratio_max`. sum:
    `log_ratio_clamped`.
    """
    mask = _mask(tokens.mask, tokens.log_probs)
    advantages = masked_fill_zero(as_float(tokens.advantages), mask)
    log_ratio = masked_log_ratio(tokens.log_probs, tokens.old_log_probs, mask)
    clamped_log_ratio = clamp_log_ratio(log_ratio)
    loss = clipped_surrogate(clamped_log_ratio, advantages, options)
    if tokens.is_weights is not None:
        loss = loss * masked_fill_zero(tokens.is_weights.detach(), mask)
    loss_sum = _weighted_sum(loss, tokens.weights, mask)

    with torch.no_grad():
        ratio = clamped_log_ratio.exp()
        low = (advantages < 0) & (ratio < 1.0 - options.clip_low)
        high = (advantages > 0) & (ratio > 1.0 + options.clip_high)
        held = (advantages < 0) & (ratio > (torch.inf if options.dual_clip is None else options.dual_clip))
        count = mask.sum()
        per_token = {
            "ppo_kl": -log_ratio,
            "ratio": ratio,
            "ratio_clipped_low": low,
            "ratio_clipped_high": high,
            "pg_clipfrac": low | high,
            "pg_clipfrac_lower": held,
        }
        metrics = TokenMetrics(
            mean={"pg_loss": (loss_sum.detach().double(), count)}
            | {name: (masked_sum(x, mask), count) for name, x in per_token.items()},
            max={"ratio_max": masked_max(ratio, mask)},
            sum={"log_ratio_clamped": count_clamped(log_ratio, mask)},
        )
    return LossOutput(loss_sum, metrics)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    value_clip: float | None,
    mask: Tensor | None = None,
) -> LossOutput:
    """Critic loss 0.5 * max((v - R)^2, (v_clipped - R)^2), v_clipped within value_clip of the old value; None: no clip.

    The clip follows OpenAI's PPO code (Schulman et al. 2017). Only `values` carries a gradient.
    Metrics. mean: `vf_loss`; `vf_clipfrac`, tokens where the clipped term is the larger; `vpred_mean`.
    """
    mask = _mask(mask, values)
    returns = masked_fill_zero(as_float(returns), mask)
    values = masked_fill_zero(as_float(values), mask)
    loss = (values - returns).square()
    held = torch.zeros_like(mask)
    if value_clip is not None:
        old_values = masked_fill_zero(as_float(old_values), mask)
        clipped_loss = (old_values + (values - old_values).clamp(-value_clip, value_clip) - returns).square()
        held = clipped_loss > loss
        loss = torch.maximum(loss, clipped_loss)
    loss_sum = 0.5 * _weighted_sum(loss, weights, mask)
    count = mask.sum()
    metrics = TokenMetrics(
        mean={
            "vf_loss": (loss_sum.detach().double(), count),
            "vf_clipfrac": (masked_sum(held, mask), count),
            "vpred_mean": (masked_sum(values.detach(), mask), count),
        }
    )
    return LossOutput(loss_sum, metrics)


def entropy_bonus(entropy: Tensor, weights: Tensor, coef: float, mask: Tensor | None = None) -> LossOutput:
    """-coef * weighted sum of the full-vocabulary entropy (nats per token). Metric, mean: `entropy`, unweighted."""
    mask = _mask(mask, entropy)
    loss_sum = -coef * _weighted_sum(as_float(entropy), weights, mask)
    return LossOutput(loss_sum, TokenMetrics(mean={"entropy": (masked_sum(entropy.detach(), mask), mask.sum())}))


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, coef: float, kind: str, mask: Tensor | None = None
) -> LossOutput:
    """coef * weighted sum of the per-token KL to the reference (GRPO, arXiv:2402.03300, eq. 4 with k3).

    Not multiplied by the rollout correction's weights. Metrics. mean: `kl_loss`, weighted, before coef. sum:
    `kl_loss_clamped`.
    """
    mask = _mask(mask, log_probs)
    log_ratio = masked_log_ratio(log_probs, ref_log_probs, mask)
    total = _weighted_sum(KL_ESTIMATORS[kind](log_ratio), weights, mask)
    metrics = TokenMetrics(
        mean={"kl_loss": (total.detach().double(), mask.sum())},
        sum={"kl_loss_clamped": count_clamped(log_ratio, mask)},
    )
    return LossOutput(coef * total, metrics)


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def _weighted_sum(loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return (masked_fill_zero(loss, mask) * masked_fill_zero(weights, mask)).sum()
