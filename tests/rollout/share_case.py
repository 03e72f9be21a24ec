"""Run by a gang: sharing rollouts made up from a rule, without vLLM."""

from __future__ import annotations

from array import array
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.rollout.engine import Completion, check_replica_agrees
from mrl.rollout.share import RolloutBatch, replica_slice, share_rollouts, share_rows


def made_up(prompt: int, sample: int) -> Completion:
    """Tokens and log-probs that tell prompt, sample and position; large ids, differing lengths."""
    length = 1 + (3 * prompt + 5 * sample) % 7
    tokens = array("q", [100_000 * prompt + 1000 * sample + t for t in range(length)])
    log_probs = array("d", [-0.1 * prompt - 0.01 * sample - 0.001 * t for t in range(length)])
    return Completion(prompt, sample, tokens, log_probs, "length" if length == 7 else "stop")


def shared(num_prompts: int, n: int, tp: int) -> tuple[RolloutBatch, Tensor]:
    """The batch, and rows [prompt, sample, NaN where odd] fp64; only TP rank 0 has rows."""
    group = dist.group.WORLD
    assert group is not None
    rank, replicas = dist.get_rank(), dist.get_world_size() // tp
    mine = [(p, s) for p in replica_slice(num_prompts, replicas, rank // tp) for s in range(n)]
    batch = share_rollouts([made_up(*key) for key in mine], num_prompts=num_prompts, n=n, tp=tp, group=group)
    local = [[p, s, float("nan") if s % 2 else 1e300] for p, s in mine] if rank % tp == 0 else []
    rows = torch.tensor(local, dtype=torch.float64).view(len(local), 3)
    return batch, share_rows(rows, num_prompts=num_prompts, n=n, tp=tp, group=group)


def disagreement(tokens_by_rank: list[list[list[int]]]) -> str:
    """The error that this rank gets where the ranks of a replica hold these samples."""
    group = dist.group.WORLD
    assert group is not None
    samples: list[Any] = tokens_by_rank[dist.get_rank()]
    completions = [Completion(0, i, array("q", t), array("d", [-1.0] * len(t)), "stop") for i, t in enumerate(samples)]
    try:
        check_replica_agrees(completions, group)
    except RuntimeError as error:
        return str(error)
    return "no error"
