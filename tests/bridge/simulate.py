"""Random models and layouts for the planner, and a one-process execution of all ranks' plans with real tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from converters.load import segment_view
from converters.rules.dense import hf_tensor_shapes
from converters.rules.facts import ModelFacts
from converters.rules.megatron import ModelShard, megatron_layout, unsharded_params
from converters.rules.pipeline import PipelineSplit
from converters.rules.segment import Segment, ShardLayout
from mrl.bridge.plan import Piece, RankPlan, ShardGroup, make_plan
from mrl.bridge.vllm_rules import rollout_groups


@dataclass(frozen=True)
class Case:
    """A model, how training cuts it, how vLLM does, and where the ranks stand."""

    facts: ModelFacts
    tp: int
    pipeline: PipelineSplit
    dp: int
    rollout_tp: int
    rollout_pp: int
    replicas: int
    disjoint: bool
    ranks_per_node: int
    relay: bool
    dtype: str

    @property
    def training_ranks(self) -> int:
        return self.tp * self.pipeline.pp * self.dp

    @property
    def world(self) -> int:
        rollout = self.rollout_tp * self.rollout_pp * self.replicas
        return self.training_ranks + rollout if self.disjoint else max(self.training_ranks, rollout)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def sources(self) -> list[ShardGroup]:
        return [
            ShardGroup(
                tuple(tp + self.tp * (dp + self.dp * pp) for dp in range(self.dp)),
                {
                    f"{chunk}.{name}": segments
                    for chunk in range(self.pipeline.vpp)
                    for name, segments in megatron_layout(self.facts, self.shard(pp, tp, chunk)).items()
                },
            )
            for pp, tp in itertools.product(range(self.pipeline.pp), range(self.tp))
        ]

    def shard(self, pp: int, tp: int, chunk: int) -> ModelShard:
        return ModelShard(self.tp, tp, self.pipeline, pp, "lm", transformer_engine=False, chunk=chunk)

    def destinations(self) -> list[ShardGroup]:
        first = self.training_ranks if self.disjoint else 0
        count = self.rollout_tp * self.rollout_pp * self.replicas
        return rollout_groups(
            self.facts, tuple(range(first, first + count)), self.rollout_tp, self.rollout_pp, self.dtype
        )

    def plans(self) -> dict[int, RankPlan]:
        sources, destinations = self.sources(), self.destinations()
        return {rank: make_plan(rank, sources, destinations, self.node_of, self.relay) for rank in range(self.world)}

    def features(self) -> set[str]:
        """Names of what is special about the case, for the count at the end."""
        facts, split = self.facts, self.pipeline
        return {
            name
            for name, there in {
                "KV heads < TP": facts.num_kv_heads < self.tp or facts.num_kv_heads < self.rollout_tp,
                "KV heads < training TP": facts.num_kv_heads < self.tp,
                "odd vocabulary": facts.vocab_size % 2 == 1,
                "tied": facts.tied_embeddings,
                "bias": facts.qkv_bias,
                "VPP": split.vpp > 1,
                "uneven PP": split.first is not None or split.last is not None,
                "rollout PP": self.rollout_pp > 1,
                "disjoint": self.disjoint,
                "cast": self.dtype != "float32",
                "relay": self.relay and self.replicas > 1,
            }.items()
            if there
        }


def _pipelines() -> list[PipelineSplit]:
    return [
        PipelineSplit(4),
        PipelineSplit(2, 2),
        PipelineSplit(4, 2, 2),
        PipelineSplit(3, 2, 1, 1, 2),
        PipelineSplit(3, 2, 1, None, 1),
        PipelineSplit(5, 3, 1, 1, None),
        PipelineSplit(6, 2, 2, 2, 4),
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.sampled_from([1, 2, 4]))
    rollout_tp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    most = max(tp, rollout_tp, kv_heads)
    pipeline = draw(st.sampled_from(_pipelines()))
    facts = ModelFacts(
        family="qwen2",
        num_layers=pipeline.num_layers,
        hidden_size=draw(st.sampled_from([8, 12])),
        num_heads=most * draw(st.sampled_from([1, 2])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        ffn_size=draw(st.sampled_from([8, 16])),
        vocab_size=draw(st.integers(17, 40)),
        norm_eps=1e-6,
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        max_positions=64,
        initializer_range=0.02,
    )
    return Case(
        facts,
        tp,
        pipeline,
        dp=draw(st.sampled_from([1, 2])),
        rollout_tp=rollout_tp,
        rollout_pp=draw(st.sampled_from([1, 1, 2])),
        replicas=draw(st.sampled_from([1, 2, 3])),
        disjoint=draw(st.booleans()),
        ranks_per_node=draw(st.sampled_from([1, 2, 4, 64])),
        relay=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


def hf_weights(facts: ModelFacts) -> dict[str, Tensor]:
    """Every element of every tensor has a value of its own."""
    weights, first = {}, 0.0
    for name, shape in hf_tensor_shapes(facts).items():
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
        first += count
    return weights


def training_tensors(case: Case, rank: int) -> dict[str, Tensor]:
    """A rank's parameters, filled from the HF weights; pads are -1; empty where the rank does not train."""
    weights = hf_weights(case.facts)
    tensors: dict[str, Tensor] = {}
    for group, (pp, tp) in zip(case.sources(), itertools.product(range(case.pipeline.pp), range(case.tp)), strict=True):
        if rank in group.ranks:
            for chunk in range(case.pipeline.vpp):
                for name, param in unsharded_params(case.facts, case.shard(pp, tp, chunk)).items():
                    tensors[f"{chunk}.{name}"] = torch.full((torch.Size(param.local_shape(case.tp)).numel(),), -1.0)
            for name, segments in group.layout.items():
                for segment in segments:
                    segment_view(tensors[name], segment).copy_(box_of(weights, segment))
    return tensors


