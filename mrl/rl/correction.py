"""Correction of the gap between the rollout engine's log-probabilities and the trainer's under equal parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.rl.kl import KL_ESTIMATORS
from mrl.rl.masking import (
    clamp_log_ratio,
    count_clamped,
    masked_fill_zero,
    masked_log_ratio,
    masked_max,
    masked_sum,
)
from mrl.rl.metrics import TokenMetrics


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> TokenMetrics:
    """Raw (untruncated) statistics of d = old - rollout on the sampled tokens; any shape.

    mean: `exp_abs_diff` = mean(exp|d|), the gate's number, 1 for a perfect match; `kl` = mean(-d) and `k3_kl` =
    mean(exp(d) - 1 - d), both estimates of KL(rollout || trainer); `is_weight` = mean(exp(d)). max: `abs_diff_max`,
    `is_weight_max`. sum: `log_ratio_clamped`, tokens with |d| > 20 (exp sees +-20).
    """
    log_ratio = masked_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), mask).double()
    ratio = clamp_log_ratio(log_ratio).exp()
    count = mask.sum()
    per_token = {
        "exp_abs_diff": clamp_log_ratio(log_ratio.abs()).exp(),
        # The tokens were sampled from the rollout policy, so the estimators see log(rollout / trainer) = -d.
        "kl": KL_ESTIMATORS["k1"](-log_ratio),
        "k3_kl": KL_ESTIMATORS["k3"](-log_ratio),
        "is_weight": ratio,
    }
    return TokenMetrics(
        mean={name: (masked_sum(x, mask), count) for name, x in per_token.items()},
        max={"abs_diff_max": masked_max(log_ratio.abs(), mask), "is_weight_max": masked_max(ratio, mask)},
        sum={"log_ratio_clamped": count_clamped(log_ratio, mask)},
    )


def token_importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float
) -> tuple[Tensor, TokenMetrics]:
    """Truncated importance weights min(exp(old - rollout), cap) per token (TIS; Ionides 2008, Yao et al. 2025).

    They turn an expectation over the tokens the rollout engine sampled into one over the trainer's policy; the cap
    trades a little bias for bounded variance.

    Args: old_log_probs, rollout_log_probs of any one shape; mask bool; cap > 0.
    Returns: (weights, metrics): weights float32, detached, 0 where masked; metrics of `mismatch_metrics`, and mean
    `is_capped`, the share of tokens whose weight the cap lowered.
    """
    if not cap > 0:
        raise ValueError(f"rollout_correction.cap is {cap} but must be positive")
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, mask)
    log_ratio = masked_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), mask)
    ratio = clamp_log_ratio(log_ratio).exp()
    metrics.mean["is_capped"] = (masked_sum(ratio > cap, mask), mask.sum())
    return masked_fill_zero(ratio.clamp(max=cap), mask).to(torch.float32), metrics
