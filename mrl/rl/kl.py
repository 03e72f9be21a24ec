"""KL between policy and reference: per-token estimators, the KL-shaped reward, and the coefficient's controllers.

With d = log pi(y) - log pi_ref(y) at sampled tokens y ~ pi, each estimator's mean estimates KL(pi || pi_ref)
(Schulman 2020, "Approximating KL Divergence"); `abs` is a distance, not an estimate of KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mrl.rl.masking import (
    clamp_log_ratio,
    count_clamped,
    last_valid_index,
    masked_fill_zero,
    masked_log_ratio,
    masked_sum,
    require_finite_scores,
)
from mrl.rl.metrics import TokenMetrics
from mrl.rl.registry import Registry

KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimator")
register_kl = KL_ESTIMATORS.register


@register_kl("k1")
def k1(log_ratio: Tensor) -> Tensor:
    """d: unbiased, may be negative. As a loss its expected gradient is 0: use it in the reward."""
    return log_ratio


@register_kl("k2")
def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative; as a loss its gradient is that of KL(pi || pi_ref)."""
    return 0.5 * log_ratio.square()


@register_kl("k3")
def k3(log_ratio: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative.

    d is clamped in both terms: with only the exponential clamped, the linear term would push a token whose probability
    collapsed (d < -20) further down.
    """
    clamped = clamp_log_ratio(log_ratio)
    return torch.expm1(-clamped) + clamped


@register_kl("abs")
def absolute(log_ratio: Tensor) -> Tensor:
    """|d|: a distance for logging or for a symmetric penalty."""
    return log_ratio.abs()


def score_at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, R] float32 that are 0 but for scores[B] on each row's last valid token; none for a dropped row.

    Raises ValueError where a sample that counts has a score that is NaN or infinite.
    """
    require_finite_scores(scores, mask)
    at_last = torch.arange(mask.shape[1], device=mask.device) == last_valid_index(mask)[:, None]
    return masked_fill_zero(scores.float()[:, None].expand(mask.shape), at_last)


def kl_in_reward(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, coef: float, kind: str
) -> tuple[Tensor, TokenMetrics]:
    """Token rewards r_t = -coef * kl_t, plus the score on the last valid token (Ziegler et al. 2019, arXiv:1909.08593).

    Args: scores [B]; log_probs (the policy that sampled), ref_log_probs [B, R] float; mask [B, R] bool; `kind` of
    KL_ESTIMATORS.
    Returns: (rewards [B, R] float32, metrics): mean `reward_kl_penalty` (the estimator's value per token, before coef;
    what a controller is fed with), sum `reward_kl_penalty_clamped`.
    Raises ValueError where a sample that counts has a score that is NaN or infinite.
    """
    log_ratio = masked_log_ratio(log_probs.detach(), ref_log_probs, mask)
    kl = KL_ESTIMATORS[kind](log_ratio)
    metrics = TokenMetrics(
        mean={"reward_kl_penalty": (masked_sum(kl, mask), mask.sum())},
        sum={"reward_kl_penalty_clamped": count_clamped(log_ratio, mask)},
    )
    return score_at_last_token(scores, mask) - coef * kl.float(), metrics


def reference_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> TokenMetrics:
    """Every estimator of the policy's KL to the reference, for the log: mean per token `ref_kl_<estimator>`.

    log_probs (the policy that sampled), ref_log_probs [B, R] float; mask [B, R] bool.
    """
    log_ratio = masked_log_ratio(log_probs.detach(), ref_log_probs, mask)
    count = mask.sum()
    return TokenMetrics(
        mean={f"ref_kl_{name}": (masked_sum(KL_ESTIMATORS[name](log_ratio), mask), count) for name in KL_ESTIMATORS}
    )


class KlController(Protocol):
    """The KL coefficient over a run. `coef` is per token; the state belongs in the checkpoint."""

    @property
    def coef(self) -> float: ...

    def update(self, kl_per_token: float, num_samples: int) -> None: ...

    def state_dict(self) -> dict[str, float | str]: ...

    def load_state_dict(self, state: Mapping[str, float | str]) -> None: ...


class FixedKl:
    """A constant coefficient. Loading a state keeps the configured coefficient."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl_per_token: float, num_samples: int) -> None:
        """A fixed coefficient ignores what was measured."""

    def state_dict(self) -> dict[str, float | str]:
        return {"type": "fixed"}

    def load_state_dict(self, state: Mapping[str, float | str]) -> None:
        _check_state(state, {"type"}, "fixed")


class AdaptiveKl:
    """Proportional controller towards a target KL per token (Ziegler et al. 2019, section 2.2).

    coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1)): the error is relative, so the
    unit is the target's (nats per token), whatever the response length. The last factor is capped so that a batch
    larger than the horizon cannot turn the coefficient negative.
    """

    MAX_RELATIVE_ERROR = 0.2

    def __init__(self, coef: float, target_kl_per_token: float, horizon: int) -> None:
        if not target_kl_per_token > 0 or not horizon > 0:
            raise ValueError(f"target_kl_per_token ({target_kl_per_token}) and horizon ({horizon}) must be positive")
        self.coef = coef
        self._target = target_kl_per_token
        self._horizon = horizon

    def update(self, kl_per_token: float, num_samples: int) -> None:
        """Feed the mean KL per valid token of a rollout batch of `num_samples`; ValueError where it is not finite."""
        if not math.isfinite(kl_per_token):
            raise ValueError(f"KL per token is {kl_per_token}: the log-probabilities of policy or reference are broken")
        error = kl_per_token / self._target - 1.0
        error = min(max(error, -self.MAX_RELATIVE_ERROR), self.MAX_RELATIVE_ERROR)
        self.coef *= 1.0 + error * min(num_samples / self._horizon, 1.0)

    def state_dict(self) -> dict[str, float | str]:
        return {"type": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float | str]) -> None:
        _check_state(state, {"type", "coef"}, "adaptive")
        self.coef = float(state["coef"])


def build_kl_controller(kind: str, coef: float, target_kl_per_token: float, horizon: int) -> KlController:
    """The controller `algorithm.kl_ctrl` describes; the last two arguments matter to `adaptive` only."""
    if kind == "fixed":
        return FixedKl(coef)
    if kind == "adaptive":
        return AdaptiveKl(coef, target_kl_per_token, horizon)
    raise ValueError(f"unknown KL controller {kind!r}; known: adaptive, fixed")


def _check_state(state: Mapping[str, float | str], keys: set[str], kind: str) -> None:
    if set(state) != keys or state["type"] != kind:
        raise ValueError(
            f"checkpoint holds the KL controller state {dict(state)}, but algorithm.kl_ctrl.type is {kind}; "
            "resume with the type it was saved with"
        )
