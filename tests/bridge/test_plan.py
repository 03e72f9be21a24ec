"""The planner on random models and layouts, all ranks in one process with real tensors; and the transport over gloo."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters.rules.facts import ModelFacts
from converters.rules.families import facts_of
from converters.rules.pipeline import PipelineSplit
from converters.rules.segment import Segment
from mrl.bridge.megatron_layout import training_groups
from mrl.bridge.plan import ITEMSIZE, Piece, ShardGroup, make_plan
from mrl.bridge.traffic import count_traffic
from mrl.bridge.transport import execute, messages_of
from mrl.bridge.vllm_rules import rollout_groups
from mrl.parallel import ParallelLayout
from tests.bridge import simulate
from tests.bridge.simulate import Case
from tests.gang import Gang

SMALL = ModelFacts("qwen2", 4, 8, 4, 2, 2, 16, 37, 1e-6, False, True, False, 64, 0.02)
EXAMPLES = 320
FEATURES = (
    "KV heads < TP", "KV heads < training TP", "odd vocabulary", "tied", "bias", "VPP", "uneven PP", "rollout PP",
    "disjoint", "cast", "relay",
)  # fmt: skip


def small_case(**changes: Any) -> Case:
    values: dict[str, Any] = {
        "facts": SMALL, "tp": 1, "pipeline": PipelineSplit(4), "dp": 1, "rollout_tp": 1, "rollout_pp": 1,
        "replicas": 1, "disjoint": False, "ranks_per_node": 64, "relay": True, "dtype": "float32",
    }  # fmt: skip
    return Case(**(values | changes))


def test_every_byte_once_and_no_more_than_the_bound() -> None:
    """At least 300 models and layouts; each feature in at least 20 of them."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(simulate.cases(), st.integers(0, 2**32))
    def check(case: Case, seed: int) -> None:
        check_case(case, seed)
        seen.update({"cases", *case.features()})

    check()
    assert seen["cases"] >= 300
    assert all(seen[feature] >= 20 for feature in FEATURES), seen


def check_case(case: Case, seed: int) -> None:
    dtype = getattr(torch, case.dtype)
    plans = case.plans()
    held = {rank: simulate.training_tensors(case, rank) for rank in plans}
    shards = {rank: simulate.rollout_shard(case, rank) for rank in plans}
    filled = {rank: simulate.empty_tensors(shard, dtype) for rank, shard in shards.items()}
    writes = simulate.execute_all(plans, held, filled, random.Random(seed))
    weights = simulate.hf_weights(case.facts)
    own = {rank: next((g.layout for g in case.sources() if rank in g.ranks), {}) for rank in plans}
    for rank, shard in shards.items():
        for name, segments in shard.items():
            assert writes[rank, name].eq(1).all(), (rank, name)
            for segment in segments:
                view = simulate.segment_view(filled[rank][name], segment)
                assert torch.equal(view, simulate.box_of(weights, segment).to(dtype)), (rank, name)
        plan = plans[rank]
        assert plan.receive_bytes == plan.lower_bound_bytes == _missing(own[rank], shard, weights, case.dtype)
        assert plan.elements_bound == sum(s.numel for segments in shard.values() for s in segments)
    traffic = count_traffic(case.sources(), case.destinations(), case.node_of, case.relay)
    for rank, counted in traffic.items():
        assert counted.received == plans[rank].receive_bytes
        assert counted.same_gpu == sum(to.nbytes for _, to in plans[rank].local)
    if case.relay:
        # What enters a machine is what its ranks lack together and none of them holds.
        expected = {}
        for node in {case.node_of(rank) for rank in plans}:
            there = [rank for rank in plans if case.node_of(rank) == node]
            together = {f"{r}.{n}": s for r in there for n, s in own[r].items()}
            wanted = {f"{r}.{n}": s for r in there for n, s in shards[r].items()}
            expected[node] = _missing(together, wanted, weights, case.dtype, once=True)
        assert simulate.crossings(plans, case) == {node: n for node, n in expected.items() if n}


def _missing(source: Any, destination: Any, weights: dict[str, torch.Tensor], dtype: str, once: bool = False) -> int:
    """The bound by brute force: elements of the destination's boxes that no source box holds."""
    total = 0
    for name, weight in weights.items():
        wanted = torch.zeros(weight.shape, dtype=torch.int32)
        for segment in (s for segments in destination.values() for s in segments if s.hf_name == name):
            wanted[segment.box.slices] += 1
        for segment in (s for segments in source.values() for s in segments if s.hf_name == name):
            wanted[segment.box.slices] = 0
        total += int(wanted.clamp(max=1).sum() if once else wanted.sum())
    return ITEMSIZE[dtype] * total


