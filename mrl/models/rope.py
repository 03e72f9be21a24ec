"""Rotary frequencies, taken from transformers' own functions so that trainer and HF cannot differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from converters.rules.facts import UnsupportedModelError


@dataclass(frozen=True)
class Rope:
    inv_freq: Tensor
    """[head_dim / 2] fp32."""
    attention_scaling: float
    """Factor on cos and sin (YaRN, longrope)."""


def read_rope(model_path: str | Path, max_length: int) -> Rope:
    """Frequencies of a HF directory for sequences of at most `max_length` tokens. ModelFacts has vouched for the type.

    longrope: vLLM picks the long or the short factors once, by its maximum length, so the trainer does the same.
    dynamic: the frequencies depend on the sequence's length beyond the original maximum; trainer and rollout would
    differ by construction, so it is refused there.
    """
    config: Any = AutoConfig.from_pretrained(model_path)
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        inv_freq, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    elif rope_type == "dynamic":
        original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > original:
            raise UnsupportedModelError(
                f"rope type 'dynamic' with sequences of up to {max_length} tokens: beyond {original} its frequencies "
                "change with the length, so trainer and rollout differ; lower data.max_response_length"
            )
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=max_length)
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=max_length)
    return Rope(inv_freq.float(), float(scaling))
