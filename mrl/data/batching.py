"""From a rollout batch to the packed micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.data.micro_batch import MicroBatch
from mrl.data.packing import pack, plan_micro_batches, response_state_index


def build_micro_batches(
    prompts: Sequence[Tensor],
    responses_BR: Tensor,
    response_lengths_B: Tensor,
    response_mask_BR: Tensor,
    samples: Sequence[int],
    *,
    dp_size: int,
    dp_rank: int,
    max_tokens: int,
    pad_multiple: int,
) -> list[MicroBatch]:
    """Packed micro-batches of the chosen samples for one DP rank; every DP rank gets the same number.

    prompts: [B] token tensors. Only positions with response_mask True are scored; what a token attends to includes the
    masked ones. pad_multiple: packed lengths are padded to it (tp under sequence parallelism).
    """
    lengths = [prompts[i].numel() + int(response_lengths_B[i]) for i in samples]
    plan = plan_micro_batches(lengths, dp_size, max_tokens)[dp_rank]
    width = responses_BR.shape[1]
    return [
        _pack_one(
            [samples[i] for i in part], prompts, responses_BR, response_lengths_B, response_mask_BR, width, pad_multiple
        )
        for part in plan
    ]


def _pack_one(
    rows: list[int],
    prompts: Sequence[Tensor],
    responses_BR: Tensor,
    response_lengths_B: Tensor,
    response_mask_BR: Tensor,
    width: int,
    pad_multiple: int,
) -> MicroBatch:
    response_lengths = [int(response_lengths_B[row]) for row in rows]
    responses = [responses_BR[row, :length] for row, length in zip(rows, response_lengths, strict=True)]
    packed = pack([torch.cat([prompts[row], r]) for row, r in zip(rows, responses, strict=True)], pad_multiple)
    states = response_state_index(packed.cu_seqlens, [prompts[row].numel() for row in rows], response_lengths)
    slots = [row * width + torch.arange(length) for row, length in zip(rows, response_lengths, strict=True)]
    empty = [torch.empty(0, dtype=torch.int64)]
    slots_N = torch.cat(slots + empty)
    targets_N = torch.cat(responses + empty)
    kept = response_mask_BR.flatten()[slots_N]
    return MicroBatch(
        tokens=packed.tokens,
        positions=packed.position_ids,
        cu_seqlens=packed.cu_seqlens,
        max_seqlen=packed.max_seqlen,
        states=states[kept],
        targets=targets_N[kept],
        slots=slots_N[kept],
        fields={},
    )
