"""Run by a gang: log-probs of one long sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.data.batching import build_micro_batches
from tests.engine.cases import Bench


def long_log_probs(path: str, tokens: Tensor, max_length: int) -> Tensor:
    """[L - 1] log-probs of tokens[1:], each given all before it."""
    with Bench(path, 1, 1, "lm", max_length=max_length) as bench:
        response = tokens[None, 1:]
        lengths = torch.tensor([response.shape[1]])
        mask = torch.ones_like(response, dtype=torch.bool)
        micro = build_micro_batches(
            [tokens[:1]], response, lengths, mask, [0], dp_size=1, dp_rank=0, max_tokens=4096, pad_multiple=1
        )
        return bench.engine.score(micro, (1, response.shape[1]))[0]
