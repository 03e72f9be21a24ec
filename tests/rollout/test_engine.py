"""The rollout engine on real vLLM, against transformers in fp64: three gangs of two ranks, one vLLM start each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mrl.rollout.engine import Completion
from mrl.rollout.share import RolloutBatch
from tests.gang import Gang
from tests.rollout import engine_case as case
from tests.tiny import VOCAB, load_hf, make_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama (vLLM's CPU attention wants head_dim 32) with a tokenizer whose words are w0, w1, ..."""
    path = make_model(tmp_path_factory.mktemp("rollout") / "model", "llama", head_dim=32)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def run(function: Callable[..., Any], path: Path) -> list[Any]:
    gang = Gang(2)
    try:
        return gang.run(function, str(path))
    finally:
        gang.close()


@pytest.fixture(scope="module")
def two_replicas(path: Path) -> list[dict[str, Any]]:
    return run(case.replicas_then_edit, path)


@pytest.fixture(scope="module")
def one_replica(path: Path) -> list[dict[str, Any]]:
    return run(case.one_replica_of_two, path)


@pytest.fixture(scope="module")
def settings(path: Path) -> list[list[Completion]]:
    return run(case.other_settings, path)


@torch.no_grad()
def hf_log_probs(model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """log_softmax(logits / temperature) of each response token."""
    tokens = torch.tensor([*prompt, *response])
    logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]


def worst(model: PreTrainedModel, prompt: Sequence[int], sample: Completion, temperature: float) -> float:
    expected = hf_log_probs(model, prompt, sample.token_ids, temperature)
    return float((torch.tensor(sample.log_probs, dtype=torch.float64) - expected).abs().max())


