"""The algorithms, each a list of stages. What a stage reads and writes is declared; the runner orders them.

Fields: prompts (this step's prompts), rollout_weights (vLLM's parameters hold the actor's current weights), rollouts
(responses and the rollout's log-probs), scores, ref_log_probs, old_log_probs, values, batch (mask, advantages, returns,
importance weights), critic_updated, actor_updated and synced (the step, once that is done).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mrl import dataflow
from mrl.config.schema import RunConfig
from mrl.dataflow import Context, Stage

INPUTS = frozenset({"prompts", "rollout_weights"})
"""Fields that exist before the first stage of a step."""


class Work:
    """What a trainer can do; one method a stage. As it is, it only stands for stages that are looked at, not run."""

    def rollout(self, context: Context) -> None: ...
    def reward(self, context: Context) -> None: ...
    def ref_log_prob(self, context: Context) -> None: ...
    def old_log_prob(self, context: Context) -> None: ...
    def values(self, context: Context) -> None: ...
    def adv(self, context: Context) -> None: ...
    def update_critic(self, context: Context) -> None: ...
    def update_actor(self, context: Context) -> None: ...
    def sync(self, context: Context) -> None: ...


def _stage(
    run: Callable[[Context], None], reads: str, writes: str, device: Literal["device", "host"] = "device"
) -> Stage:
    return Stage(
        name=run.__name__, reads=frozenset(reads.split()), writes=frozenset(writes.split()), run=run, device=device
    )


def _common(config: RunConfig, work: Work) -> list[Stage]:
    """Rollout, scores and the log-probs that every algorithm here needs."""
    stages = [
        _stage(work.rollout, "prompts rollout_weights", "rollouts"),
        _stage(work.reward, "prompts rollouts", "scores", device="host"),
    ]
    if config.needs_ref:
        stages.append(_stage(work.ref_log_prob, "rollouts", "ref_log_probs"))
    stages.append(_stage(work.old_log_prob, "rollouts", "old_log_probs"))
    return stages


def ppo(config: RunConfig, work: Work) -> list[Stage]:
    """PPO (Schulman et al. 2017) with a critic and GAE."""
    ref = "ref_log_probs" if config.needs_ref else ""
    return [
        *_common(config, work),
        _stage(work.values, "rollouts", "values"),
        _stage(work.adv, f"rollouts scores old_log_probs values {ref}", "batch"),
        _stage(work.update_critic, "rollouts batch values", "critic_updated"),
        _stage(work.update_actor, f"rollouts batch old_log_probs {ref}", "actor_updated"),
        _stage(work.sync, "actor_updated", "synced"),
    ]


def grpo(config: RunConfig, work: Work) -> list[Stage]:
    """GRPO (Shao et al. 2024): group-relative advantages, no critic."""
    ref = "ref_log_probs" if config.needs_ref else ""
    return [
        *_common(config, work),
        _stage(work.adv, f"rollouts scores old_log_probs {ref}", "batch"),
        _stage(work.update_actor, f"rollouts batch old_log_probs {ref}", "actor_updated"),
        _stage(work.sync, "actor_updated", "synced"),
    ]


def stages(config: RunConfig, work: Work) -> list[Stage]:
    """The stages of `algorithm.adv_estimator`'s kind: with a critic (gae) or without (grpo)."""
    return ppo(config, work) if config.needs_critic else grpo(config, work)


def graph_lines(config: RunConfig) -> list[str]:
    """The configured algorithm's graph as text, for `mrl check --graph`."""
    return dataflow.graph_lines(dataflow.order(stages(config, Work()), INPUTS), INPUTS)
