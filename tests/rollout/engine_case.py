"""Run by a gang: vLLM with weights of its own reading, sampling alone; no trainer takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import RolloutSection
from mrl.platform import select_platform
from mrl.rollout.engine import Completion, RolloutEngine, check_replica_agrees
from mrl.rollout.share import RolloutBatch, replica_slice, share_rollouts

# The first and the last prompt are equal, and belong to different replicas where there are two.
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 6, 7]]
SAMPLES = 4
MAX_PROMPT, MAX_RESPONSE = 200, 16
TEMPERATURE = 0.7
EOS = list(range(2, 151, 15))
STOP = ["w7 ", "w11 ", "w13 ", "w140 "]
FIXED = list(range(3, 27))
LONG_PROMPT = [(7 * i) % 151 for i in range(MAX_PROMPT)]
"""Longer than a block of the prefix cache (128 tokens on the CPU)."""


def start(path: str, tp: int, max_response: int = MAX_RESPONSE, **section: Any) -> RolloutEngine:
    defaults: dict[str, Any] = {"dtype": "float32", "temperature": TEMPERATURE}
    return RolloutEngine(
        path,
        RolloutSection(tensor_model_parallel_size=tp, **(defaults | section)),
        select_platform("cpu"),
        max_prompt_length=MAX_PROMPT,
        max_response_length=max_response,
        eos_token_ids=EOS,
        seed=11,
        load_format="auto",
        loader_config={},
        before_build=lambda: None,
    )


def sample(engine: RolloutEngine, prompts: list[list[int]], n: int = SAMPLES, step: int = 1) -> list[Completion]:
    return engine.generate(prompts, range(len(prompts)), n=n, step=step, on_finished=lambda completion: None)


def sample_rounds(engine: RolloutEngine, tp: int, prompts: list[list[int]], n: int) -> dict[str, Any]:
    """Two rounds of step 1 and one of step 2 on this replica's prompts, shared over the world.

    running: vLLM's own count of unfinished requests, each time a sample came out.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
    mine = replica_slice(len(prompts), world // tp, rank // tp)
    group = dist.group.WORLD
    assert group is not None
    batches: list[RolloutBatch] = []
    running: list[int] = []
    for step in (1, 1, 2):
        streamed: list[Completion] = []

        def on_finished(completion: Completion, streamed: list[Completion] = streamed) -> None:
            streamed.append(completion)
            running.append(engine._engine.get_num_unfinished_requests())

        done = engine.generate([prompts[i] for i in mine], mine, n=n, step=step, on_finished=on_finished)
        assert sorted(streamed, key=lambda c: (c.prompt_index, c.sample_index)) == done
        check_replica_agrees(done, groups[rank // tp])
        batches.append(share_rollouts(done, num_prompts=len(prompts), n=n, tp=tp, group=group))
    return {"rollouts": batches, "running": running}


def replicas_then_edit(path: str) -> dict[str, Any]:
    """Two replicas of one rank sample; then each edits its weights in place and says what it computes."""
    engine = start(path, 1)
    result = sample_rounds(engine, 1, PROMPTS, SAMPLES)
    result["prompt_log_probs"] = engine.prompt_log_probs(FIXED)
    result["long"] = sample(engine, [LONG_PROMPT], n=1)[0]
    edit_weights(dict(engine.model.named_parameters()))
    result["edited_prompt_log_probs"] = engine.prompt_log_probs(FIXED)
    result["long_stale"] = sample(engine, [LONG_PROMPT], n=1)[0]
    engine.reset_prefix_cache()
    result["long_edited"] = sample(engine, [LONG_PROMPT], n=1)[0]
    result["reset_while_running"] = reset_while_running(engine)
    return result


def one_replica_of_two(path: str) -> dict[str, Any]:
    engine = start(path, 2)
    result = sample_rounds(engine, 2, PROMPTS, SAMPLES)
    result["shared_memory"] = sorted(p.name for p in Path("/dev/shm").glob("mrl-*"))
    return result


def other_settings(path: str) -> list[Completion]:
    """Rank 0 ignores the end-of-sequence tokens and draws many short samples; rank 1 has stop strings."""
    if dist.get_rank() == 0:
        engine = start(path, 1, max_response=2, ignore_eos=True, temperature=1.0)
        return sample(engine, [PROMPTS[0]], n=512)
    engine = start(path, 1, stop=STOP)
    return sample(engine, PROMPTS, n=8)


@torch.no_grad()
def edit_weights(parameters: dict[str, Tensor]) -> None:
    """Edit one matrix of each kind in place: halve lm_head, double a layer's o_proj, shift its gate and up rows."""
    parameters["lm_head.weight"].mul_(0.5)
    parameters["model.layers.1.self_attn.o_proj.weight"].mul_(2.0)
    if "model.layers.2.mlp.gate_up_proj.weight" in parameters:  # vLLM's fused form, else transformers'
        parameters["model.layers.2.mlp.gate_up_proj.weight"].add_(0.05)
    else:
        parameters["model.layers.2.mlp.gate_proj.weight"].add_(0.05)
        parameters["model.layers.2.mlp.up_proj.weight"].add_(0.05)


def reset_while_running(engine: RolloutEngine) -> str:
    """The error of a reset asked for while a sample is being generated."""
    errors: list[str] = []

    def on_finished(completion: Completion) -> None:
        if engine._engine.get_num_unfinished_requests():
            try:
                engine.reset_prefix_cache()
            except RuntimeError as error:
                errors.append(str(error))

    engine.generate(PROMPTS, range(len(PROMPTS)), n=SAMPLES, step=3, on_finished=on_finished)
    return errors[0] if errors else "no error"
