"""The planner on random models and layouts, all ranks in one process with real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.rules.facts import ModelFacts
from converters.rules.segment import Segment
from mrl.bridge.plan import ITEMSIZE, Piece, RankPlan, make_plan
from mrl.bridge.transport import execute, messages_of
from mrl.parallel import ParallelLayout
from tests.bridge import simulate
from tests.gang import Gang


def all_plans(
    facts: ModelFacts, layout: ParallelLayout, rollout_tp: int, dtype: str
) -> tuple[dict[int, RankPlan], dict[int, Any], dict[int, Any]]:
    sources = simulate.training_layouts(facts, layout)
    destinations = simulate.rollout_layouts(facts, layout.world, rollout_tp)
    plans = {r: make_plan(r, sources, destinations, lambda _r, _p: dtype) for r in range(layout.world)}
    return plans, sources, destinations


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    facts=simulate.models(),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    rollout_tp=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_byte_once_and_no_more_than_the_bound(
    facts: ModelFacts, tp: int, pp: int, dp: int, rollout_tp: int, dtype: str
) -> None:
    layout = ParallelLayout(tp * pp * dp, tp, pp)
    if layout.world % rollout_tp or facts.num_heads % rollout_tp or facts.num_heads % tp:
        return
    plans, sources, destinations = all_plans(facts, layout, rollout_tp, dtype)
    torch_dtype = getattr(torch, dtype)
    filled = {rank: simulate.empty_tensors(shard, torch_dtype) for rank, shard in destinations.items()}
    tensors = {rank: simulate.training_tensors(facts, layout, rank) for rank in range(layout.world)}
    writes = simulate.execute_all(plans, tensors, filled)
    weights = simulate.hf_weights(facts)
    for rank, shard in destinations.items():
        for name, segments in shard.items():
            assert writes[rank, name].eq(1).all(), (rank, name)
            for segment in segments:
                view = simulate.segment_view(filled[rank][name], segment)
                assert torch.equal(view, simulate.box_of(weights, segment).to(torch_dtype)), (rank, name)
        assert plans[rank].receive_bytes == plans[rank].lower_bound_bytes == _missing(sources[rank], shard, dtype)


def _missing(source: Any, destination: Any, dtype: str) -> int:
    """The bound by brute force: elements of the destination's boxes that no own source box holds."""
    held = {(s.hf_name, *i) for segments in source.values() for s in segments for i in _elements(s)}
    wanted = [(s.hf_name, *i) for segments in destination.values() for s in segments for i in _elements(s)]
    return ITEMSIZE[dtype] * sum(element not in held for element in wanted)


def _elements(segment: Segment) -> list[tuple[int, ...]]:
    ranges = [torch.arange(s, s + n) for s, n in zip(segment.start, segment.size, strict=True)]
    return [tuple(map(int, index)) for index in torch.cartesian_prod(*ranges).view(-1, len(ranges))]


def test_replicas_share_the_load() -> None:
    """TP1 x PP2 x DP4 -> TP1: each rank misses half of the model, and no holder serves more than twice another."""
    facts = ModelFacts("llama", 4, 8, 4, 2, 2, 16, 32, 1e-6, False, False, False, 64, 0.02)
    plans, _, _ = all_plans(facts, ParallelLayout(8, 1, 2), 1, "float32")
    sent = [sum(piece.nbytes for pieces in plan.sends.values() for piece in pieces) for plan in plans.values()]
    assert max(sent) <= 2 * min(sent)
    assert all(len(plan.sends) == 1 for plan in plans.values())


def test_a_near_source_is_preferred() -> None:
    """DP4 over two nodes of four ranks, PP2: whoever is on the receiver's node sends."""
    facts = ModelFacts("llama", 4, 8, 4, 2, 2, 16, 32, 1e-6, False, False, False, 64, 0.02)
    layout = ParallelLayout(8, 1, 2)
    sources = simulate.training_layouts(facts, layout)
    destinations = simulate.rollout_layouts(facts, 8, 1)
    for rank in range(8):
        plan = make_plan(rank, sources, destinations, lambda _r, _p: "float32", node_of=lambda r: r % 2)
        assert all(peer % 2 == rank % 2 for peer in plan.receives)


