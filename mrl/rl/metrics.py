"""Typed metrics of a group of tokens: what is averaged travels as (sum, count), so that no mean of means can arise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenMetrics:
    """Scalar tensors by name, detached, on the device of their inputs (reading one is left to the caller).

    mean: (sum, count), added up over micro-batches and ranks and divided once. max: reduced by maximum; -inf where
    no token was seen. sum: counters, added up.
    """

    mean: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    max: dict[str, Tensor] = field(default_factory=dict)
    sum: dict[str, Tensor] = field(default_factory=dict)


def merge_metrics(*parts: TokenMetrics) -> TokenMetrics:
    """Combine metrics of several micro-batches or of several losses; equal names are reduced by their type."""
    merged = TokenMetrics()
    for part in parts:
        for name, (total, count) in part.mean.items():
            if name in merged.mean:
                total, count = total + merged.mean[name][0], count + merged.mean[name][1]
            merged.mean[name] = (total, count)
        for name, value in part.max.items():
            merged.max[name] = torch.maximum(value, merged.max[name]) if name in merged.max else value
        for name, value in part.sum.items():
            merged.sum[name] = value + merged.sum[name] if name in merged.sum else value
    return merged
