"""vLLM's layout in closed form, for `mrl plan`: what the trace of vLLM's own loader gives, without vLLM.

A run never uses it: there the layout is traced and proven. Tests hold that both are equal.
"""

from __future__ import annotations

import math

from converters.rules import dense
from converters.rules.facts import ModelFacts
from converters.rules.segment import Segment, contiguous_strides
from mrl.bridge.plan import ShardGroup

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it over TP."""


def rollout_groups(facts: ModelFacts, ranks: tuple[int, ...], tp: int, pp: int, dtype: str) -> list[ShardGroup]:
    """The shards of vLLM engines over `ranks`: replicas of tp x pp consecutive ones, tensor parallelism fastest."""
    return [
        ShardGroup(
            ranks[pp_rank * tp + tp_rank :: tp * pp],
            layout := rollout_layout(facts, tp, tp_rank, pp, pp_rank),
            dict.fromkeys(layout, dtype),
        )
        for pp_rank in range(pp)
        for tp_rank in range(tp)
    ]


def rollout_layout(
    facts: ModelFacts, tp: int, tp_rank: int, pp: int = 1, pp_rank: int = 0
) -> dict[str, tuple[Segment, ...]]:
    """Parameter -> Segments of one vLLM rank; a tied LM head goes by the embedding's name."""
    layout: dict[str, tuple[Segment, ...]] = {}
    is_first, is_last = pp_rank == 0, pp_rank == pp - 1
    if is_first or (is_last and facts.tied_embeddings):
        layout["model.embed_tokens.weight"] = _vocabulary(facts, dense.EMBEDDING, tp, tp_rank)
    shapes = dense.hf_tensor_shapes(facts)
    for layer in pipeline_layers(facts.num_layers, pp, pp_rank):
        prefix = f"model.layers.{layer}."
        names = [name.removeprefix(prefix) for name in dense.layer_shapes(facts, layer)]
        for parameter, members in _fused(names).items():
            layout[prefix + parameter] = _stack(
                [_cut(facts, prefix + member, shapes[prefix + member], tp, tp_rank) for member in members]
            )
    if is_last:
        layout[dense.FINAL_NORM] = _stack([_cut(facts, dense.FINAL_NORM, (facts.hidden_size,), tp, tp_rank)])
        if not facts.tied_embeddings:
            layout[dense.LM_HEAD] = _vocabulary(facts, dense.LM_HEAD, tp, tp_rank)
    return layout


def pipeline_layers(num_layers: int, pp: int, pp_rank: int) -> range:
    """vLLM's stages: what does not divide goes to the stages before the last, from behind."""
    sizes = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        sizes[-i] += 1
    first = sum(sizes[:pp_rank])
    return range(first, first + sizes[pp_rank])


def _fused(names: list[str]) -> dict[str, list[str]]:
    """vLLM's parameter -> the tensors stacked in it: q, k and v are one linear, gate and up another."""
    fused: dict[str, list[str]] = {}
    for name in names:
        parameter = name
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                parameter = parameter.replace(f".{part}.", f".{whole}.")
        fused.setdefault(parameter, []).append(name)
    return fused


_Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(HF name, start, size)."""


def _cut(facts: ModelFacts, name: str, shape: tuple[int, ...], tp: int, tp_rank: int) -> _Box:
    """The box of a tensor that a TP rank holds."""
    part = name.split(".")[-2]
    start, size = [0] * len(shape), list(shape)
    if part in ("q_proj", "k_proj", "v_proj"):
        heads = facts.num_heads if part == "q_proj" else facts.num_kv_heads
        held = max(1, heads // tp)
        # Fewer heads than ranks: neighbours hold the same one.
        start[0] = (tp_rank * heads // tp) * facts.head_dim
        size[0] = held * facts.head_dim
    elif part in ("gate_proj", "up_proj"):
        size[0] //= tp
        start[0] = tp_rank * size[0]
    elif part in ("o_proj", "down_proj"):
        size[1] //= tp
        start[1] = tp_rank * size[1]
    return name, tuple(start), tuple(size)


def _stack(boxes: list[_Box]) -> tuple[Segment, ...]:
    """Boxes one behind the other along the first axis of a parameter."""
    segments, offset = [], 0
    for name, start, size in boxes:
        segments.append(Segment(name, start, size, offset, contiguous_strides(size)))
        offset += math.prod(size)
    return tuple(segments)


def padded_rows(facts: ModelFacts, tp: int) -> int:
    """Vocabulary rows of a TP rank, padding included."""
    return -(-facts.vocab_size // VOCAB_PADDING) * VOCAB_PADDING // tp


def _vocabulary(facts: ModelFacts, name: str, tp: int, tp_rank: int) -> tuple[Segment, ...]:
    per_rank = padded_rows(facts, tp)
    first = tp_rank * per_rank
    rows = min(per_rank, facts.vocab_size - first)
    return _stack([(name, (first, 0), (rows, facts.hidden_size))]) if rows > 0 else ()
