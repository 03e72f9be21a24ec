"""Who sends which box to whom: intersecting source and destination Segments. Pure, deterministic, torch-free.

A plan holds static facts only. Each rank computes its own part; sender and receiver derive the same list of pieces
between them, in the same order, from the same layouts. Layouts are given by group of ranks that hold the same shard
(data-parallel ranks, rollout replicas), so that a plan for a thousand ranks costs what their few kinds of shard cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from converters.rules.segment import Box, Segment, ShardLayout

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes an element of the dtypes that weights travel in."""


@dataclass(frozen=True)
class ShardGroup:
    """Ranks that hold equal shards. dtypes: parameter -> dtype; of destinations only, the sender casts to it."""

    ranks: tuple[int, ...]
    layout: ShardLayout
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """One end of a box on its way: where it lies in a parameter of this rank, and the dtype it travels in."""

    parameter: str
    segment: Segment
    dtype: str

    @property
    def numel(self) -> int:
        return self.segment.numel

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    def within(self, box: Box) -> Piece:
        """The part of this piece that carries `box`."""
        return replace(self, segment=self.segment.within(box))

    def split(self, limit: int) -> list[Piece]:
        """Cut along the leading axes into boxes of at most `limit` bytes each (never below one element)."""
        if self.nbytes <= limit or self.numel == 1:
            return [self]
        box = self.segment.box
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
class Exchange:
    """Peer -> pieces. The two ends of a pair list the same boxes in the same order."""

    sends: dict[int, list[Piece]] = field(default_factory=dict)
    receives: dict[int, list[Piece]] = field(default_factory=dict)


@dataclass
class RankPlan:
    """One rank's part.

    local: (source, destination) pairs on this rank. direct: sent from training parameters. relay: what came in by
    `direct` and is passed on inside the machine, from rollout parameters to rollout parameters, afterwards.
    """

    rank: int
    local: list[tuple[Piece, Piece]] = field(default_factory=list)
    direct: Exchange = field(default_factory=Exchange)
    relay: Exchange = field(default_factory=Exchange)
    lower_bound_bytes: int = 0
    """Bytes of this rank's destination that none of its own source shards holds."""
    elements_bound: int = 0
    """Destination elements that some Segment fills."""

    @property
    def receive_bytes(self) -> int:
        arriving = (*self.direct.receives.values(), *self.relay.receives.values())
        return sum(piece.nbytes for pieces in arriving for piece in pieces)


@dataclass(frozen=True)
class Routes:
    """Who fills one box for whom, sender -> receivers: from training parameters, and then from rank to rank."""

    direct: Mapping[int, tuple[int, ...]]
    relay: Mapping[int, tuple[int, ...]]

    def sender(self, receiver: int) -> tuple[int, bool]:
        """Who sends to a receiver that is no holder, and whether it passes on what it received."""
        for way, is_relay in ((self.direct, False), (self.relay, True)):
            for sender, receivers in way.items():
                if receiver in receivers:
                    return sender, is_relay
        raise AssertionError(f"rank {receiver} has no sender")


@dataclass(frozen=True, slots=True)
class Held:
    """A distinct box of a HF tensor and who holds it. groups: indices of the shard groups, standing for `ranks`."""

    box: Box
    dtype: str
    groups: tuple[int, ...]
    ranks: tuple[int, ...]


