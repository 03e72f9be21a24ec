"""Dense decoders (Llama, Qwen2, Qwen3): which HF tensors fill which Megatron-Core parameter, and where.

Every rule describes the *unsharded* parameter in logical coordinates; `shard.py` cuts it for a TP rank. Legend of
shapes: H hidden, F ffn, V vocabulary, Q query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from converters.rules.facts import ModelFacts
from converters.rules.shard import Block, ParamLayout, padded_vocab_size

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


def hf_tensor_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint and its shape, in checkpoint order; a tied lm_head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (facts.vocab_size, facts.hidden_size)}
    for layer in range(facts.num_layers):
        shapes |= layer_shapes(facts, layer)
    shapes[FINAL_NORM] = (facts.hidden_size,)
    if not facts.tied_embeddings:
        shapes[LM_HEAD] = (facts.vocab_size, facts.hidden_size)
    return shapes


def layer_shapes(facts: ModelFacts, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one HF layer and their shapes, in checkpoint order."""
    H, F, D = facts.hidden_size, facts.ffn_size, facts.head_dim
    q_rows, kv_rows = facts.num_heads * D, facts.num_kv_heads * D
    prefix = f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (H,),
        f"{prefix}.self_attn.q_proj.weight": (q_rows, H),
        f"{prefix}.self_attn.k_proj.weight": (kv_rows, H),
        f"{prefix}.self_attn.v_proj.weight": (kv_rows, H),
        f"{prefix}.self_attn.o_proj.weight": (H, q_rows),
        f"{prefix}.post_attention_layernorm.weight": (H,),
        f"{prefix}.mlp.gate_proj.weight": (F, H),
        f"{prefix}.mlp.up_proj.weight": (F, H),
        f"{prefix}.mlp.down_proj.weight": (H, F),
    }
    if facts.qkv_bias:
        shapes[f"{prefix}.self_attn.q_proj.bias"] = (q_rows,)
        shapes[f"{prefix}.self_attn.k_proj.bias"] = (kv_rows,)
        shapes[f"{prefix}.self_attn.v_proj.bias"] = (kv_rows,)
    if facts.qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (D,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (D,)
    return shapes


def vocabulary_param(facts: ModelFacts, hf_name: str, tp: int) -> ParamLayout:
    """An embedding or LM head [padded V, H], cut by rows; pad rows have no block."""
    block = Block(hf_name, size=(facts.vocab_size, facts.hidden_size))
    return ParamLayout((padded_vocab_size(facts.vocab_size, tp), facts.hidden_size), tp_axis=0, blocks=(block,))


def replicated_param(hf_name: str, size: int) -> ParamLayout:
    return ParamLayout((size,), tp_axis=None, blocks=(Block(hf_name, size=(size,)),))


def layer_params(facts: ModelFacts, layer: int, transformer_engine: bool) -> dict[str, ParamLayout]:
    """Parameters of HF layer `layer`, named as within a Megatron-Core TransformerLayer.

    Transformer Engine's spec fuses the two norms into the linear that follows them; the local spec keeps them apart.
    """
    H, F, D = facts.hidden_size, facts.ffn_size, facts.head_dim
    prefix = f"model.layers.{layer}"
    attention_norm = "self_attention.linear_qkv.layer_norm_weight" if transformer_engine else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if transformer_engine else "pre_mlp_layernorm.weight"
    params = {
        attention_norm: replicated_param(f"{prefix}.input_layernorm.weight", H),
        "self_attention.linear_qkv.weight": _fused_qkv(facts, f"{prefix}.self_attn", "weight"),
        "self_attention.linear_proj.weight": ParamLayout(
            (H, facts.num_heads * D),
            tp_axis=1,
            blocks=(Block(f"{prefix}.self_attn.o_proj.weight", size=(H, facts.num_heads * D)),),
        ),
        mlp_norm: replicated_param(f"{prefix}.post_attention_layernorm.weight", H),
        # [gate, up] with each half cut by rows: a rank holds its rows of gate, then its rows of up.
        "mlp.linear_fc1.weight": ParamLayout(
            (2, F, H),
            tp_axis=1,
            blocks=tuple(
                Block(f"{prefix}.mlp.{name}.weight", size=(F, H), at=(half, 0, 0), axes=(1, 2))
                for half, name in enumerate(("gate_proj", "up_proj"))
            ),
        ),
        "mlp.linear_fc2.weight": ParamLayout(
            (H, F), tp_axis=1, blocks=(Block(f"{prefix}.mlp.down_proj.weight", size=(H, F)),)
        ),
    }
    if facts.qkv_bias:
        params["self_attention.linear_qkv.bias"] = _fused_qkv(facts, f"{prefix}.self_attn", "bias")
    if facts.qk_norm:
        params["self_attention.q_layernorm.weight"] = replicated_param(f"{prefix}.self_attn.q_norm.weight", D)
        params["self_attention.k_layernorm.weight"] = replicated_param(f"{prefix}.self_attn.k_norm.weight", D)
    return params


def _fused_qkv(facts: ModelFacts, prefix: str, kind: str) -> ParamLayout:
    """Megatron-Core interleaves by KV group: its Q/K query heads, its key head, its value head; then the next group."""
    D, queries = facts.head_dim, facts.num_heads // facts.num_kv_heads
    columns = (facts.hidden_size,) if kind == "weight" else ()
    zeros = (0,) * len(columns)
    blocks = []
    for group in range(facts.num_kv_heads):
        first = group * (queries + 2) * D
        for name, hf_row, rows, row in (
            ("q_proj", group * queries * D, queries * D, first),
            ("k_proj", group * D, D, first + queries * D),
            ("v_proj", group * D, D, first + (queries + 1) * D),
        ):
            hf_name = f"{prefix}.{name}.{kind}"
            blocks.append(Block(hf_name, (rows, *columns), start=(hf_row, *zeros), at=(row, *zeros)))
    total_rows = facts.num_kv_heads * (queries + 2) * D
    return ParamLayout((total_rows, *columns), tp_axis=0, blocks=tuple(blocks))
