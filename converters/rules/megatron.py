"""The Megatron-Core side: every parameter of one rank's GPTModel and the Segments that fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from converters.rules import dense
from converters.rules.facts import ModelFacts
from converters.rules.segment import Segment
from converters.rules.shard import ParamLayout

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class ModelShard:
    """Which part of a model a rank holds."""

    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    head: Head
    transformer_engine: bool

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp - 1

    def layers(self, facts: ModelFacts) -> range:
        """Global indices of this stage's layers."""
        if facts.num_layers % self.pp:
            raise ValueError(f"{facts.num_layers} layers do not divide over pipeline_model_parallel_size={self.pp}")
        per_stage = facts.num_layers // self.pp
        return range(self.pp_rank * per_stage, (self.pp_rank + 1) * per_stage)


def unsharded_params(facts: ModelFacts, shard: ModelShard) -> dict[str, ParamLayout]:
    """Parameters of a stage by their name in the stage's GPTModel, before the tensor-parallel cut.

    A value head has no HF tensor in a causal LM checkpoint and is not listed. Tied embeddings live on the first and on
    the last stage: two holders of one box.
    """
    params: dict[str, ParamLayout] = {}
    if shard.is_first:
        params["embedding.word_embeddings.weight"] = dense.vocabulary_param(facts, dense.EMBEDDING, shard.tp)
    for local, layer in enumerate(shard.layers(facts)):
        for name, layout in dense.layer_params(facts, layer, shard.transformer_engine).items():
            params[f"decoder.layers.{local}.{name}"] = layout
    if shard.is_last:
        params["decoder.final_layernorm.weight"] = dense.replicated_param(dense.FINAL_NORM, facts.hidden_size)
        if shard.head == "lm" and not (facts.tied_embeddings and shard.is_first):
            hf_name = dense.EMBEDDING if facts.tied_embeddings else dense.LM_HEAD
            params["output_layer.weight"] = dense.vocabulary_param(facts, hf_name, shard.tp)
    return params


def megatron_layout(facts: ModelFacts, shard: ModelShard) -> dict[str, tuple[Segment, ...]]:
    """The ShardLayout of one rank: parameter name -> Segments."""
    params = unsharded_params(facts, shard)
    return {name: layout.segments(shard.tp, shard.tp_rank) for name, layout in params.items()}
