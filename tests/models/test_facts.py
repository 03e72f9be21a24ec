"""Reading config.json strictly: families, fields that change the function, malformed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from converters.rules.facts import ModelFacts
from converters.rules.families import FAMILIES, facts_of
from tests.tiny import tiny_config


def write(tmp_path: Path, family: str, **changes: Any) -> Path:
    config = tiny_config(family).to_dict() | {"architectures": [f"{family.title()}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "qkv_bias", "qk_norm"), [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)]
)
def test_facts_of_each_family(tmp_path: Path, family: str, qkv_bias: bool, qk_norm: bool) -> None:
    assert facts_of(write(tmp_path, family)) == ModelFacts(
        family=family,
        num_layers=6,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=80,
        vocab_size=151,
        norm_eps=1e-6,
        tied_embeddings=False,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        max_positions=256,
        initializer_range=0.02,
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3F"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3", {"layer_types": 5}, "layer_types=5 must be a list"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list"),
        ("llama", {"model_type": "mixtral"}, "model_type='mixtral' does not go with"),
        ("llama", {"num_attention_heads": "4"}, "num_attention_heads='4' must be a positive integer"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 must be a positive integer"),
        ("llama", {"num_hidden_layers": 4.0}, "num_hidden_layers=4.0 must be a positive integer"),
        ("llama", {"vocab_size": -5}, "vocab_size=-5 must be a positive integer"),
        ("llama", {"head_dim": 33}, "head_dim=33 is odd"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a positive number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
        ("llama", {"rope_parameters": "linear"}, "rope_parameters='linear' must be an object"),
        ("llama", {"rope_parameters": {"rope_type": "zigzag"}}, "'zigzag' is not supported; supported: def"),
        ("llama", {"rope_parameters": {"rope_theta": "abc"}}, "rope_theta='abc' must be a positive number"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": "four"}}, "factor='four' must be a positive"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        facts_of(write(tmp_path, family, **changes))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


READ = {
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "max_position_embeddings",
    "initializer_range", "rope_parameters", "layer_types", "bos_token_id", "eos_token_id",
}  # fmt: skip
"""Fields that mrl reads."""

WITHOUT_EFFECT = {
    "model_type", "transformers_version", "dtype", "use_cache", "pad_token_id", "is_encoder_decoder",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type",
    "id2label", "label2id", "_name_or_path",
    # of effect only with use_sliding_window, which is refused
    "sliding_window", "max_window_layers",
}  # fmt: skip
"""Fields that do not change what the model computes."""


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_every_field_that_transformers_knows_is_accounted_for(config_class: type[PreTrainedConfig]) -> None:
    """A transformers that gives a family a new field fails here, not in a user's model."""
    declared = set(config_class().to_dict())
    assert declared - READ - WITHOUT_EFFECT <= FAMILIES[config_class.model_type].refused.keys()


def test_fields_of_others_are_ignored(tmp_path: Path) -> None:
    """As transformers does: published configs hold all kinds of notes."""
    plain = facts_of(write(tmp_path, "llama"))
    assert plain == facts_of(write(tmp_path, "llama", _model_name_or_path="x", **{"transformers.js_config": {"a": 1}}))


def test_missing_field_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        facts_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}')
    with pytest.raises(ValueError, match="lacks the field 'hidden_size'"):
        facts_of(tmp_path)
    for text in ("{not json", '{"a": ' + "1" * 5000 + "}", "[" * 200_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not valid JSON"):
            facts_of(tmp_path)
