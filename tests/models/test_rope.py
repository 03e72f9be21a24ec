"""Rotary embeddings against transformers: frequencies, and log-probs at positions beyond the original context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.models.rope import read_rope
from tests.engine import cases, oracle
from tests.gang import Gang
from tests.models.long_case import long_log_probs
from tests.tiny import load_hf

LENGTH = 200
ORIGINAL = 64
HALF = 8  # head_dim / 2

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "rope_theta": 10000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
        "long_factor": [1.0 + 0.7 * i for i in range(HALF)],
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_and_long_positions(gang: Callable[[int], Gang], tiny: Callable[..., str], kind: str) -> None:
    path = tiny("llama", rope_parameters=ROPES[kind])
    model = load_hf(Path(path))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, 151, (LENGTH,), generator=generator)
        expected = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    rope = read_rope(path, max_length=LENGTH)
    # transformers swaps longrope's factors by the length it sees: its buffer now holds the long ones.
    assert torch.allclose(rope.inv_freq, model.model.rotary_emb.inv_freq.float(), rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(model.model.rotary_emb.attention_scaling)
    ours = gang(1).run(long_log_probs, path, tokens, LENGTH)[0]
    assert (ours - expected).abs().max() <= 2e-4


def test_longrope_takes_the_short_factors_for_short_runs(tiny: Callable[..., str]) -> None:
    """As vLLM does: the factor set follows the maximum length, not each sequence."""
    path = tiny("llama", rope_parameters=ROPES["longrope"])
    theta = 10000.0
    factors = torch.tensor(ROPES["longrope"]["short_factor"])
    short = 1.0 / (factors * theta ** (torch.arange(0, 16, 2) / 16))
    assert torch.allclose(read_rope(path, max_length=ORIGINAL).inv_freq, short, rtol=1e-6)


def test_dynamic_rope_is_refused_only_beyond_the_original_context(tiny: Callable[..., str]) -> None:
    path = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(read_rope(path, max_length=256).inv_freq, plain, rtol=1e-6)
    with pytest.raises(ValueError, match="rope type 'dynamic' with sequences of up to 257"):
        read_rope(path, max_length=257)


def test_head_dim_other_than_hidden_over_heads(gang: Callable[[int], Gang], tiny: Callable[..., str]) -> None:
    """hidden 48 over 4 heads is 12; head_dim is 24 (Qwen3-32B's kind of shape)."""
    path = tiny("qwen3", head_dim=24)
    assert AutoModelForCausalLM.from_pretrained(path).config.head_dim == 24
    ours = gang(2).run(cases.full_log_probs, path, 2, 1, 512)[0]
    assert (ours - oracle.hf_log_probs(path)).abs().max() <= 1e-4
