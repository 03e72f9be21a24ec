"""The weight bridge of one rank: plan once from metadata, then copy the actor's live shards into vLLM's parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mrl.bridge.plan import ShardGroup, make_plan
from mrl.bridge.transport import execute
from mrl.bridge.verify import Verifier
from mrl.bridge.vllm_layout import LayoutError, VllmLayout

LiveTensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class SyncStats:
    """One sync on this rank. Bytes are counted after the cast to vLLM's dtype."""

    bytes_received: int
    lower_bound_bytes: int
    elements_bound: int


@dataclass(frozen=True)
class RolloutSide:
    """This rank's vLLM: its layout and its live parameters. Of a rank that only trains there is none."""

    layout: VllmLayout
    tensors: LiveTensors


class WeightBridge:
    """Sources are the actor's parameters, destinations vLLM's; both are looked up again at every sync.

    Construction is collective over `group` and exchanges metadata only: each kind of vLLM layout once. `sources` (the
    shards of all training ranks) is a closed form. source_tensors: this rank's, empty where it does not train.
    hf_shapes: of every HF tensor of the model. node_of(rank): the machine a rank runs on. `sync` uses point-to-point
    messages alone.
    """

    def __init__(
        self,
        sources: Sequence[ShardGroup],
        source_tensors: LiveTensors,
        rollout: RolloutSide | None,
        hf_shapes: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup,
        bucket_bytes: int,
        node_of: Callable[[int], int],
        relay: bool = True,
    ) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._source_tensors, self._rollout = source_tensors, rollout
        if rollout is not None:
            _check_bound(rollout)
        destinations = _gather_groups(rollout, group)
        self._plan = make_plan(dist.get_rank(group), sources, destinations, node_of, relay)
        self._forms = [_forms(side) for side in self._live()]
        self._verifier = Verifier(dist.get_rank(group), sources, destinations, hf_shapes)
        self._pads_zeroed_at: dict[str, int] = {}

    def sync(self) -> SyncStats:
        """Collective: bring vLLM's parameters to the actor's current weights."""
        source, destination = self._live()
        for side, before in zip((source, destination), self._forms, strict=True):
            _check_unchanged(before, _forms(side))
        self._zero_new_pads(destination)
        stats = execute(self._plan, source.__getitem__, destination.__getitem__, self._group, self._bucket_bytes)
        return SyncStats(stats.bytes_received, self._plan.lower_bound_bytes, self._plan.elements_bound)

    def verify(self) -> None:
        """Collective, after a sync: WeightMismatchError where vLLM's weights are not the actor's, bit for bit."""
        source, destination = self._live()
        self._verifier.check(source.__getitem__, destination.__getitem__, self._group)

    def _live(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Both sides' tensors as they are now."""
        return self._source_tensors(), self._rollout.tensors() if self._rollout is not None else {}

    def _zero_new_pads(self, destination: Mapping[str, Tensor]) -> None:
        """Pad rows are no one's Segment: zero them when their storage is new, as at the first sync."""
        for name in self._rollout.layout.pad_elements if self._rollout is not None else ():
            if self._pads_zeroed_at.get(name) != destination[name].data_ptr():
                destination[name].zero_()
                self._pads_zeroed_at[name] = destination[name].data_ptr()


_Form = tuple[tuple[int, ...], tuple[int, ...], str]
"""(shape, strides, dtype): what a plan relies on; where the storage lies it does not."""


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, _Form]:
    return {name: (tuple(t.shape), t.stride(), str(t.dtype)) for name, t in tensors.items()}


def _check_unchanged(before: Mapping[str, _Form], now: Mapping[str, _Form]) -> None:
    for name in before.keys() | now.keys():
        if before.get(name) != now.get(name):
            raise LayoutError(
                f"{name}: (shape, strides, dtype) was {before.get(name)} when the weight sync was planned and is "
                f"{now.get(name)} now; a re-laid parameter cannot be synchronised"
            )


def _check_bound(rollout: RolloutSide) -> None:
    total = sum(tensor.numel() for tensor in rollout.tensors().values())
    accounted = rollout.layout.elements_bound + sum(rollout.layout.pad_elements.values())
    if accounted != total:
        raise LayoutError(
            f"vLLM's parameters hold {total} elements, of which {accounted} are bound or declared padding; "
            "a weight would stay unset"
        )


def _gather_groups(rollout: RolloutSide | None, group: dist.ProcessGroup) -> list[ShardGroup]:
    """All ranks' vLLM shards. Ranks compare digests; each distinct layout then travels once, from its first rank."""
    mine: tuple[Any, dict[str, str]] | None = None
    digest = None
    if rollout is not None:
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in rollout.tensors().items()}
        mine = (rollout.layout.segments, dtypes)
        digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    digests: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    groups = []
    for kind in dict.fromkeys(d for d in digests if d is not None):
        ranks = tuple(rank for rank, d in enumerate(digests) if d == kind)
        box: list[Any] = [mine if digest == kind else None]
        dist.broadcast_object_list(box, group=group, group_src=ranks[0])
        groups.append(ShardGroup(ranks, *box[0]))
    return groups
