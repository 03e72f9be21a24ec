"""Masked statistics and the clamped exponential. Masked slots may hold NaN or infinity and never reach a result.

Statistics are float64 and two-pass (mean first, then squared deviations), with Bessel's correction.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: exp(20) = 4.9e8 is finite in fp32 and far beyond any clip range."""

RELATIVE_STD_EPSILON = 1e-6
"""A standard deviation below this share of the largest magnitude is rounding (fp32 resolves 1.2e-7), not spread."""


def as_float(x: Tensor) -> Tensor:
    """`x` in at least float32: bf16 and fp16 are widened, float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def masked_fill_zero(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask`, 0 elsewhere; the gradient through a masked slot is exactly 0."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """float64 sum of the valid entries over `dim` (all where None); 0 of none."""
    kept = masked_fill_zero(x.double(), mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """float64 maximum of the valid entries; -inf of none."""
    floor = torch.full((1,), -torch.inf, dtype=torch.float64, device=x.device)
    return torch.cat([torch.where(mask, x.double(), floor).flatten(), floor]).max()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """float64 mean of the valid entries; NaN of none."""
    return masked_sum(x, mask) / mask.sum()


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """float64 variance of the valid entries with Bessel's correction; NaN of fewer than two."""
    count = mask.sum()
    variance = masked_sum((x.double() - masked_mean(x, mask)).square(), mask) / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance, torch.nan)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit standard deviation over all valid entries together; dtype of `x`, 0 where masked.

    The mean is always subtracted. There is no scaling where the standard deviation means nothing: fewer than two valid
    entries, or a spread that is rounding noise relative to the values (RELATIVE_STD_EPSILON).
    """
    centred = x.double() - masked_mean(x, mask)
    std = masked_var(x, mask).sqrt()
    # NaN (fewer than two entries) compares False: not scaled.
    scale = torch.where(std > RELATIVE_STD_EPSILON * masked_max(x.abs(), mask), std, 1.0)
    return masked_fill_zero(centred / scale, mask).to(x.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns), float64: 1 is a perfect critic, 0 one as good as a constant.

    NaN where Var(returns) is 0 or there are fewer than two valid entries.
    """
    variance = masked_var(returns, mask)
    residual = masked_var(returns.double() - values.double(), mask)
    return torch.where(variance > 0, 1.0 - residual / variance, torch.nan)


def last_valid_index(mask: Tensor) -> Tensor:
    """Index of each row's last True, int64 [B]; -1 for a row without one."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    none = torch.full((mask.shape[0], 1), -1, device=mask.device)
    return torch.cat([torch.where(mask, positions, -1), none], dim=1).amax(1)


def masked_log_ratio(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log_probs - other_log_probs in at least float32; 0, and without gradient, where masked."""
    return masked_fill_zero(as_float(log_probs) - as_float(other_log_probs), mask)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within +-LOG_RATIO_LIMIT, ready for exp; its gradient is 0 outside. NaN stays NaN."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def count_clamped(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """How many valid log-ratios `clamp_log_ratio` changes, int64 scalar: the counter every user of the clamp logs."""
    return ((log_ratio.detach().abs() > LOG_RATIO_LIMIT) & mask).sum()


def require_finite_scores(scores: Tensor, mask: Tensor) -> None:
    """ValueError where a sample that counts (any valid token) has a score that is NaN or infinite."""
    bad = mask.any(1) & ~scores.isfinite()
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"score of sample {first} is {scores[first].item()}; "
            "mask every token of a sample that has no score, or fix its reward"
        )