def box_of(weights: Mapping[str, Tensor], segment: Segment) -> Tensor:
    return weights[segment.hf_name][segment.box.slices]


def rollout_shard(case: Case, rank: int) -> ShardLayout:
    """A rank's vLLM layout; empty where it serves none."""
    return next((group.layout for group in case.destinations() if rank in group.ranks), {})


def empty_tensors(layout: ShardLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.full((max((s.offset + s.numel for s in segments), default=0),), torch.nan, dtype=dtype)
        for name, segments in layout.items()
    }


Tensors = Mapping[int, Mapping[str, Tensor]]
"""rank -> parameter -> storage."""


def execute_all(
    plans: Mapping[int, RankPlan], sources: Tensors, destinations: Tensors, order: random.Random
) -> dict[tuple[int, str], Tensor]:
    """Carry out every rank's plan in a random order; returns how often each destination element was written."""
    writes = {
        (rank, name): torch.zeros_like(tensor, dtype=torch.int32)
        for rank, tensors in destinations.items()
        for name, tensor in tensors.items()
    }
    direct = [(rank, rank, origin, to) for rank, plan in plans.items() for origin, to in plan.local]
    relay: list[tuple[int, int, Piece, Piece]] = []
    for rank, plan in plans.items():
        direct += _pairs(rank, plan.direct.receives, {s: p.direct.sends for s, p in plans.items()})
        relay += _pairs(rank, plan.relay.receives, {s: p.relay.sends for s, p in plans.items()})
    for transfers, held in ((direct, sources), (relay, destinations)):
        order.shuffle(transfers)
        for sender, rank, origin, to in transfers:
            value = segment_view(held[sender][origin.parameter], origin.segment)
            segment_view(destinations[rank][to.parameter], to.segment).copy_(value)
            segment_view(writes[rank, to.parameter], to.segment).add_(1)
    return writes


def _pairs(
    rank: int, receives: Mapping[int, Sequence[Piece]], sends: Mapping[int, Mapping[int, Sequence[Piece]]]
) -> Iterator[tuple[int, int, Piece, Piece]]:
    for sender, incoming in receives.items():
        outgoing = sends[sender][rank]
        assert [(p.segment.hf_name, p.segment.box, p.dtype) for p in outgoing] == [
            (p.segment.hf_name, p.segment.box, p.dtype) for p in incoming
        ], "sender and receiver disagree"
        yield from ((sender, rank, origin, to) for origin, to in zip(outgoing, incoming, strict=True))


def crossings(plans: Mapping[int, RankPlan], case: Case) -> dict[int, int]:
    """Bytes that enter each node from others."""
    entered: dict[int, int] = {}
    for rank, plan in plans.items():
        for exchange in (plan.direct, plan.relay):
            for sender, pieces in exchange.receives.items():
                if case.node_of(sender) != case.node_of(rank):
                    node = case.node_of(rank)
                    entered[node] = entered.get(node, 0) + sum(piece.nbytes for piece in pieces)
    return entered
