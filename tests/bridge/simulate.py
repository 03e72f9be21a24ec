"""Random models and layouts for the planner, and a one-process execution of all ranks' plans."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from converters.load import segment_view
from converters.rules.dense import hf_tensor_shapes
from converters.rules.facts import ModelFacts
from converters.rules.megatron import ModelShard, megatron_layout, unsharded_params
from converters.rules.segment import Segment, ShardLayout
from mrl.bridge.plan import RankPlan
from mrl.parallel import ParallelLayout


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return ModelFacts(
        family="qwen2",
        num_layers=draw(st.sampled_from([2, 4])),
        hidden_size=draw(st.sampled_from([8, 12])),
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
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


def hf_weights(facts: ModelFacts) -> dict[str, Tensor]:
    """Every element of every tensor has a value of its own."""
    weights, first = {}, 0.0
    for name, shape in hf_tensor_shapes(facts).items():
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
        first += count
    return weights


def training_layouts(facts: ModelFacts, layout: ParallelLayout) -> dict[int, dict[str, tuple[Segment, ...]]]:
    return {rank: megatron_layout(facts, _shard(layout, rank)) for rank in range(layout.world)}


def _shard(layout: ParallelLayout, rank: int) -> ModelShard:
    at = layout.coordinates(rank)
    return ModelShard(layout.tp, at.tp, layout.pp, at.pp, "lm", transformer_engine=False)


def training_tensors(facts: ModelFacts, layout: ParallelLayout, rank: int) -> dict[str, Tensor]:
    """A rank's parameters, filled from the HF weights; pads are -1."""
    shard = _shard(layout, rank)
    weights = hf_weights(facts)
    tensors = {}
    for name, param in unsharded_params(facts, shard).items():
        tensors[name] = torch.full((torch.Size(param.local_shape(layout.tp)).numel(),), -1.0)
        for segment in param.segments(layout.tp, shard.tp_rank):
            segment_view(tensors[name], segment).copy_(box_of(weights, segment))
    return tensors


def box_of(weights: Mapping[str, Tensor], segment: Segment) -> Tensor:
    return weights[segment.hf_name][segment.box.slices]


def rollout_layouts(facts: ModelFacts, world: int, tp: int) -> dict[int, dict[str, tuple[Segment, ...]]]:
    """As vLLM lays it out: fused [q, k, v] (KV heads replicated where fewer than tp) and [gate, up], all layers."""
    return {rank: _rollout_rank(facts, tp, rank % tp) for rank in range(world)}


def _rollout_rank(facts: ModelFacts, tp: int, rank: int) -> dict[str, tuple[Segment, ...]]:
    layout: dict[str, list[Segment]] = {}
    fused: dict[str, int] = {}

    def add(parameter: str, hf_name: str, start: tuple[int, ...], size: tuple[int, ...]) -> None:
        strides = (size[-1], 1) if len(size) == 2 else (1,)
        offset = fused.get(parameter, 0)
        layout.setdefault(parameter, []).append(Segment(hf_name, start, size, offset, strides))
        fused[parameter] = offset + torch.Size(size).numel()

    for name, shape in hf_tensor_shapes(facts).items():
        stem, _, kind = name.rpartition(".")
        part = stem.rpartition(".")[2]
        rest, zeros = shape[1:], (0,) * (len(shape) - 1)
        if part in ("q_proj", "k_proj", "v_proj"):
            heads = facts.num_heads if part == "q_proj" else facts.num_kv_heads
            mine = max(1, heads // tp)
            first = rank * mine if heads >= tp else rank // (tp // heads)
            rows = mine * facts.head_dim
            add(stem.replace(part, "qkv_proj") + f".{kind}", name, (first * facts.head_dim, *zeros), (rows, *rest))
        elif part in ("gate_proj", "up_proj"):
            rows = shape[0] // tp
            add(stem.replace(part, "gate_up_proj") + f".{kind}", name, (rank * rows, 0), (rows, *rest))
        elif part in ("o_proj", "down_proj"):
            columns = shape[1] // tp
            add(name, name, (0, rank * columns), (shape[0], columns))
        elif part in ("embed_tokens", "lm_head"):
            per_rank = -(-shape[0] // (8 * tp)) * 8
            rows = max(0, min(per_rank, shape[0] - rank * per_rank))
            if rows:
                add(name, name, (rank * per_rank, 0), (rows, shape[1]))
        else:
            add(name, name, (0,) * len(shape), shape)
    return {name: tuple(segments) for name, segments in layout.items()}


def empty_tensors(layout: ShardLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.full((max(s.offset + s.numel for s in segments),), torch.nan, dtype=dtype)
        for name, segments in layout.items()
    }


def execute_all(
    plans: Mapping[int, RankPlan],
    sources: Mapping[int, Mapping[str, Tensor]],
    destinations: Mapping[int, dict[str, Tensor]],
) -> dict[tuple[int, str], Tensor]:
    """Carry out every rank's plan; returns how often each destination element was written."""
    writes = {
        (rank, name): torch.zeros_like(tensor, dtype=torch.int32)
        for rank, tensors in destinations.items()
        for name, tensor in tensors.items()
    }
    for rank, plan in plans.items():
        arriving = [(rank, piece) for piece in plan.local]
        for sender, pieces in plan.receives.items():
            assert pieces == plans[sender].sends[rank], "sender and receiver disagree"
            arriving += [(sender, piece) for piece in pieces]
        for sender, piece in arriving:
            source = segment_view(sources[sender][piece.source_parameter], piece.source)
            segment_view(destinations[rank][piece.destination_parameter], piece.destination).copy_(source)
            segment_view(writes[rank, piece.destination_parameter], piece.destination).add_(1)
    return writes
