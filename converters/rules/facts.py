"""What mrl needs to know of a model, read strictly from its HF config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """The architecture of a dense decoder. Sizes are counts of elements; names follow HF."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    initializer_range: float


class UnsupportedModelError(ValueError):
    """The model's family, or one of its config fields, cannot be expressed exactly."""


@dataclass(frozen=True)
class Family:
    """How one family's config.json is read.

    `refused` maps a field to the only value that mrl can express; any other value is an error naming the field. Fields
    that transformers does not declare for the family are ignored, as transformers ignores them; a test holds that every
    declared one is accounted for.
    """

    name: str
    architectures: tuple[str, ...]
    refused: Mapping[str, Any]
    specialise: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the config to the ModelFacts fields in which families differ."""


def read_config(model_path: str | Path) -> dict[str, Any]:
    """config.json of a HF directory. Raises ValueError naming the file where it is missing or malformed."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; model.path must be a HuggingFace directory with a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); re-download or repair the file") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, expected a JSON object")
    return config


def read_facts(config: Mapping[str, Any], families: Mapping[str, Family]) -> ModelFacts:
    """ModelFacts of a config, or UnsupportedModelError naming the family or field and what is supported."""
    architecture = (config.get("architectures") or ["(none)"])[0]
    family = next((f for f in families.values() if architecture in f.architectures), None)
    if family is None:
        supported = ", ".join(sorted(a for f in families.values() for a in f.architectures))
        raise UnsupportedModelError(f"model family {architecture!r} is not supported; supported: {supported}")
    _refuse_inexpressible(config, family)
    try:
        heads = config["num_attention_heads"]
        facts = ModelFacts(
            family=family.name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=config["max_position_embeddings"],
            initializer_range=config.get("initializer_range", 0.02),
            **family.specialise(config),
        )
    except KeyError as error:
        raise UnsupportedModelError(f"config.json of a {architecture} lacks the field {error.args[0]!r}") from None
    if facts.num_heads % facts.num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={facts.num_heads} is not a multiple of num_key_value_heads={facts.num_kv_heads}"
        )
    return facts


def _refuse_inexpressible(config: Mapping[str, Any], family: Family) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act={config['hidden_act']!r}: mrl's {family.name} models use silu; other activations are refused"
        )
    if "quantization_config" in config:
        raise UnsupportedModelError("quantization_config: quantized checkpoints are refused; dequantize it first")
    for name, only in family.refused.items():
        if name in config and config[name] != only:
            raise UnsupportedModelError(
                f"{name}={config[name]!r}: a {family.name} model with it cannot be expressed exactly; "
                f"only {name}={only!r} is supported"
            )
