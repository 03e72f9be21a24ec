"""What a sync moves, counted without planning it rank by rank; and what other designs would move for the same layout.

All figures are bytes after the cast to the rollout's dtype. Sources of the others' formulas: docs/weight_bridge.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from converters.rules import dense
from converters.rules.facts import ModelFacts
from mrl.bridge.plan import ITEMSIZE, Router, ShardGroup

FFN = ("gate_proj", "up_proj", "down_proj")
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass
class RankTraffic:
    """One rank's bytes by link: copied on the GPU, received from its machine, received from other machines."""

    same_gpu: int = 0
    same_node: int = 0
    across_nodes: int = 0
    sent: int = 0
    by_sender: Counter[int] = field(default_factory=Counter)

    @property
    def received(self) -> int:
        return self.same_node + self.across_nodes


def count_traffic(
    sources: Sequence[ShardGroup],
    destinations: Sequence[ShardGroup],
    node_of: Callable[[int], int],
    relay: bool,
    names: Callable[[str], bool] = lambda name: True,
) -> dict[int, RankTraffic]:
    """rank -> its traffic, over the HF tensors that `names` accepts. Equal to the sum over all ranks' plans.

    Bytes are added up by pair of holder and receiver sets first, so a thousand ranks take seconds.
    """
    router = Router(sources, destinations, node_of, relay)
    volume: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    routes, ranks = {}, {}
    for name in filter(names, router.destinations):
        for wanted in router.destinations[name]:
            for held, common in router.overlaps(name, wanted):
                key = (held.groups, wanted.groups)
                volume[key] += common.numel * ITEMSIZE[wanted.dtype]
                routes[key], ranks[key] = router.routes(held, wanted), (set(held.ranks), wanted.ranks)
    traffic = {rank: RankTraffic() for group in (*sources, *destinations) for rank in group.ranks}
    for key, nbytes in volume.items():
        holders, receivers = ranks[key]
        for rank in receivers:
            if rank in holders:
                traffic[rank].same_gpu += nbytes
        for way in (routes[key].direct, routes[key].relay):
            for sender, served in way.items():
                traffic[sender].sent += nbytes * len(served)
                for rank in served:
                    traffic[rank].by_sender[sender] += nbytes
                    if node_of(sender) == node_of(rank):
                        traffic[rank].same_node += nbytes
                    else:
                        traffic[rank].across_nodes += nbytes
    return traffic


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s (1e9 bytes a second) and the latency of a message in microseconds."""

    gpu: float
    node: float
    network: float
    latency_us: float


def estimated_seconds(traffic: Iterable[RankTraffic], links: Links, message_bytes: int) -> float:
    """Alpha-beta estimate of a sync: the slowest rank's messages times latency, plus its bytes over its links.

    A rank sends and receives at the same time, so the larger of the two counts; what it sends is taken to leave by
    the links in the proportion in which it receives. Local copies run beside.
    """
    slowest = 0.0
    for rank in traffic:
        messages = sum(math.ceil(nbytes / message_bytes) for nbytes in rank.by_sender.values())
        wire = rank.same_node / links.node + rank.across_nodes / links.network
        if rank.received:
            wire *= max(1.0, rank.sent / rank.received)
        elif rank.sent:
            wire = rank.sent / links.network
        seconds = max(rank.same_gpu / links.gpu, wire) / 1e9 + messages * links.latency_us / 1e6
        slowest = max(slowest, seconds)
    return slowest


def model_bytes(facts: ModelFacts, dtype: str) -> int:
    return ITEMSIZE[dtype] * sum(math.prod(shape) for shape in dense.hf_tensor_shapes(facts).values())


def gathered(
    facts: ModelFacts,
    sources: Sequence[ShardGroup],
    destinations: Sequence[ShardGroup],
    dtype: str,
    names: Callable[[str], bool] = lambda name: True,
) -> dict[int, int]:
    """Rollout rank -> bytes received where every tensor is put together whole on every rank (verl, slime)."""
    shapes = dense.hf_tensor_shapes(facts)
    whole = sum(math.prod(shape) for name, shape in shapes.items() if names(name))
    own: dict[int, int] = {}
    for group in sources:
        segments = (s for segments in group.layout.values() for s in segments if names(s.hf_name))
        held = sum(segment.numel for segment in segments)
        own |= dict.fromkeys(group.ranks, held)
    return {rank: ITEMSIZE[dtype] * (whole - own.get(rank, 0)) for group in destinations for rank in group.ranks}


def hybridflow(facts: ModelFacts, training: int, rollout: int, dtype: str) -> float:
    """HybridFlow's own count per GPU: (tp - t_g p_g) / (t_g p_g t p) of the model (arXiv:2409.19256, table 2).

    training, rollout: ranks that a copy of the model is cut over, on either side.
    """
    return model_bytes(facts, dtype) * max(0, training - rollout) / (rollout * training)


def is_ffn(name: str) -> bool:
    return name.split(".")[-2] in FFN


def is_qkv(name: str) -> bool:
    return name.split(".")[-2] in QKV