def test_log_probs_are_those_of_the_tempered_softmax(
    path: Path, two_replicas: list[dict[str, Any]], one_replica: list[dict[str, Any]]
) -> None:
    model = load_hf(path)
    for result in (two_replicas[0], one_replica[0]):
        for batch in result["rollouts"]:
            for row, length in enumerate(batch.lengths.tolist()):
                prompt = case.PROMPTS[row // case.SAMPLES]
                expected = hf_log_probs(model, prompt, batch.responses[row, :length].tolist(), case.TEMPERATURE)
                assert (batch.log_probs[row, :length] - expected).abs().max() <= 1e-4


def test_every_rank_holds_the_same_batch(two_replicas: list[dict[str, Any]], one_replica: list[dict[str, Any]]) -> None:
    for ranks in (two_replicas, one_replica):
        for mine, other in zip(ranks[0]["rollouts"], ranks[1]["rollouts"], strict=True):
            assert torch.equal(mine.responses, other.responses)
            assert torch.equal(mine.log_probs, other.log_probs)
            assert torch.equal(mine.truncated, other.truncated)


def test_seeds(two_replicas: list[dict[str, Any]]) -> None:
    """A step repeats exactly; another step, sample, or an equal prompt at another index draws other tokens."""
    first, again, other = two_replicas[0]["rollouts"]
    assert torch.equal(first.responses, again.responses)
    assert torch.equal(first.log_probs, again.log_probs)
    assert not torch.equal(first.responses, other.responses)
    rows = [tuple(row.tolist()) for row in first.responses]
    n = case.SAMPLES
    assert case.PROMPTS[0] == case.PROMPTS[3]  # one on each replica
    assert len(set(rows[:n] + rows[3 * n :])) > n + 1


def test_tokens_do_not_depend_on_the_split_over_replicas(
    two_replicas: list[dict[str, Any]], one_replica: list[dict[str, Any]]
) -> None:
    """Two replicas of one rank and one of two (fp32): the seed belongs to the sample, not to the engine."""
    for split, whole in zip(two_replicas[0]["rollouts"], one_replica[0]["rollouts"], strict=True):
        assert torch.equal(split.responses, whole.responses)
        assert (split.log_probs - whole.log_probs).abs().max() <= 2e-5


def test_ends(two_replicas: list[dict[str, Any]]) -> None:
    """A response ends with the first of several end tokens, which it keeps, or is cut at the limit."""
    batches: list[RolloutBatch] = two_replicas[0]["rollouts"]
    truncated = torch.cat([batch.truncated for batch in batches])
    assert truncated.any()
    assert not truncated.all()
    ended_by: set[int] = set()
    for batch in batches:
        for row, length in enumerate(batch.lengths.tolist()):
            response = batch.responses[row, :length].tolist()
            assert not set(response[:-1]) & set(case.EOS)
            if batch.truncated[row]:
                assert length == case.MAX_RESPONSE
                assert response[-1] not in case.EOS
            else:
                ended_by.add(response[-1])
            assert batch.mask[row].tolist() == [i < length for i in range(batch.mask.shape[1])]
    assert ended_by <= set(case.EOS)
    assert len(ended_by) > 1


def test_finished_samples_come_out_while_others_generate(
    two_replicas: list[dict[str, Any]], one_replica: list[dict[str, Any]]
) -> None:
    """vLLM itself counts its unfinished requests at each call: the first comes early, the last at the end."""
    for result in (*two_replicas, *one_replica):
        running = result["running"]
        assert min(running) == 0
        assert running[0] >= 2
        assert len(set(running)) > 2


def test_shared_memory_leaves_no_name(one_replica: list[dict[str, Any]]) -> None:
    """Tensor parallel ranks share memory whose name is gone once all have joined: a killed job leaves nothing."""
    for result in one_replica:
        assert result["shared_memory"] == []


def test_writes_into_the_weights_take_effect(path: Path, two_replicas: list[dict[str, Any]]) -> None:
    """lm_head and linears are edited in place: vLLM's log-probs change as transformers' do."""
    model = load_hf(path)
    plain = hf_log_probs(model, case.FIXED[:1], case.FIXED[1:], 1.0)
    case.edit_weights(dict(model.named_parameters()))
    edited = hf_log_probs(model, case.FIXED[:1], case.FIXED[1:], 1.0)
    assert (plain - edited).abs().max() > 0.1
    for result in two_replicas:
        before = torch.tensor(result["prompt_log_probs"], dtype=torch.float64)
        after = torch.tensor(result["edited_prompt_log_probs"], dtype=torch.float64)
        assert (before - plain).abs().max() <= 1e-4
        assert (after - edited).abs().max() <= 1e-4


def test_prefix_cache_holds_old_weights_until_reset(path: Path, two_replicas: list[dict[str, Any]]) -> None:
    model = load_hf(path)
    for result in two_replicas:
        assert worst(model, case.LONG_PROMPT, result["long"], case.TEMPERATURE) <= 1e-4
    case.edit_weights(dict(model.named_parameters()))
    for result in two_replicas:
        assert worst(model, case.LONG_PROMPT, result["long_stale"], case.TEMPERATURE) > 1e-2
        assert worst(model, case.LONG_PROMPT, result["long_edited"], case.TEMPERATURE) <= 1e-4


def test_reset_of_a_running_cache_is_an_error(two_replicas: list[dict[str, Any]]) -> None:
    for result in two_replicas:
        assert result["reset_while_running"] == (
            "rollout: vLLM kept its prefix cache, some request still holds blocks of it"
        )


def test_ignore_eos_and_independent_draws(path: Path, settings: list[list[Completion]]) -> None:
    """512 samples of one prompt, each with its own seed, are draws from the model's distribution (chi-square)."""
    samples = settings[0]
    assert all(len(s.token_ids) == 2 and s.finish_reason == "length" for s in samples)
    assert any(s.token_ids[0] in case.EOS for s in samples)
    with torch.no_grad():
        p = load_hf(path)(torch.tensor([case.PROMPTS[0]])).logits[0, -1].softmax(-1)
    drawn = torch.bincount(torch.tensor([s.token_ids[0] for s in samples]), minlength=VOCAB)
    order = p.argsort(descending=True)
    # 30 cells of about equal mass, so that each expects some 17 draws.
    cell = torch.empty(VOCAB, dtype=torch.int64)
    cell[order] = (p[order].cumsum(0) * 30).long().clamp(max=29)
    expected = torch.zeros(30, dtype=torch.float64).index_add_(0, cell, p) * len(samples)
    seen = torch.zeros(30, dtype=torch.float64).index_add_(0, cell, drawn.double())
    filled = expected > 1
    chi2 = ((seen - expected)[filled] ** 2 / expected[filled]).sum()
    assert chi2 < 70  # 29 degrees of freedom: p = 3e-5


def test_stop_strings(path: Path, settings: list[list[Completion]]) -> None:
    """A response ends with the token that completes a stop string, or an end token; log-probs stay those of HF."""
    model = load_hf(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)

    def has_stop(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(list(tokens))
        return any(stop in text for stop in case.STOP)

    stopped = 0
    for sample in settings[1]:
        tokens = list(sample.token_ids)
        assert not has_stop(tokens[:-1])
        ends = has_stop(tokens) or tokens[-1] in case.EOS
        assert (sample.finish_reason == "stop") == ends
        assert ends or len(tokens) == case.MAX_RESPONSE
        stopped += has_stop(tokens)
        assert worst(model, case.PROMPTS[sample.prompt_index], sample, case.TEMPERATURE) <= 1e-4
    assert stopped