def test_a_box_nobody_holds_is_named() -> None:
    held = {0: {"p": (Segment("w", (0, 0), (4, 4), 0, (4, 1)),)}}
    wanted = {0: {"q": (Segment("w", (0, 0), (5, 4), 0, (4, 1)),)}}
    with pytest.raises(ValueError, match=r"^w: rank 0's q wants the box .* hold 16 of 20 elements"):
        make_plan(0, held, wanted, lambda _r, _p: "float32")


def test_overlapping_source_shards_are_named() -> None:
    a, b = Segment("w", (0,), (4,), 0, (1,)), Segment("w", (2,), (4,), 0, (1,))
    with pytest.raises(ValueError, match=r"^w: source shards .* overlap"):
        make_plan(0, {0: {"p": (a,)}, 1: {"p": (b,)}}, {0: {"q": (a,)}}, lambda _r, _p: "float32")


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    limit=st.integers(4, 200),
)
def test_messages_are_bounded_and_complete(shapes: list[tuple[int, int]], limit: int) -> None:
    """A bucket smaller than a tensor splits it; every element travels once, in boxes."""
    pieces = []
    for number, shape in enumerate(shapes):
        segment = Segment(f"w{number}", (0, 0), shape, 0, (shape[1], 1))
        pieces.append(Piece("p", segment, f"q{number}", segment, "float32"))
    messages = messages_of(pieces, limit)
    assert all(sum(piece.nbytes for piece in message) <= max(limit, 4) for message in messages)
    seen = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    for message in messages:
        for piece in message:
            simulate.segment_view(seen[piece.source.hf_name], piece.destination).add_(1)
    assert all(count.eq(1).all() for count in seen.values())


def transported(facts: ModelFacts, tp: int, pp: int, rollout_tp: int, bucket_bytes: int, dtype: str) -> dict[str, Any]:
    """Run in a gang: execute the plan of this rank over gloo."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ParallelLayout(world, tp, pp)
    plans, _, destinations = all_plans(facts, layout, rollout_tp, dtype)
    source = simulate.training_tensors(facts, layout, rank)
    target = simulate.empty_tensors(destinations[rank], getattr(torch, dtype))
    stats = execute(plans[rank], source.__getitem__, target.__getitem__, dist.group.WORLD, bucket_bytes)
    weights = simulate.hf_weights(facts)
    equal = all(
        torch.equal(
            simulate.segment_view(target[name], segment), simulate.box_of(weights, segment).to(target[name].dtype)
        )
        for name, segments in destinations[rank].items()
        for segment in segments
    )
    return {"stats": stats, "bound": plans[rank].lower_bound_bytes, "equal": equal}


@pytest.mark.parametrize(("world", "tp", "pp", "rollout_tp"), [(2, 2, 1, 1), (4, 2, 2, 4), (4, 1, 2, 2), (4, 4, 1, 1)])
@pytest.mark.parametrize("bucket_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transport_over_gloo(
    gang: Callable[[int], Gang], world: int, tp: int, pp: int, rollout_tp: int, bucket_bytes: int, dtype: str
) -> None:
    """Buckets of 64 bytes split every tensor; staging never exceeds two of them."""
    facts = ModelFacts("qwen2", 4, 8, 4, 4, 4, 16, 37, 1e-6, True, True, False, 64, 0.02)
    for result in gang(world).run(transported, facts, tp, pp, rollout_tp, bucket_bytes, dtype):
        assert result["equal"]
        assert result["stats"].bytes_received == result["bound"]
        assert result["stats"].peak_staging_bytes <= 2 * bucket_bytes