def test_replicas_share_the_load() -> None:
    """KNOWN_FAULTS 21. TP1 x PP2 x DP4 -> TP1 x 8: each rank misses half, and all holders serve alike."""
    case = small_case(pipeline=PipelineSplit(4, 2), dp=4, replicas=8, ranks_per_node=1)
    sent = [sum(p.nbytes for pieces in plan.direct.sends.values() for p in pieces) for plan in case.plans().values()]
    assert len(set(sent[:4])) == len(set(sent[4:])) == 1, sent


def test_a_thousand_ranks_cost_a_rank_little() -> None:
    """Llama-3-70B, TP8 x PP8 x DP16 -> 128 replicas of TP8: 7/8 of a TP shard is missing on a middle stage."""
    tracemalloc.start()
    facts = facts_of("configs/models/llama3_70b.json")
    sources = training_groups(facts, ParallelLayout(1024, 8, 8), transformer_engine=True)
    plan = make_plan(400, sources, rollout_groups(facts, tuple(range(1024)), 8, 1, "bfloat16"), lambda r: r // 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6
    # By hand: 70 of 80 layers and both vocabularies, an eighth of each matrix; norms are whole. bf16.
    matrices = 8192 * (8192 * 2 + 2 * 1024) + 3 * 8192 * 28672
    assert (
        plan.receive_bytes
        == plan.lower_bound_bytes
        == 2 * (70 * (matrices // 8 + 2 * 8192) + 2 * 128256 * 8192 // 8 + 8192)
    )


def test_a_near_source_is_preferred() -> None:
    """PP2 x DP4 over two machines, ranks dealt out in turn: whoever is on the receiver's machine sends."""
    case = small_case(pipeline=PipelineSplit(4, 2), dp=4, replicas=8)
    for rank in range(8):
        plan = make_plan(rank, case.sources(), case.destinations(), node_of=lambda r: r % 2)
        assert all(peer % 2 == rank % 2 for peer in plan.direct.receives)
        assert not plan.relay.receives


def test_experts_and_boxes_cut_twice() -> None:
    """Synthetic: 8 experts [E, F, H] over EP4 x ETP2, wanted by EP2 and by TP2: every byte once, at the bound."""

    def expert_box(first: int, count: int, column: int, columns: int) -> Segment:
        return Segment("experts", (first, 0, column), (count, 6, columns), 0, (6 * columns, columns, 1))

    sources = [
        ShardGroup((ep * 2 + etp,), {"w": (expert_box(2 * ep, 2, 4 * etp, 4),)}) for ep in range(4) for etp in range(2)
    ]
    dtypes = {"w": "bfloat16"}
    for destinations in (
        [
            ShardGroup((rank, rank + 2, rank + 4, rank + 6), {"w": (expert_box(4 * rank, 4, 0, 8),)}, dtypes)
            for rank in (0, 1)
        ],
        [
            ShardGroup((rank, rank + 2, rank + 4, rank + 6), {"w": (expert_box(0, 8, 4 * rank, 4),)}, dtypes)
            for rank in (0, 1)
        ],
    ):
        plans = {r: make_plan(r, sources, destinations, lambda r: r // 4) for r in range(8)}
        weights = {"experts": torch.arange(8 * 6 * 8, dtype=torch.float32).view(8, 6, 8)}
        held = {g.ranks[0]: {"w": weights["experts"][g.layout["w"][0].box.slices].flatten()} for g in sources}
        shard = {r: next(g.layout for g in destinations if r in g.ranks) for r in range(8)}
        filled = {r: simulate.empty_tensors(shard[r], torch.bfloat16) for r in range(8)}
        writes = simulate.execute_all(plans, held, filled, random.Random(1))
        assert all(count.eq(1).all() for count in writes.values())
        for rank in range(8):
            view = simulate.segment_view(filled[rank]["w"], shard[rank]["w"][0])
            assert torch.equal(view, simulate.box_of(weights, shard[rank]["w"][0]).bfloat16())
            assert plans[rank].receive_bytes == plans[rank].lower_bound_bytes


def test_a_box_nobody_holds_is_named() -> None:
    held = [ShardGroup((0,), {"p": (Segment("w", (0, 0), (4, 4), 0, (4, 1)),)})]
    wanted = [ShardGroup((0,), {"q": (Segment("w", (0, 0), (5, 4), 0, (4, 1)),)}, {"q": "float32"})]
    with pytest.raises(ValueError, match=r"^w: rank 0's q wants the box .* hold 16 of 20 elements"):
        make_plan(0, held, wanted)


def test_overlapping_source_shards_are_named() -> None:
    a, b = Segment("w", (0,), (4,), 0, (1,)), Segment("w", (2,), (4,), 0, (1,))
    with pytest.raises(ValueError, match=r"^w: source shards .* overlap"):
        make_plan(0, [ShardGroup((0,), {"p": (a,)}), ShardGroup((1,), {"p": (b,)})], [])


def test_one_box_in_two_parameters_of_a_rank_is_named() -> None:
    box = Segment("w", (0,), (4,), 0, (1,))
    wanted = [ShardGroup((0,), {"a": (box,), "b": (box,)}, {"a": "float32", "b": "float32"})]
    with pytest.raises(ValueError, match=r"^w: a and b of rank 0 hold the same box"):
        make_plan(0, [ShardGroup((0,), {"p": (box,)})], wanted)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    limit=st.integers(4, 200),
)
def test_messages_are_bounded_and_complete(shapes: list[tuple[int, int]], limit: int) -> None:
    """KNOWN_FAULTS 15. A bucket smaller than a tensor splits it; every element travels once, in boxes."""
    pieces = [
        Piece(f"q{number}", Segment(f"w{number}", (0, 0), shape, 0, (shape[1], 1)), "float32")
        for number, shape in enumerate(shapes)
    ]
    messages = messages_of(pieces, limit)
    assert all(sum(piece.nbytes for piece in message) <= max(limit, 4) for message in messages)
    seen = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    for message in messages:
        for piece in message:
            simulate.segment_view(seen[piece.segment.hf_name], piece.segment).add_(1)
    assert all(count.eq(1).all() for count in seen.values())


def transported(case: Case, bucket_bytes: int, longest_delay_s: float = 0.0) -> dict[str, Any]:
    """Run in a gang: execute this rank's plan over gloo, twice, the second time from changed weights.

    longest_delay_s: each rank stops for a random time up to this one at every look-up of a parameter.
    """
    import torch.distributed as dist

    delays = random.Random(dist.get_rank())

    def late(tensors: dict[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
        def look_up(name: str) -> torch.Tensor:
            time.sleep(delays.uniform(0.0, longest_delay_s))
            return tensors[name]

        return look_up

    rank = dist.get_rank()
    plan = case.plans()[rank]
    shard, dtype = simulate.rollout_shard(case, rank), getattr(torch, case.dtype)
    source, target = simulate.training_tensors(case, rank), simulate.empty_tensors(shard, dtype)
    weights = simulate.hf_weights(case.facts)
    equal, stats = True, None
    for scale in (1.0, -2.0):
        scaled = {name: tensor * scale for name, tensor in source.items()}
        stats = execute(plan, late(scaled), late(target), dist.group.WORLD, bucket_bytes)
        equal &= all(
            torch.equal(simulate.segment_view(target[name], s), (simulate.box_of(weights, s) * scale).to(dtype))
            for name, segments in shard.items()
            for s in segments
        )
    return {"stats": stats, "bound": plan.lower_bound_bytes, "equal": equal}


CASES = {
    "tp2-to-tp1": small_case(tp=2, replicas=2),
    "tp2pp2-to-tp4": small_case(tp=2, pipeline=PipelineSplit(4, 2), rollout_tp=4),
    "pp2dp2-to-tp2dp2-relay": small_case(
        pipeline=PipelineSplit(4, 2), dp=2, rollout_tp=2, replicas=2, ranks_per_node=2
    ),
    "tp4-to-tp1dp4": small_case(tp=4, replicas=4),
    "vpp-to-pp2": small_case(pipeline=PipelineSplit(4, 2, 2), rollout_pp=2),
    "disjoint": small_case(tp=2, rollout_tp=1, replicas=2, disjoint=True, ranks_per_node=2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bucket_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transport_over_gloo(gang: Callable[[int], Gang], name: str, bucket_bytes: int, dtype: str) -> None:
    """Buckets of 64 bytes split every tensor; staging never exceeds two of them."""
    case = small_case(**(vars(CASES[name]) | {"dtype": dtype}))
    results = gang(case.world).run(transported, case, bucket_bytes)
    for result in results:
        assert result["equal"]
        assert result["stats"].bytes_received == result["bound"]
        assert result["stats"].peak_staging_bytes <= 2 * bucket_bytes
    assert sum(result["stats"].bytes_received for result in results) > 0


@pytest.mark.parametrize("name", CASES)
def test_ranks_may_run_at_any_pace(gang: Callable[[int], Gang], name: str) -> None:
    """Nothing depends on who comes first: ranks stop at random between messages, and the bits are the same."""
    case = CASES[name]
    for result in gang(case.world).run(transported, case, 2048, 0.003):
        assert result["equal"]
        assert result["stats"].bytes_received == result["bound"]
