"""How per-token losses become one number: weights that let every mode share one global division by the token count."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    # length[B, 1] float64, mean length N_tokens / N_seqs, max_response_length -> weights of a sequence's tokens [B, 1]
    "token-mean": lambda length, mean_length, limit: torch.ones_like(length),
    "seq-mean-token-mean": lambda length, mean_length, limit: mean_length / length.clamp(min=1),
    "seq-mean-token-sum": lambda length, mean_length, limit: mean_length.expand_as(length),
    "seq-mean-token-sum-norm": lambda length, mean_length, limit: (mean_length / limit).expand_as(length),
}


def token_weights(mask: Tensor, mode: str, max_response_length: int) -> Tensor:
    """Weights w such that sum_t w_t * l_t / N_tokens is `mode`'s mean of the token losses l over the global mini-batch.

    With N_tokens valid tokens in N_seqs sequences, and sequence i of len_i tokens:

    - token-mean (DAPO, arXiv:2503.14476): sum of all / N_tokens; w = 1.
    - seq-mean-token-mean (GRPO, arXiv:2402.03300): mean over i of (sum of i / len_i); w = N_tokens / N_seqs / len_i.
    - seq-mean-token-sum: mean over i of (sum of i); w = N_tokens / N_seqs.
    - seq-mean-token-sum-norm (Dr.GRPO, arXiv:2503.20783): mean over i of (sum of i / max_response_length);
      w = N_tokens / N_seqs / max_response_length.

    A sequence without a valid token (dropped, or masked for its length) does not count in N_seqs: leaving a sample out
    must not scale the others down.

    Args: mask [B, R] bool of the *whole* mini-batch over all ranks, so that the weights do not depend on any split.
    Returns: [B, R] float32, 0 where masked. Raises ValueError for an unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(AGGREGATIONS)}")
    assert max_response_length > 0, max_response_length
    length = mask.sum(1, keepdim=True, dtype=torch.float64)
    mean_length = length.sum() / (length > 0).sum().clamp(min=1)
    weights = AGGREGATIONS[mode](length, mean_length, max_response_length)
    return torch.where(mask, weights, 0.0).float()
