"""What the engine is fed: packed sequences, and the positions at which its head is asked for something."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T tokens in S sequences, with N scored positions.

    tokens, positions: [T] int64; positions restart at 0 in each sequence. cu_seqlens: [S + 1] int32 from 0 to T.
    states: [N] int64, the position whose hidden state predicts targets[N] (the token before it). slots: [N] int64,
    where the N results belong in the flattened [B, R] response matrix. fields: further per-position inputs of the
    loss, [N] each (advantages, old log-probs, ...). A dummy micro-batch, which evens out counts over DP, has N = 0.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    states: Tensor
    targets: Tensor
    slots: Tensor
    fields: dict[str, Tensor]

    @property
    def count(self) -> int:
        """Scored positions."""
        return self.states.numel()

    def with_fields(self, **matrices: Tensor) -> MicroBatch:
        """A copy with further loss inputs, each picked from a [B, R] matrix at this micro-batch's slots."""
        picked = {name: matrix.flatten()[self.slots.cpu()] for name, matrix in matrices.items()}
        return replace(self, fields=self.fields | picked)

    def to(self, device: torch.device) -> MicroBatch:
        tensors = ("tokens", "positions", "cu_seqlens", "states", "targets", "slots")
        moved = {name: self.__dict__[name].to(device) for name in tensors}
        return replace(self, **moved, fields={name: value.to(device) for name, value in self.fields.items()})
