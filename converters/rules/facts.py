"""What mrl needs to know of a model, read strictly from its HF config.json."""

from __future__ import annotations

import json
import math
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
    """Longest sequence the model is made for; YaRN's extension counted."""
    initializer_range: float


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


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


def config_file(model_path: str | Path) -> Path:
    path = Path(model_path)
    return path if path.suffix == ".json" else path / "config.json"


def read_config(model_path: str | Path) -> dict[str, Any]:
    """config.json of a HF directory, or such a file itself; ValueError naming it where it is missing or malformed."""
    path = config_file(model_path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no such file; give a HuggingFace directory with a config.json") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); correct the path or its permissions") from None
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, or an integer of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ValueError(f"{path}: not valid JSON ({reason}); re-download or repair the file") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, expected a JSON object")
    return config


def read_facts(config: Mapping[str, Any], families: Mapping[str, Family]) -> ModelFacts:
    """ModelFacts of a config, or UnsupportedModelError naming the family or field and what is supported."""
    family = _family(config, families)
    _refuse_inexpressible(config, family)
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    head_dim = _count(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim={head_dim} is odd; rotary embeddings turn pairs of elements")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UnsupportedModelError(f"tie_word_embeddings={tied!r} must be true or false; repair the file")
    return ModelFacts(
        family=family.name,
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        norm_eps=_positive(config, "rms_norm_eps"),
        tied_embeddings=tied,
        max_positions=_positions(config),
        initializer_range=_positive(config, "initializer_range", default=0.02),
        **family.specialise(config),
    )


def _family(config: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise UnsupportedModelError(
            f"architectures={architectures!r} must be a list that names the model's class; repair the file"
        )
    family = next((f for f in families.values() if architectures[0] in f.architectures), None)
    if family is None:
        supported = ", ".join(sorted(a for f in families.values() for a in f.architectures))
        raise UnsupportedModelError(f"model family {architectures[0]!r} is not supported; supported: {supported}")
    model_type = config.get("model_type", family.name)
    if model_type != family.name:
        raise UnsupportedModelError(
            f"model_type={model_type!r} does not go with architectures={architectures[0]!r}; repair the file"
        )
    return family


def _positions(config: Mapping[str, Any]) -> int:
    """max_position_embeddings, or what YaRN extends it to: such a config may state the unextended length."""
    limit = _count(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedModelError(f"rope_parameters={rope!r} must be an object; repair the file")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for holder, name in ((config, "rope_theta"), (rope, "rope_theta"), (rope, "factor")):
        if name in holder:
            _positive(holder, name)
    for holder in (config, rope):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"partial_rotary_factor={holder['partial_rotary_factor']!r} is not supported for this family; only 1 is"
            )
    if kind == "yarn":
        original = _count(rope, "original_max_position_embeddings", default=limit)
        limit = max(limit, int(original * _positive(rope, "factor", default=1.0)))
    return limit


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; a field that is null or absent has the default."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"lacks the field {name!r}; take config.json from the model's publisher")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive integer; repair the file")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive finite number."""
    value = config.get(name, default)
    if value is None:
        raise UnsupportedModelError(f"lacks the field {name!r}; take config.json from the model's publisher")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"{name}={value!r} must be a positive number; repair the file")
    return value


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
