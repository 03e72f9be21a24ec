"""Every rank gets every sample of the step, as packed tensors; nothing is pickled.

Shapes: B samples (prompts x n) in (prompt, sample) order, R the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.rollout.engine import Completion


@dataclass(frozen=True)
class RolloutBatch:
    """All samples of a step, right-padded with 0.

    responses [B, R] int64, mask [B, R] bool (from the lengths, never from a pad id), log_probs [B, R] fp32 of the
    rollout's own sampler, lengths [B] int64, truncated [B] bool (cut at the length limit).
    """

    responses: Tensor
    mask: Tensor
    log_probs: Tensor
    lengths: Tensor
    truncated: Tensor


def replica_slice(num_prompts: int, num_replicas: int, replica: int) -> range:
    """The contiguous, balanced share of the prompts that a replica rolls out."""
    base, extra = divmod(num_prompts, num_replicas)
    first = replica * base + min(replica, extra)
    return range(first, first + base + (replica < extra))


def share_rollouts(
    completions: Sequence[Completion], *, num_prompts: int, n: int, tp: int, group: dist.ProcessGroup
) -> RolloutBatch:
    """Spread each replica's completions from its TP rank 0 over the (gloo) group of all ranks.

    completions: this replica's, in (prompt, sample) order; every rank of the replica passes its own equal copy.
    Collective: three all-reduces, whatever the number of replicas.
    """
    mine = _local_rows(num_prompts, n, tp, group)
    assert len(completions) == len(mine), f"{len(completions)} completions for {len(mine)} samples"
    speaks = dist.get_rank(group) % tp == 0
    meta = torch.zeros(num_prompts * n, 2, dtype=torch.int32)  # length, truncated
    if speaks:
        local = [[len(c.token_ids), c.finish_reason == "length"] for c in completions]
        meta[mine.start : mine.stop] = torch.tensor(local, dtype=torch.int32).view(len(mine), 2)
    _sum_of_parts(meta, group)
    lengths = meta[:, 0].long()
    ends = lengths.cumsum(0)
    tokens = torch.zeros(int(ends[-1]), dtype=torch.int32)
    log_probs = torch.zeros(int(ends[-1]), dtype=torch.float32)
    if speaks:
        for row, completion in zip(mine, completions, strict=True):
            span = slice(int(ends[row] - lengths[row]), int(ends[row]))
            tokens[span] = torch.from_numpy(np.frombuffer(completion.token_ids, np.int64).astype(np.int32))
            log_probs[span] = torch.from_numpy(np.frombuffer(completion.log_probs, np.float64).astype(np.float32))
    _sum_of_parts(tokens, group)
    _sum_of_parts(log_probs, group)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    responses = torch.zeros(mask.shape, dtype=torch.int64)
    log_probs_BR = torch.zeros(mask.shape, dtype=torch.float32)
    responses[mask] = tokens.long()
    log_probs_BR[mask] = log_probs
    return RolloutBatch(responses, mask, log_probs_BR, lengths, meta[:, 1].bool())


def share_rows(rows: Tensor, *, num_prompts: int, n: int, tp: int, group: dist.ProcessGroup) -> Tensor:
    """Spread per-sample rows [local samples, K] fp64 from each replica's TP rank 0; returns [B, K] on every rank.

    What the other TP ranks pass is not looked at, but for K, which is the same everywhere. Collective.
    """
    mine = _local_rows(num_prompts, n, tp, group)
    shared = torch.zeros(num_prompts * n, rows.shape[1], dtype=rows.dtype)
    if dist.get_rank(group) % tp == 0:
        assert rows.shape[0] == len(mine), f"{rows.shape[0]} rows for {len(mine)} samples"
        shared[mine.start : mine.stop] = rows
    _sum_of_parts(shared, group)
    return shared


def _local_rows(num_prompts: int, n: int, tp: int, group: dist.ProcessGroup) -> range:
    """Rows of the batch that this rank's replica sampled."""
    prompts = replica_slice(num_prompts, dist.get_world_size(group) // tp, dist.get_rank(group) // tp)
    return range(prompts.start * n, prompts.stop * n)


def _sum_of_parts(part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill in, in place, the elements that other ranks hold. Exact: each is non-zero on one rank at most."""
    dist.all_reduce(part, group=group)
