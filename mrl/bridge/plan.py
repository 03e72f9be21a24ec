"""Who sends which box to whom: intersecting source and destination Segments. Pure, deterministic, torch-free.

A plan holds static facts only. Each rank computes its own part; sender and receiver derive the same list of pieces
between them, in the same order, from the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from converters.rules.segment import Box, Segment, ShardLayout

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element of the dtypes that weights travel in."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box on its way from a parameter of one rank to a parameter of another (or the same) rank."""

    source_parameter: str
    source: Segment
    destination_parameter: str
    destination: Segment
    dtype: str
    """The destination's dtype; the sender casts, and bytes are counted after it."""

    @property
    def numel(self) -> int:
        return self.destination.numel

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    def within(self, box: Box) -> Piece:
        """The part of this piece that carries `box`."""
        return replace(self, source=self.source.within(box), destination=self.destination.within(box))

    def split(self, limit: int) -> list[Piece]:
        """Cut along the leading axes into boxes of at most `limit` bytes each (never below one element)."""
        if self.nbytes <= limit or self.numel == 1:
            return [self]
        box = self.destination.box
        axis = next(k for k, size in enumerate(box.size) if size > 1)
        slab = self.nbytes // box.size[axis]
        step = max(1, limit // slab)
        parts = []
        for first in range(0, box.size[axis], step):
            start, size = list(box.start), list(box.size)
            start[axis] += first
            size[axis] = min(step, box.size[axis] - first)
            parts += self.within(Box(tuple(start), tuple(size))).split(limit)
        return parts


@dataclass
class RankPlan:
    """One rank's part. The lists of a pair of ranks are equal on both sides, element by element."""

    rank: int
    local: list[Piece] = field(default_factory=list)
    sends: dict[int, list[Piece]] = field(default_factory=dict)
    receives: dict[int, list[Piece]] = field(default_factory=dict)
    lower_bound_bytes: int = 0
    """Bytes of this rank's destination that none of its own source shards holds."""
    elements_bound: int = 0
    """Destination elements that some Segment fills."""

    @property
    def receive_bytes(self) -> int:
        return sum(piece.nbytes for pieces in self.receives.values() for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One distinct box of a HF tensor and every (rank, parameter, segment) that holds it."""

    box: Box
    holders: tuple[tuple[int, str, Segment], ...]


def make_plan(
    rank: int,
    sources: Mapping[int, ShardLayout],
    destinations: Mapping[int, ShardLayout],
    dtype_of: Callable[[int, str], str],
    node_of: Callable[[int], int] = lambda rank: 0,
) -> RankPlan:
    """This rank's plan.

    sources, destinations: global rank -> its ShardLayout. dtype_of(rank, parameter): dtype of a destination parameter.
    node_of(rank): the machine a rank runs on. The source of a box is a closed form of (destination rank, box): the rank
    itself, else its node, else all holders in turn, rotated by the destination's rank so that replicas share the load.
    Raises ValueError naming the HF tensor where the source shards overlap or nobody holds a destination box.
    """
    shards = _index_sources(sources)
    plan = RankPlan(rank)
    for receiver in sorted(destinations):
        for parameter, segments in destinations[receiver].items():
            dtype = dtype_of(receiver, parameter)
            for segment in segments:
                _route(plan, receiver, parameter, segment, dtype, shards, node_of)
    plan.lower_bound_bytes = _lower_bound(
        sources.get(rank, {}), destinations.get(rank, {}), lambda parameter: ITEMSIZE[dtype_of(rank, parameter)]
    )
    plan.elements_bound = sum(s.numel for segments in destinations.get(rank, {}).values() for s in segments)
    return plan


def _index_sources(sources: Mapping[int, ShardLayout]) -> dict[str, list[_Shard]]:
    holders: dict[str, dict[Box, list[tuple[int, str, Segment]]]] = {}
    for rank in sorted(sources):
        for parameter, segments in sources[rank].items():
            for segment in segments:
                holders.setdefault(segment.hf_name, {}).setdefault(segment.box, []).append((rank, parameter, segment))
    index = {}
    for name, boxes in holders.items():
        shards = [_Shard(box, tuple(held)) for box, held in sorted(boxes.items(), key=lambda item: item[0].start)]
        for i, first in enumerate(shards):
            for second in shards[i + 1 :]:
                if first.box.intersect(second.box) is not None:
                    raise ValueError(f"{name}: source shards {first.box} and {second.box} overlap but are not the same")
        index[name] = shards
    return index


def _route(
    plan: RankPlan,
    receiver: int,
    parameter: str,
    segment: Segment,
    dtype: str,
    shards: Mapping[str, list[_Shard]],
    node_of: Callable[[int], int],
) -> None:
    covered = 0
    for shard in shards.get(segment.hf_name, ()):
        common = segment.box.intersect(shard.box)
        if common is None:
            continue
        covered += common.numel
        sender, source_parameter, source = _choose(receiver, shard, node_of)
        if plan.rank not in (sender, receiver):
            continue
        piece = Piece(source_parameter, source.within(common), parameter, segment.within(common), dtype)
        if sender == receiver:
            plan.local.append(piece)
        elif plan.rank == sender:
            plan.sends.setdefault(receiver, []).append(piece)
        else:
            plan.receives.setdefault(sender, []).append(piece)
    if covered != segment.numel:
        raise ValueError(
            f"{segment.hf_name}: rank {receiver}'s {parameter} wants the box {segment.box}, "
            f"of which the source ranks hold {covered} of {segment.numel} elements"
        )


def _choose(receiver: int, shard: _Shard, node_of: Callable[[int], int]) -> tuple[int, str, Segment]:
    own = [holder for holder in shard.holders if holder[0] == receiver]
    if own:
        return own[0]
    near = [holder for holder in shard.holders if node_of(holder[0]) == node_of(receiver)]
    pool = near or shard.holders
    return pool[receiver % len(pool)]


def _lower_bound(source: ShardLayout, destination: ShardLayout, itemsize: Callable[[str], int]) -> int:
    """Independent of the routing: the destination's volume less its overlap with the rank's own source boxes."""
    own: dict[str, set[Box]] = {}
    for segments in source.values():
        for segment in segments:
            own.setdefault(segment.hf_name, set()).add(segment.box)
    missing = 0
    for parameter, segments in destination.items():
        for segment in segments:
            overlaps = (segment.box.intersect(box) for box in own.get(segment.hf_name, ()))
            held = sum(box.numel for box in overlaps if box is not None)
            missing += (segment.numel - held) * itemsize(parameter)
    return missing
