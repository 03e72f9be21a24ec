"""Run by a gang of one: the parts of a real run (Megatron-Core actor, vLLM, bridge), with faults planted in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mrl.config.load import load_config
from mrl.learner import Sequences
from mrl.platform import select_platform
from mrl.setup import Parts, build_parts
from tests.cli import ROOT

HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": 260, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
}  # fmt: skip
LONG_PROMPT = [5 + 7 * i % 200 for i in range(200)]
"""Longer than a block of vLLM's KV cache, so that its first block is cached."""


def build(directory: Path) -> Parts:
    shutil.copytree(ROOT / "examples" / "demo" / "model", directory / "model")
    (directory / "model" / "config.json").write_text(json.dumps(HF))
    (directory / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    content = {
        "model": {"path": str(directory / "model"), "init": "random", "dtype": "float32"},
        "algorithm": {"name": "grpo"},
        "reward": {"function": "exact_match"},
        "rollout": {"n": 2},
        "data": {
            "train_files": str(directory / "prompts.jsonl"), "train_batch_size": 1, "max_prompt_length": 208,
            "max_response_length": 16,
        },
        "actor": {"ppo_mini_batch_size": 1},
        "trainer": {"total_steps": 1, "platform": "cpu", "run_dir": str(directory / "run")},
    }  # fmt: skip
    (directory / "run.yaml").write_text(yaml.safe_dump(content))
    (directory / "run").mkdir()
    config = load_config(directory / "run.yaml", [])
    return build_parts(config, directory / "run", select_platform("cpu"), 0, 1, lambda _: None, lambda _: None)


def faults(directory: str) -> dict[str, Any]:
    """What each planted fault did; `None` where the behaviour gate found nothing."""
    parts = build(Path(directory))
    found: dict[str, Any] = {"before the first sync": gate(parts)}
    parts.stages.sync_weights()
    found["after the first sync"] = gate(parts)

    change_actor(parts)
    found["weights changed, not synced"] = gate(parts)
    parts.stages.sync_weights()
    found["weights changed in place"] = gate(parts)

    change_actor(parts)
    for tensor in [*parts.learner.actor._model.parameters(), *parts.rollout.model.parameters()]:
        tensor.data = tensor.data.clone()
    parts.stages.sync_weights()
    found["both sides re-allocated"] = gate(parts)

    sampled_mismatch(parts)  # fills the prefix cache
    change_actor(parts)
    parts.stages._bridge.sync()  # without the reset of the prefix cache that follows in sync_weights
    found["stale prefix cache"] = sampled_mismatch(parts)
    parts.stages.sync_weights()
    found["prefix cache reset"] = sampled_mismatch(parts)

    layer = parts.rollout.model.model.layers[1].mlp.down_proj
    hidden_copy = layer.weight.data.clone()
    layer.forward = lambda x: (torch.nn.functional.linear(x, hidden_copy), None)
    parts.stages.sync_weights()
    found["hidden copy, equal weights"] = gate(parts)
    change_actor(parts)
    parts.stages.sync_weights()
    found["hidden copy"] = gate(parts)
    return found


def gate(parts: Parts) -> str | None:
    try:
        parts.check_behaviour()
    except ValueError as error:
        return str(error)
    return None


def change_actor(parts: Parts) -> None:
    """Another model: every matrix moved by as much as it is large."""
    with torch.no_grad():
        for name, tensor in parts.learner.actor.parameters().items():
            if tensor.dim() == 2:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))


def sampled_mismatch(parts: Parts) -> float:
    """Largest difference between vLLM's log-probs of what it sampled and the trainer's for the same tokens."""
    sample = parts.rollout.generate([LONG_PROMPT], [0], n=1, step=0, on_finished=lambda _: None)[0]
    tokens = torch.tensor(sample.token_ids)
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    sequences = Sequences([torch.tensor(LONG_PROMPT)], tokens[None], torch.tensor([len(tokens)]), mask)
    ours: Tensor = parts.learner.old_log_probs(sequences, temperature=1.0)[0]
    return float((ours - torch.tensor(sample.log_probs)).abs().max())
