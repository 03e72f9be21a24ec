"""The bridge with real vLLM: after a sync every vLLM parameter equals, bit for bit, that of a fresh vLLM.

The same gangs sample, so that rollouts are checked against transformers without further vLLM starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bridge import vllm_case
from tests.gang import Gang, free_port

CASES = {
    # name: (family, config changes, world, tp, pp, rollout tp, layers of the first stage). Vocabulary 151 is odd;
    # vLLM's CPU attention wants head_dim 32.
    "tp2-to-tp2": ("qwen2", {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": True}, 2, 2, 1, 2, None),
    "pp2-to-tp1dp2": ("llama", {"head_dim": 32}, 2, 1, 2, 1, None),
    "dp2-to-tp2": ("qwen3", {"head_dim": 32}, 2, 1, 1, 2, None),
    "tp2pp2-to-tp2dp2": ("qwen2", {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": True}, 4, 2, 2, 2, None),
    "uneven-pp2-to-tp2-one-kv-head": ("llama", {"head_dim": 32, "num_key_value_heads": 1}, 2, 1, 2, 2, 1),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    family, changes, world, tp, pp, rollout_tp, first_stage = CASES[request.param]
    path = tiny(family, **changes)
    out = tmp_path_factory.mktemp("export") / "hf"
    gang = Gang(world)
    results = gang.run(vllm_case.bridged, path, str(out), tp, pp, rollout_tp, 1 << 16, first_stage)
    gang.close()
    gang = Gang(rollout_tp)
    fresh = gang.run(vllm_case.fresh_parameters, str(out), rollout_tp)
    gang.close()
    return {"results": results, "fresh": fresh, "out": out, "rollout_tp": rollout_tp, "name": request.param}


def test_parameters_equal_a_fresh_vllm(case: dict[str, Any]) -> None:
    for rank, result in enumerate(case["results"]):
        fresh = case["fresh"][rank % case["rollout_tp"]]
        assert result["parameters"].keys() == fresh.keys()
        for name, tensor in result["parameters"].items():
            assert torch.equal(tensor, fresh[name]), f"rank {rank}: {name}"


def test_bytes_are_the_bound_and_only_point_to_point(case: dict[str, Any]) -> None:
    sent = received = 0
    for result in case["results"]:
        for stats in result["stats"]:
            assert stats.bytes_received == stats.lower_bound_bytes
            assert stats.elements_bound + result["pads"] == result["elements"]
        assert result["communication"]["irecv"] == result["stats"][1].bytes_received
        sent += result["communication"]["isend"]
        received += result["communication"]["irecv"]
    assert sent == received
    if case["name"] == "dp2-to-tp2":
        assert received == 0  # every rank holds the whole model already
    else:
        assert received > 0


def test_the_closed_form_is_what_the_trace_gives(case: dict[str, Any]) -> None:
    """`mrl plan` speaks of the very layout that a run would trace."""
    for result in case["results"]:
        assert result["layout"] == result["closed_form"]


def test_log_probs_follow_the_weights(case: dict[str, Any]) -> None:
    """vLLM computes the trained model after the second sync (fp32: 2e-4), and computed another one before."""
    log_p = vllm_case.reference_log_probs(case["out"])
    for result in case["results"]:
        before, after = (torch.tensor(x, dtype=torch.float64) for x in result["prompt_log_probs"])
        assert (after - log_p).abs().max() <= 2e-4
        assert (before - log_p).abs().max() > 1e-2


def test_samples_and_their_log_probs(case: dict[str, Any]) -> None:
    """Log-probs are those of softmax(logits / 0.7); equal seeds give equal samples; each rank holds every sample."""
    model = AutoModelForCausalLM.from_pretrained(case["out"], dtype=torch.float64)
    first, again, other = case["results"][0]["rollouts"]
    assert torch.equal(first.responses, again.responses)
    assert not torch.equal(first.responses, other.responses)
    for result in case["results"]:
        for mine, rank0 in zip(result["rollouts"], (first, again, other), strict=True):
            assert torch.equal(mine.responses, rank0.responses)
            assert torch.equal(mine.log_probs, rank0.log_probs)
    for batch in (first, other):
        assert batch.responses.shape[0] == len(vllm_case.PROMPTS) * vllm_case.SAMPLES
        for row in range(batch.responses.shape[0]):
            prompt = vllm_case.PROMPTS[row // vllm_case.SAMPLES]
            response = batch.responses[row, : batch.lengths[row]]
            tokens = torch.cat([torch.tensor(prompt), response])
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
            expected = (logits / vllm_case.TEMPERATURE).log_softmax(-1).gather(1, response[:, None])[:, 0]
            assert (batch.log_probs[row, : batch.lengths[row]] - expected).abs().max() <= 1e-4
            ends = [int(token) in vllm_case.EOS for token in response]
            assert not any(ends[:-1])  # nothing after an end token; the end token itself is kept
            assert batch.truncated[row] == (not ends[-1])
            assert batch.mask[row].sum() == batch.lengths[row] <= vllm_case.MAX_RESPONSE


def test_finished_samples_come_out_while_others_generate(case: dict[str, Any]) -> None:
    finished_early = [left for result in case["results"] for left in result["running"] if left > 0]
    assert finished_early, "on_finished was only called at the end"


def test_disjoint_ranks(tiny: Callable[..., str], tmp_path: Path) -> None:
    """Ranks 0-1 train in fp32 and 2-3 serve in bf16: every byte travels, once, after the cast, as vLLM would cast it.

    The log-probs show only that vLLM computes this model (bf16 rounds to 2^-9 a step; measured 0.07); the bits are
    compared before.
    """
    path = tiny("qwen2", hidden_size=128, head_dim=32, tie_word_embeddings=True)
    gang = Gang(4)
    results = gang.run(vllm_case.disjoint, path, str(tmp_path / "hf"), free_port())
    gang.close()
    gang = Gang(2)
    fresh = gang.run(vllm_case.fresh_parameters, str(tmp_path / "hf"), 2, "bfloat16")
    gang.close()
    for rank, result in enumerate(results):
        assert result["stats"].bytes_received == result["stats"].lower_bound_bytes
        assert result["stats"].bytes_received == 2 * result["stats"].elements_bound
        assert (result["stats"].bytes_received > 0) == (rank >= 2)
    for result, expected in zip(results[2:], fresh, strict=True):
        assert result["parameters"].keys() == expected.keys()
        for name, tensor in result["parameters"].items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, expected[name]), name
        log_p = vllm_case.reference_log_probs(tmp_path / "hf")
        assert (torch.tensor(result["prompt_log_probs"], dtype=torch.float64) - log_p).abs().max() <= 0.15


@pytest.mark.parametrize("tied", [True, False])
def test_rollout_pipeline_stages(tiny: Callable[..., str], tied: bool) -> None:
    """TP2 to vLLM PP2 over 5 layers: traced as the closed form says, filled with the checkpoint's bits at the bound."""
    path = tiny("llama", head_dim=32, num_hidden_layers=5, tie_word_embeddings=tied)
    gang = Gang(2)
    results = gang.run(vllm_case.pipelined, path)
    gang.close()
    for result in results:
        assert result["layout"] == result["closed_form"]
        assert result["wrong"] == []
        assert 0 < result["stats"].bytes_received == result["stats"].lower_bound_bytes
    embeddings = ["model.embed_tokens.weight" in result["layout"] for result in results]
    assert embeddings == [True, tied]


def test_samples_do_not_depend_on_the_replica(tiny: Callable[..., str], tmp_path: Path) -> None:
    """One replica of TP2 and two of TP1 draw the same tokens: seeds belong to samples, not to engines."""
    path = tiny("llama", head_dim=32)
    drawn = []
    for rollout_tp in (1, 2):
        gang = Gang(2)
        result = gang.run(vllm_case.bridged, path, str(tmp_path / f"hf{rollout_tp}"), 2, 1, rollout_tp, 1 << 20)[0]
        gang.close()
        drawn.append(result["rollouts"][0])
    assert torch.equal(drawn[0].responses, drawn[1].responses)


def test_ranks_that_sampled_apart_are_named(gang: Callable[[int], Gang]) -> None:
    for message in gang(2).run(vllm_case.planted_disagreement):
        assert message == "rollout: ranks [1] sampled other tokens than rank 0 of the same replica"