class Router:
    """Pairs the boxes of both sides and says who serves whom.

    node_of(rank): the machine a rank runs on. relay: where several receivers of one machine lack the same box and none
    there holds it, one of them receives it and passes it on, so that it crosses between machines once.
    """

    def __init__(
        self,
        sources: Sequence[ShardGroup],
        destinations: Sequence[ShardGroup],
        node_of: Callable[[int], int],
        relay: bool,
    ) -> None:
        self.sources, self.destinations = _boxes(sources), _boxes(destinations)
        for name, held in self.sources.items():
            _check_disjoint(name, held)
        self._node_of, self._relay = node_of, relay
        self._routes: dict[tuple[tuple[int, ...], tuple[int, ...]], Routes] = {}

    def overlaps(self, name: str, wanted: Held) -> Iterator[tuple[Held, Box]]:
        """The source boxes that meet a destination box, with the common part, in order."""
        for held in self.sources.get(name, ()):
            if (common := held.box.intersect(wanted.box)) is not None:
                yield held, common

    def routes(self, held: Held, wanted: Held) -> Routes:
        """Depends on the two sets of ranks alone, so it is computed once for each pair of sets."""
        key = (held.groups, wanted.groups)
        if key not in self._routes:
            self._routes[key] = _route(held.ranks, wanted.ranks, self._node_of, self._relay)
        return self._routes[key]


def make_plan(
    rank: int,
    sources: Sequence[ShardGroup],
    destinations: Sequence[ShardGroup],
    node_of: Callable[[int], int] = lambda rank: 0,
    relay: bool = True,
) -> RankPlan:
    """This rank's plan; arguments as Router's.

    Raises ValueError naming the HF tensor where source shards overlap, or nobody holds a destination box.
    """
    router = Router(sources, destinations, node_of, relay)
    mine_held, mine_wanted = _own(rank, sources), _own(rank, destinations)
    plan = RankPlan(rank)
    for name in sorted(mine_held.keys() | mine_wanted.keys()):
        held_here, wanted_here = mine_held.get(name, {}), mine_wanted.get(name, {})
        for wanted in router.destinations.get(name, ()):
            target = wanted_here.get((wanted.box, wanted.dtype))
            covered = 0
            for held, common in router.overlaps(name, wanted):
                covered += common.numel
                source = held_here.get((held.box, held.dtype))
                if target is not None or source is not None:
                    _add(plan, router.routes(held, wanted), source, target, common, wanted.dtype)
            if target is not None and covered != wanted.box.numel:
                raise ValueError(
                    f"{name}: rank {rank}'s {target[0]} wants the box {wanted.box}, "
                    f"of which the source ranks hold {covered} of {wanted.box.numel} elements"
                )
    plan.lower_bound_bytes = lower_bound(rank, sources, destinations)
    plan.elements_bound = sum(box.numel for boxes in mine_wanted.values() for box, _ in boxes)
    return plan


_Place = tuple[str, Segment]
"""(parameter, segment) of the box on this rank."""


def _add(plan: RankPlan, routes: Routes, source: _Place | None, target: _Place | None, common: Box, dtype: str) -> None:
    """This rank's ends of one box's way."""
    ends = [None if place is None else Piece(place[0], place[1].within(common), dtype) for place in (source, target)]
    outgoing, incoming = ends
    me = plan.rank
    if outgoing is not None and incoming is not None:
        plan.local.append((outgoing, incoming))
    elif incoming is not None:
        sender, is_relay = routes.sender(me)
        exchange = plan.relay if is_relay else plan.direct
        exchange.receives.setdefault(sender, []).append(incoming)
    if outgoing is not None:
        for receiver in routes.direct.get(me, ()):
            plan.direct.sends.setdefault(receiver, []).append(outgoing)
    elif incoming is not None:
        for receiver in routes.relay.get(me, ()):
            plan.relay.sends.setdefault(receiver, []).append(incoming)


