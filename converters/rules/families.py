"""The supported families. A family is its entry here; dense decoders share the tensor names of `dense.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.rules.facts import Family, ModelFacts, UnsupportedModelError, config_file, read_config, read_facts


def _full_attention_only(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise UnsupportedModelError(f"layer_types={kinds!r} must be a list; repair the file")
    sliding = [kind for kind in kinds if kind != "full_attention"]
    if sliding:
        raise UnsupportedModelError(f"layer_types holds {sliding[0]!r}: only full_attention layers are supported")


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": False, "qk_norm": False}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    _full_attention_only(config)
    return {"qkv_bias": True, "qk_norm": False}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    _full_attention_only(config)
    return {"qkv_bias": False, "qk_norm": True}


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            ("LlamaForCausalLM",),
            refused={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "attention_dropout": 0.0},
            specialise=_llama,
        ),
        Family(
            "qwen2",
            ("Qwen2ForCausalLM",),
            refused={"use_sliding_window": False, "attention_dropout": 0.0},
            specialise=_qwen2,
        ),
        Family(
            "qwen3",
            ("Qwen3ForCausalLM",),
            refused={"use_sliding_window": False, "attention_bias": False, "attention_dropout": 0.0},
            specialise=_qwen3,
        ),
    )
}


def facts_of(model_path: str | Path) -> ModelFacts:
    """ModelFacts of a HF directory; raises ValueError naming the file, family or field."""
    config = read_config(model_path)
    try:
        return read_facts(config, FAMILIES)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config_file(model_path)}: {error}") from None
