"""The training side: every kind of Megatron-Core shard, and the ranks that hold it."""

from __future__ import annotations

from converters.rules.facts import ModelFacts
from converters.rules.megatron import megatron_layout
from mrl.bridge.plan import ShardGroup
from mrl.parallel import ParallelLayout


def training_groups(facts: ModelFacts, layout: ParallelLayout, transformer_engine: bool) -> list[ShardGroup]:
    """The actor's shards: a closed form, no communication. Data-parallel ranks form a group."""
    return [
        ShardGroup(
            tuple(layout.rank_of(dp, pp, tp) for dp in range(layout.dp)),
            megatron_layout(facts, layout.shard(facts, layout.rank_of(0, pp, tp), "lm", transformer_engine)),
        )
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    ]
