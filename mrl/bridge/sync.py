"""The weight bridge of one rank: plan once from metadata, then copy the actor's live shards into vLLM's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from converters.rules.segment import ShardLayout
from mrl.bridge.plan import make_plan
from mrl.bridge.transport import execute
from mrl.bridge.vllm_layout import LayoutError, VllmLayout

LiveTensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class SyncStats:
    """One sync on this rank. Bytes are counted after the cast to vLLM's dtype."""

    bytes_received: int
    lower_bound_bytes: int
    elements_bound: int


class WeightBridge:
    """Sources are the actor's parameters, destinations vLLM's; both are looked up again at every sync.

    Construction is collective over `group` and exchanges metadata only: every rank's traced vLLM layout. `sources`
    (any rank's Megatron-Core layout) is a closed form. node_of(rank): the machine a rank runs on. `sync` uses
    point-to-point messages alone.
    """

    def __init__(
        self,
        sources: Mapping[int, ShardLayout],
        source_tensors: LiveTensors,
        layout: VllmLayout,
        destination_tensors: LiveTensors,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        node_of: Callable[[int], int],
    ) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._source_tensors, self._destination_tensors = source_tensors, destination_tensors
        self._layout = layout
        live = destination_tensors()
        self._check_bound(live)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in live.items()}
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (layout.segments, dtypes), group=group)
        self._plan = make_plan(
            dist.get_rank(group),
            sources,
            {rank: segments for rank, (segments, _) in enumerate(gathered)},
            lambda rank, parameter: gathered[rank][1][parameter],
            node_of,
        )
        self._pads_zeroed_at: dict[str, int] = {}

    def _check_bound(self, live: Mapping[str, Tensor]) -> None:
        total = sum(tensor.numel() for tensor in live.values())
        accounted = self._layout.elements_bound + sum(self._layout.pad_elements.values())
        if accounted != total:
            raise LayoutError(
                f"vLLM's parameters hold {total} elements, of which {accounted} are bound or declared padding; "
                "a weight would stay unset"
            )

    def sync(self) -> SyncStats:
        """Collective: bring vLLM's parameters to the actor's current weights."""
        source, destination = self._source_tensors(), self._destination_tensors()
        self._zero_new_pads(destination)
        stats = execute(self._plan, source.__getitem__, destination.__getitem__, self._group, self._bucket_bytes)
        return SyncStats(stats.bytes_received, self._plan.lower_bound_bytes, self._plan.elements_bound)

    def _zero_new_pads(self, destination: Mapping[str, Tensor]) -> None:
        """Pad rows are no one's Segment: zero them when their storage is new, as at the first sync."""
        for name in self._layout.pad_elements:
            if self._pads_zeroed_at.get(name) != destination[name].data_ptr():
                destination[name].zero_()
                self._pads_zeroed_at[name] = destination[name].data_ptr()