def _route(holders: tuple[int, ...], receivers: tuple[int, ...], node_of: Callable[[int], int], relay: bool) -> Routes:
    """Near holders serve in turn; far ones serve machine by machine in turn. A holder needs nobody."""
    near: dict[int, list[int]] = {}
    for holder in holders:
        near.setdefault(node_of(holder), []).append(holder)
    direct: dict[int, list[int]] = {}
    passed_on: dict[int, list[int]] = {}
    far: dict[int, list[int]] = {}
    held = set(holders)
    for turn, receiver in enumerate(r for r in receivers if r not in held):
        node = node_of(receiver)
        if node in near:
            direct.setdefault(near[node][turn % len(near[node])], []).append(receiver)
        else:
            far.setdefault(node, []).append(receiver)
    turn = 0
    for group in far.values():
        # Other boxes have other holders: the first one's number spreads the passing on over the group.
        gateway = group[holders[0] % len(group)]
        for receiver in group:
            if relay and receiver != gateway:
                passed_on.setdefault(gateway, []).append(receiver)
            else:
                direct.setdefault(holders[turn % len(holders)], []).append(receiver)
                turn += 1
    return Routes(*({sender: tuple(served) for sender, served in way.items()} for way in (direct, passed_on)))


def _boxes(groups: Sequence[ShardGroup]) -> dict[str, list[Held]]:
    """HF tensor -> its distinct boxes, by start, and who holds each."""
    found: dict[str, dict[tuple[Box, str], list[int]]] = {}
    for index, group in enumerate(groups):
        for parameter, segments in group.layout.items():
            dtype = group.dtypes.get(parameter, "")
            for segment in segments:
                holders = found.setdefault(segment.hf_name, {}).setdefault((segment.box, dtype), [])
                if not holders or holders[-1] != index:
                    holders.append(index)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
    boxes: dict[str, list[Held]] = {}
    for name, by_box in found.items():
        for (box, dtype), indices in sorted(by_box.items(), key=lambda item: (item[0][0].start, item[0][1])):
            key = tuple(indices)
            if key not in ranks:
                ranks[key] = tuple(sorted(rank for index in key for rank in groups[index].ranks))
            boxes.setdefault(name, []).append(Held(box, dtype, key, ranks[key]))
    return boxes


def _check_disjoint(name: str, held: Sequence[Held]) -> None:
    """Boxes of one side are equal or share nothing; they come sorted by their start on the first axis."""
    for i, first in enumerate(held):
        end = first.box.start[0] + first.box.size[0]
        for second in held[i + 1 :]:
            if second.box.start[0] >= end:
                break
            if first.box.intersect(second.box) is not None:
                raise ValueError(f"{name}: source shards {first.box} and {second.box} overlap but are not the same")


def _own(rank: int, groups: Sequence[ShardGroup]) -> dict[str, dict[tuple[Box, str], _Place]]:
    """HF tensor -> the boxes that this rank holds, with their dtype -> where."""
    places: dict[str, dict[tuple[Box, str], _Place]] = {}
    for group in groups:
        if rank in group.ranks:
            for parameter, segments in group.layout.items():
                for segment in segments:
                    boxes = places.setdefault(segment.hf_name, {})
                    key = (segment.box, group.dtypes.get(parameter, ""))
                    if key in boxes:
                        raise ValueError(
                            f"{segment.hf_name}: {boxes[key][0]} and {parameter} of rank {rank} hold the same box; "
                            "tie them to one parameter"
                        )
                    boxes[key] = (parameter, segment)
    return places


def lower_bound(rank: int, sources: Sequence[ShardGroup], destinations: Sequence[ShardGroup]) -> int:
    """Bytes a rank must receive: its destination's volume less the overlap with its own source boxes.

    Independent of the routing.
    """
    own: dict[str, set[Box]] = {}
    for group in sources:
        if rank in group.ranks:
            for segment in (s for segments in group.layout.values() for s in segments):
                own.setdefault(segment.hf_name, set()).add(segment.box)
    missing = 0
    for group in destinations:
        if rank not in group.ranks:
            continue
        for parameter, segments in group.layout.items():
            for segment in segments:
                overlaps = (segment.box.intersect(box) for box in own.get(segment.hf_name, ()))
                held = sum(box.numel for box in overlaps if box is not None)
                missing += (segment.numel - held) * ITEMSIZE[group.dtypes[parameter]]
    return missing
