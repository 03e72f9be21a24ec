"""Build a Megatron-Core GPTModel for one rank. Everything that touches Megatron-Core's model classes is here."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.rules.facts import ModelFacts
from converters.rules.megatron import Head, ModelShard, unsharded_params
from converters.rules.shard import padded_vocab_size
from mrl.models.attention import PackedAttention
from mrl.models.heads import ValueHead
from mrl.models.norm import RMSNorm
from mrl.models.rope import Rope
from mrl.parallel import ParallelLayout


class TrunkModel(GPTModel):
    """A GPTModel whose forward ends at the final hidden states [T or T/tp, 1, H].

    The head runs in the loss instead, only on the positions whose log-probability or value is needed. `output_layer`
    stays where Megatron-Core expects it, so the tied all-reduce, the sharded state and the DDP hooks work unchanged.
    """

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """LM head rows of this TP rank, [padded V / tp, H]; the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def transformer_config(
    facts: ModelFacts, layout: ParallelLayout, rope: Rope, dtype: torch.dtype, recompute: str
) -> TransformerConfig:
    """Megatron-Core's config; what is not named keeps a default that computes the HF model's function."""
    head_scale = facts.head_dim**-0.5
    recompute_args = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute == "full"
        else {}
    )
    config = TransformerConfig(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_attention_heads=facts.num_heads,
        num_query_groups=facts.num_kv_heads,
        kv_channels=facts.head_dim,
        ffn_hidden_size=facts.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=facts.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
        qk_layernorm=facts.qk_norm,
        # cos and sin scaled by s make every q.k product s^2 times larger: one factor on the softmax scale.
        softmax_scale=head_scale * rope.attention_scaling**2,
        attention_softmax_in_fp32=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Packed micro-batches differ in length, also between pipeline stages' neighbours; Megatron-Core then insists on
        # this dispatcher, for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        perform_initialization=False,
        init_method_std=facts.initializer_range,
        gradient_accumulation_fusion=False,
        **recompute_args,
    )
    assert config.hidden_dropout == 0.0, "dropout breaks the ratio of PPO"
    assert config.attention_dropout == 0.0, "dropout breaks the ratio of PPO"
    return config


def _block_spec(
    facts: ModelFacts, shard: ModelShard, config: TransformerConfig
) -> ModuleSpec | TransformerBlockSubmodules:
    if shard.transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=facts.qk_norm)
    layer = get_gpt_layer_local_spec(qk_layernorm=facts.qk_norm, normalization="LayerNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if facts.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * len(shard.layers), layer_norm=RMSNorm)


def build_model(
    facts: ModelFacts,
    layout: ParallelLayout,
    rank: int,
    rope: Rope,
    *,
    head: Head,
    dtype: torch.dtype,
    recompute: str,
    transformer_engine: bool,
) -> TrunkModel:
    """The rank's stage with uninitialised weights (a value head is zero). Call within `platform.megatron()`.

    A value model is untied: its embedding serves the input only.
    """
    shard = layout.shard(facts, rank, head, transformer_engine)
    config = transformer_config(facts, layout, rope, dtype, recompute)
    model = TrunkModel(
        config=config,
        transformer_layer_spec=_block_spec(facts, shard, config),
        vocab_size=padded_vocab_size(facts.vocab_size, layout.tp),
        max_sequence_length=facts.max_positions,
        pre_process=shard.is_first,
        post_process=shard.is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=facts.tied_embeddings and head == "lm",
        position_embedding_type="rope",
    )
    model.rotary_pos_emb.inv_freq = rope.inv_freq.to(torch.cuda.current_device())
    if head == "value" and shard.is_last:
        # Megatron-Core's constructor insists on a vocabulary head; it is dropped before any weight is loaded.
        model.output_layer = ValueHead(config)
    _mark_tensor_parallel(model, facts, shard)
    return model


def _mark_tensor_parallel(model: TrunkModel, facts: ModelFacts, shard: ModelShard) -> None:
    """Say which parameters are cut over TP: Megatron-Core does so only where it initialises them itself.

    Without the mark a cut parameter counts as a copy of TP rank 0's, and the gradient norm misses the other ranks.
    """
    rules = unsharded_params(facts, shard)
    for name, parameter in model.named_parameters():
        if name in rules and rules[name].tp_axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            stored_axis = rules[name].tp_axis - (len(rules[name].shape) - parameter.ndim)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=stored_axis, stride=1)
