"""Proof that both sides of a sync hold the same weights: fingerprints in HF coordinates.

The fingerprint of a box is the sum, modulo 2^64, of every element's bits (after the cast to the rollout's dtype) times
a mix of the element's linear index in its HF tensor. It changes with one flipped bit and with elements that trade
places, and the fingerprints of the parts of a box add up to that of the box, however each side is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from converters.load import segment_view
from converters.rules.segment import Box, Segment, contiguous_strides
from mrl.bridge.plan import Router, ShardGroup

CHUNK = 1 << 22
"""Elements that are hashed at a time, which bounds the memory for 64-bit copies."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class WeightMismatchError(RuntimeError):
    """After a sync vLLM holds other weights than the actor."""


def fingerprint(values: Tensor, box: Box, hf_shape: Sequence[int]) -> Tensor:
    """int64 scalar of a box; values: its elements, shaped as the box, in the dtype whose bits count."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = max(1, CHUNK // max(1, values[0].numel()))
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows].contiguous()
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        starts = (box.start[0] + first, *box.start[1:])
        for axis, (start, stride) in enumerate(zip(starts, contiguous_strides(hf_shape), strict=True)):
            along = (start + torch.arange(part.shape[axis], device=values.device)) * stride
            index = index + along.view([-1 if k == axis else 1 for k in range(part.ndim)])
        total += (part.view(BITS[part.dtype]).long() * _mix(index)).sum()
    return total


def _mix(index: Tensor) -> Tensor:
    """An odd 64-bit number unlike its neighbours': splitmix64's finaliser (Steele et al. 2014)."""
    z = (index + 1) * -7046029254386353131
    z = (z ^ (z >> 30)) * -4658895280553007687
    z = (z ^ (z >> 27)) * -7723592293110705685
    return (z ^ (z >> 31)) | 1


@dataclass(frozen=True)
class _Part:
    """A box on this rank, and the places of its parts in the list that all ranks share."""

    hf_name: str
    parameter: str
    segment: Segment
    dtype: torch.dtype
    places: tuple[int, ...]


class Verifier:
    """One rank's part of the comparison; holds no weights.

    All ranks number the intersections of source and destination boxes alike. Of each, the first rank that holds it in
    training gives the fingerprint, and whoever holds the destination box compares the sum with its own.
    """

    def __init__(
        self,
        rank: int,
        sources: Sequence[ShardGroup],
        destinations: Sequence[ShardGroup],
        hf_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._shapes = hf_shapes
        self._given: list[_Part] = []
        self._checked: list[_Part] = []
        mine_held, mine_wanted = _segments_of(rank, sources), _segments_of(rank, destinations)
        router = Router(sources, destinations, node_of=lambda _rank: 0, relay=False)
        self._count = 0
        for name in sorted(router.destinations):
            for wanted in router.destinations[name]:
                dtype: torch.dtype = getattr(torch, wanted.dtype)
                first = self._count
                for held, common in router.overlaps(name, wanted):
                    if held.ranks[0] == rank:
                        parameter, segment = mine_held[name, held.box]
                        self._given.append(_Part(name, parameter, segment.within(common), dtype, (self._count,)))
                    self._count += 1
                if rank in wanted.ranks:
                    parameter, segment = mine_wanted[name, wanted.box]
                    self._checked.append(_Part(name, parameter, segment, dtype, tuple(range(first, self._count))))

    def check(
        self, source: Callable[[str], Tensor], destination: Callable[[str], Tensor], group: dist.ProcessGroup
    ) -> None:
        """Collective: raises WeightMismatchError on all ranks, naming tensors and ranks, where the sides differ."""
        own = [self._fingerprint(source, part) for part in self._given]
        found = [self._fingerprint(destination, part) for part in self._checked]
        device = (own or found or [torch.zeros(())])[0].device
        expected = torch.zeros(self._count, dtype=torch.int64, device=device)
        for part, value in zip(self._given, own, strict=True):
            expected[part.places[0]] = value
        dist.all_reduce(expected, group=group)  # each place is written by one rank
        expected = expected.cpu()
        wrong = [
            part.hf_name
            for part, value in zip(self._checked, found, strict=True)
            if int(expected[list(part.places)].sum()) != int(value)
        ]
        everywhere: list[list[str]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, wrong, group=group)
        names = sorted({name for names in everywhere for name in names})
        if names:
            ranks = [rank for rank, names_there in enumerate(everywhere) if names_there]
            raise WeightMismatchError(
                f"after the weight sync vLLM's {', '.join(names[:5])}{' and more' if len(names) > 5 else ''} on ranks "
                f"{ranks} are not the actor's; the run stops rather than learn from the wrong policy's samples"
            )

    def _fingerprint(self, tensors: Callable[[str], Tensor], part: _Part) -> Tensor:
        values = segment_view(tensors(part.parameter), part.segment)
        return fingerprint(values.to(part.dtype), part.segment.box, self._shapes[part.hf_name])


def _segments_of(rank: int, groups: Sequence[ShardGroup]) -> dict[tuple[str, Box], tuple[str, Segment]]:
    return {
        (segment.hf_name, segment.box): (parameter, segment)
        for group in groups
        if rank in group.ranks
        for parameter, segments in group.layout.items()
        for segment in segments
    }
