"""Core attention over packed sequences (THD) for the local layer spec.

Shapes: T tokens of the packed micro-batch, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed micro-batch; nothing crosses a sequence boundary.

    On CUDA in half precision torch's variable-length kernel does it in one call; elsewhere SDPA runs a sequence at a
    time, which is exact in fp32.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__(config=config)
        del layer_number, unused
        assert config.attention_dropout == 0.0, "dropout breaks the ratio of PPO"
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query_TND: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns [T, N * D]."""
        assert packed_seq_params is not None, "mrl feeds packed sequences only"
        assert attention_mask is None
        assert attention_bias is None
        if query_TND.is_cuda and query_TND.dtype in (torch.float16, torch.bfloat16):
            out_TND = self._varlen(query_TND, key_TGD, value_TGD, packed_seq_params)
        else:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            sequences = zip(*(x.split(lengths) for x in (query_TND, key_TGD, value_TGD)), strict=True)
            out_TND = torch.cat([self._one_sequence(q, k, v) for q, k, v in sequences])
        return out_TND.flatten(1)

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = query.shape[1] // key.shape[1]
        return varlen_attn(
            query,
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),  # causal
        )
