"""What happens to a response that was cut at the length limit instead of ending by itself."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_truncation(scores: Tensor, mask: Tensor, truncated: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Scores and response mask after `algorithm.truncated`.

    keep: both as they are. zero_reward: score 0 for a truncated response. mask: no token of it counts, in group
    statistics as in losses (overlong filtering, DAPO, arXiv:2503.14476): a cut says nothing about quality.

    Args: scores [B] float; mask [B, R] bool; truncated [B] bool (finish reason "length").
    Returns: (scores [B], mask [B, R]); the inputs are not written to. Raises ValueError for an unknown mode.
    """
    if mode == "keep":
        return scores, mask
    if mode == "zero_reward":
        return torch.where(truncated, 0.0, scores), mask
    if mode == "mask":
        return scores, mask & ~truncated[:, None]
    raise ValueError(f"unknown algorithm.truncated {mode!r}; known: keep, zero_reward, mask")
