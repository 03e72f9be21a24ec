"""Tiny random HF models with shapes that catch mistakes: nothing square, odd vocabulary, unusual head_dim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB = 151


def tiny_config(family: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return CONFIGS[family](**(sizes | changes))


def make_model(
    path: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 1, scale: float = 0.2, **changes: Any
) -> Path:
    """Write a random model of `family` to `path`; norms and biases are random too, so that none can be lost unseen."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=scale)
            else:
                parameter.normal_(mean=0.5, std=0.3)
    model.save_pretrained(path)
    return path


def load_hf(path: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
