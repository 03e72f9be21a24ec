"""The rollout engine: one in-process vLLM per replica of `rollout.tensor_model_parallel_size` ranks."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from mrl.config.schema import RolloutSection
from mrl.platform import Platform
from mrl.seeding import derived_seed

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One sampled response, of at least one token.

    token_ids include the end-of-sequence token that ended it (finish_reason `stop`); a response cut at
    max_response_length has `length`, also where its last token would have been followed by the end.
    """

    prompt_index: int
    sample_index: int
    token_ids: array[int]
    log_probs: array[float]
    """Of each sampled token, the end-of-sequence token too, after temperature: what the sampler drew from."""
    finish_reason: FinishReason


class RolloutEngine:
    """vLLM under mrl's own process group.

    Every rank of a replica calls `generate` with the same prompts in the same order; requests are added in that order
    and each has its own seed, so the ranks take the same decisions without talking about them. `before_build` runs
    between vLLM's import and the building of its model (the bridge registers its loader there). eos_token_ids must hold
    those of generation_config.json, at which vLLM stops in any case (unless rollout.ignore_eos).

    Keep the engine until the process ends: vLLM's shutdown, which also runs when the engine is garbage collected,
    destroys torch.distributed's default process group, the trainer's world.
    """

    def __init__(
        self,
        model_path: str,
        section: RolloutSection,
        platform: Platform,
        *,
        max_prompt_length: int,
        max_response_length: int,
        eos_token_ids: Sequence[int],
        seed: int,
        load_format: str,
        loader_config: dict[str, Any],
        before_build: Callable[[], None],
        trust_remote_code: bool = False,
    ) -> None:
        os.environ.update(platform.vllm_environment(section.kv_cache_gib))
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        platform.prepare_vllm()
        before_build()
        self._section, self._seed = section, seed
        self._max_response_length = max_response_length
        self._eos = list(eos_token_ids)
        self._sampling_params = SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._llm = LLM(
            model=model_path,
            dtype=section.dtype,
            tensor_parallel_size=section.tensor_model_parallel_size,
            distributed_executor_backend="external_launcher",
            max_model_len=max_prompt_length + max_response_length,
            max_num_seqs=section.max_num_seqs,
            max_num_batched_tokens=section.max_num_batched_tokens,
            enable_chunked_prefill=section.enable_chunked_prefill,
            enable_prefix_caching=True,
            enforce_eager=section.enforce_eager or platform.rollout_eager,
            gpu_memory_utilization=section.gpu_memory_utilization,
            # Tokens go in and come out; only stop strings need vLLM to hold a tokenizer.
            skip_tokenizer_init=not section.stop,
            logprobs_mode="processed_logprobs",
            seed=seed,
            load_format=load_format,
            model_loader_extra_config=loader_config,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
        )
        self._engine = self._llm.llm_engine

    @property
    def model(self) -> nn.Module:
        """vLLM's model on this rank, whose parameters the bridge writes."""
        return self._engine.model_executor.driver_worker.worker.model_runner.model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        prompt_indices: Sequence[int],
        *,
        n: int,
        step: int,
        on_finished: Callable[[Completion], None],
    ) -> list[Completion]:
        """Sample n responses to each prompt of this replica, in (prompt, sample) order.

        `on_finished` is called as soon as a sample ends, while others still generate. The seed of a sample depends on
        (seed, step, prompt index, sample index) alone, so it does not matter which replica draws it.
        """
        owner: dict[str, tuple[int, int]] = {}
        for tokens, prompt in zip(prompts, prompt_indices, strict=True):
            for sample in range(n):
                request_id = f"{step}-{prompt}-{sample}"
                owner[request_id] = (prompt, sample)
                params = self._params(derived_seed(self._seed, "rollout", step, prompt, sample))
                self._engine.add_request(request_id, {"prompt_token_ids": list(tokens)}, params)
        finished: dict[tuple[int, int], Completion] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    completion = _completion(output, owner[output.request_id])
                    finished[completion.prompt_index, completion.sample_index] = completion
                    on_finished(completion)
        return [finished[key] for key in owner.values()]

    def _params(self, seed: int) -> Any:
        section = self._section
        return self._sampling_params(
            n=1,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            max_tokens=self._max_response_length,
            stop=section.stop or None,
            stop_token_ids=None if section.ignore_eos else self._eos,
            ignore_eos=section.ignore_eos,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(section.stop),
            output_kind=self._final_only,
        )

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:], each given all before it, from vLLM's own forward pass (temperature 1)."""
        params = self._sampling_params(
            n=1, temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        self._engine.add_request("prompt-log-probs", {"prompt_token_ids": list(tokens)}, params)
        outputs = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        flat = outputs[-1].prompt_logprobs
        return [flat.logprobs[start] for start in flat.start_indices[1:]]

    def reset_prefix_cache(self) -> None:
        """Forget cached keys and values: they belong to the weights before a sync. Raises where a request runs."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("rollout: vLLM kept its prefix cache, some request still holds blocks of it")


def _completion(output: Any, key: tuple[int, int]) -> Completion:
    """From vLLM's output; raises where the request did not end by itself."""
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended prompt {key[0]} sample {key[1]} with {sample.finish_reason!r}")
    tokens = array("q", sample.token_ids)
    log_probs = array("d", (sample.logprobs.logprobs[start] for start in sample.logprobs.start_indices))
    assert len(tokens) == len(log_probs), f"{len(tokens)} tokens with {len(log_probs)} log-probs"
    return Completion(*key, tokens, log_probs, sample.finish_reason)


def check_replica_agrees(completions: Sequence[Completion], group: dist.ProcessGroup) -> None:
    """Raise where the ranks of a replica sampled different tokens: their vLLM schedulers have come apart.

    Compares one hash over the replica's (gloo) group; the tokens themselves do not travel. Collective.
    """
    digest = hashlib.blake2b(digest_size=16)
    for completion in completions:
        digest.update(len(completion.token_ids).to_bytes(8, "little"))  # [1], [2, 3] is not [1, 2], [3]
        digest.update(completion.token_ids.tobytes())
    hashes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hashes, digest.hexdigest(), group=group)
    different = [dist.get_global_rank(group, i) for i, value in enumerate(hashes) if value != hashes[0]]
    if different:
        first = dist.get_global_rank(group, 0)
        raise RuntimeError(f"rollout: ranks {different} sampled other tokens than rank {first} of the same replica")
