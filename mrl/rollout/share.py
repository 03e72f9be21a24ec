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

LENGTH, STOP = 1, 0


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
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    replicas = world // tp
    speaks = rank % tp == 0
    token_parts, log_prob_parts, meta_parts = [], [], []
    for replica in range(replicas):
        source = dist.get_global_rank(group, replica * tp)
        rows = len(replica_slice(num_prompts, replicas, replica)) * n
        mine = speaks and rank // tp == replica
        meta = torch.zeros(rows, 2, dtype=torch.int32)  # length, truncated
        if mine:
            assert len(completions) == rows, f"{len(completions)} completions for {rows} samples"
            cut = [LENGTH if c.finish_reason == "length" else STOP for c in completions]
            meta = torch.tensor(
                [[len(c.token_ids), t] for c, t in zip(completions, cut, strict=True)], dtype=torch.int32
            )
            meta = meta.view(rows, 2)
        dist.broadcast(meta, source, group=group)
        total = int(meta[:, 0].sum())
        tokens = torch.zeros(total, dtype=torch.int32)
        log_probs = torch.zeros(total, dtype=torch.float32)
        if mine and rows:
            tokens = torch.from_numpy(np.concatenate([np.frombuffer(c.token_ids, np.int64) for c in completions])).int()
            log_probs = torch.from_numpy(
                np.concatenate([np.frombuffer(c.log_probs, np.float64) for c in completions])
            ).float()
        if total:
            dist.broadcast(tokens, source, group=group)
            dist.broadcast(log_probs, source, group=group)
        meta_parts.append(meta)
        token_parts.append(tokens)
        log_prob_parts.append(log_probs)
    meta = torch.cat(meta_parts)
    lengths = meta[:, 0].long()
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]
    responses = torch.zeros(mask.shape, dtype=torch.int64)
    log_probs_BR = torch.zeros(mask.shape, dtype=torch.float32)
    responses[mask] = torch.cat(token_parts).long()
    log_probs_BR[mask] = torch.cat(log_prob_parts)
    return RolloutBatch(responses, mask, log_probs_BR, lengths, meta[:, 1] == LENGTH)


def share_rows(rows: Tensor, *, num_prompts: int, n: int, tp: int, group: dist.ProcessGroup) -> Tensor:
    """Spread per-sample rows [local samples, K] fp64 from each replica's TP rank 0; returns [B, K] on every rank."""
    rank, replicas = dist.get_rank(group), dist.get_world_size(group) // tp
    parts = []
    for replica in range(replicas):
        count = len(replica_slice(num_prompts, replicas, replica)) * n
        part = rows if rank == replica * tp else torch.zeros(count, rows.shape[1], dtype=rows.dtype)
        assert part.shape[0] == count, f"{part.shape[0]} rows for {count} samples"
        part = part.contiguous()
        dist.broadcast(part, dist.get_global_rank(group, replica * tp), group=group)
        parts.append(part)
    return torch.cat(parts)
