"""Reading config.json strictly: families, fields that change the function, malformed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from converters.rules.facts import ModelFacts
from converters.rules.families import facts_of
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
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5: unknown field"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        facts_of(write(tmp_path, family, **changes))
    assert "\n" not in str(caught.value)


def test_missing_field_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        facts_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}')
    with pytest.raises(ValueError, match="lacks the field 'num_hidden_layers'"):
        facts_of(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="not valid JSON"):
        facts_of(tmp_path)
