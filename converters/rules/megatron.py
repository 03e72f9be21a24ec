"""The Megatron-Core side: every parameter of one rank's GPTModel and the Segments that fill it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from converters.rules import dense
from converters.rules.facts import ModelFacts
from converters.rules.pipeline import PipelineSplit
from converters.rules.segment import Segment
from converters.rules.shard import ParamLayout

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class ModelShard:
    """One GPTModel's part of a model: a tensor-parallel slice of a pipeline stage, or of a chunk of it."""

    tp: int
    tp_rank: int
    pipeline: PipelineSplit
    pp_rank: int
    head: Head
    transformer_engine: bool
    chunk: int = 0

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0 and self.chunk == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pipeline.pp - 1 and self.chunk == self.pipeline.vpp - 1

    @property
    def layers(self) -> range:
        """Global indices of its layers."""
        return self.pipeline.layers(self.pp_rank, self.chunk)


def unsharded_params(facts: ModelFacts, shard: ModelShard) -> dict[str, ParamLayout]:
    """Parameters of a shard by their name in its GPTModel, before the tensor-parallel cut.

    A value head has no HF tensor in a causal LM checkpoint and is not listed. Tied embeddings live on the first and on
    the last stage: two holders of one box.
    """
    params: dict[str, ParamLayout] = {}
    if shard.is_first:
        params["embedding.word_embeddings.weight"] = dense.vocabulary_param(facts, dense.EMBEDDING, shard.tp)
    for local, layer in enumerate(shard.layers):
        for name, layout in dense.layer_params(facts, layer, shard.transformer_engine).items():
            params[f"decoder.layers.{local}.{name}"] = layout
    if shard.is_last:
        params["decoder.final_layernorm.weight"] = dense.replicated_param(dense.FINAL_NORM, facts.hidden_size)
        if shard.head == "lm" and not (facts.tied_embeddings and shard.is_first):
            hf_name = dense.EMBEDDING if facts.tied_embeddings else dense.LM_HEAD
            params["output_layer.weight"] = dense.vocabulary_param(facts, hf_name, shard.tp)
    return params


def megatron_layout(facts: ModelFacts, shard: ModelShard) -> dict[str, tuple[Segment, ...]]:
    """The ShardLayout of one GPTModel: parameter name -> Segments."""
    params = unsharded_params(facts, shard)
    return {name: layout.segments(shard.tp, shard.tp_rank) for name, layout in params.items()}
