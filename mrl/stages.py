"""The stages' work: one method a stage, on the fields that the stage declares (see mrl.algorithms).

Shapes: B samples (prompts x n) in (prompt, sample) order, R response positions. Every rank holds every sample of the
step on its host, so advantages and statistics are local, exact and the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms import Work
from mrl.bridge.sync import WeightBridge
from mrl.config.schema import RunConfig
from mrl.data.prompts import EncodedPrompt
from mrl.data.tokenizer import decode_response
from mrl.dataflow import Context
from mrl.learner import Learner, Sequences
from mrl.metrics.reduce import MetricSet
from mrl.platform import Platform
from mrl.rewards.protocol import RewardSample
from mrl.rewards.scorer import RewardScorer
from mrl.rl.advantages import ADVANTAGES, AdvantageInputs
from mrl.rl.correction import mismatch_metrics, token_importance_weights
from mrl.rl.kl import KlController, kl_in_reward, reference_kl, score_at_last_token
from mrl.rl.masking import explained_variance
from mrl.rl.metrics import TokenMetrics
from mrl.rl.truncation import apply_truncation
from mrl.rollout.engine import Completion, RolloutEngine, check_replica_agrees
from mrl.rollout.share import RolloutBatch, replica_slice, share_rollouts, share_rows


@dataclass(frozen=True)
class Rollouts:
    """A step's samples. prompts: one a sample (B), as encoded."""

    prompts: list[EncodedPrompt]
    group: Tensor
    batch: RolloutBatch
    sequences: Sequences


@dataclass(frozen=True)
class Scores:
    """scores [B] fp32, NaN where dropped; dropped [B] bool; components: name -> [B], NaN where a sample lacks it."""

    scores: Tensor
    dropped: Tensor
    components: dict[str, Tensor]


@dataclass(frozen=True)
class TrainingBatch:
    """What the updates learn from. mask [B, R] bool: tokens in the loss; the others [B, R] fp32, 0 where masked."""

    mask: Tensor
    advantages: Tensor
    returns: Tensor | None
    is_weights: Tensor


class Stages(Work):
    """Binds the parts of a run to the stages of an algorithm. One per rank; every method is collective."""

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        world: int,
        tokenizer: Any,
        learner: Learner,
        rollout: RolloutEngine,
        scorer: RewardScorer | None,
        bridge: WeightBridge,
        platform: Platform,
        kl_controller: KlController,
        rollout_group: dist.ProcessGroup,
        reward_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup,
    ) -> None:
        self.config, self.rank, self.world = config, rank, world
        self._tokenizer, self._learner = tokenizer, learner
        self._rollout, self._scorer, self._bridge, self._kl = rollout, scorer, bridge, kl_controller
        self._platform = platform
        # Rewards are collected beside device stages, so their collectives have a group of their own.
        self._rollout_group, self._reward_group, self._replica_group = rollout_group, reward_group, replica_group
        self._tp = config.rollout.tensor_model_parallel_size
        self.metrics = MetricSet()
        self.step = 0

    def begin_step(self, step: int) -> None:
        """Steps count from 0; the metrics of the step before are gone."""
        self.step = step
        self.metrics = MetricSet()

    # Rollout and rewards

    def rollout(self, context: Context) -> None:
        prompts: list[EncodedPrompt] = context["prompts"]
        n = self.config.rollout.n
        mine = replica_slice(len(prompts), self.world // self._tp, self.rank // self._tp)
        completions = self._rollout.generate(
            [prompts[i].token_ids for i in mine],
            list(mine),
            n=n,
            step=self.step,
            on_finished=lambda completion: self._submit(prompts[completion.prompt_index], completion),
        )
        check_replica_agrees(completions, self._replica_group)
        batch = share_rollouts(completions, num_prompts=len(prompts), n=n, tp=self._tp, group=self._rollout_group)
        per_sample = [prompt for prompt in prompts for _ in range(n)]
        tokens = [torch.tensor(prompt.token_ids) for prompt in per_sample]
        context["rollouts"] = Rollouts(
            per_sample,
            torch.arange(len(prompts)).repeat_interleave(n),
            batch,
            Sequences(tokens, batch.responses, batch.lengths, batch.mask),
        )
        self._record_lengths(tokens, batch)

    def _submit(self, encoded: EncodedPrompt, completion: Completion) -> None:
        """On the replica's TP rank 0: start scoring while the other samples still generate."""
        if self._scorer is None:
            return
        prompt = encoded.prompt
        self._scorer.submit(
            RewardSample(
                completion.prompt_index,
                completion.sample_index,
                prompt.content,
                decode_response(self._tokenizer, completion.token_ids),
                prompt.data_source,
                prompt.ground_truth,
                prompt.extra_info,
                prompt.columns,
            )
        )

    def reward(self, context: Context) -> None:
        rollouts: Rollouts = context["rollouts"]
        prompts: Sequence[EncodedPrompt] = context["prompts"]
        scored = self._scorer.collect() if self._scorer is not None else []
        # A reward may name components; which ones is not known before, so the first speaker of each step tells.
        names = self._component_names(sorted({name for sample in scored for name in sample.components}))
        nan = float("nan")
        local = [[s.score, float(s.dropped), *(s.components.get(name, nan) for name in names)] for s in scored]
        rows = share_rows(
            torch.tensor(local, dtype=torch.float64).view(len(local), 2 + len(names)),
            num_prompts=len(prompts),
            n=self.config.rollout.n,
            tp=self._tp,
            group=self._reward_group,
        )
        assert rows.shape[0] == len(rollouts.prompts)
        components = {name: rows[:, 2 + i].float() for i, name in enumerate(names)}
        context["scores"] = Scores(rows[:, 0].float(), rows[:, 1].bool(), components)

    def _component_names(self, mine: list[str]) -> list[str]:
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, mine, group=self._reward_group)
        return sorted({name for names in gathered for name in names})

    # Forward passes

    def ref_log_prob(self, context: Context) -> None:
        context["ref_log_probs"] = self._learner.ref_log_probs(context["rollouts"].sequences)

    def old_log_prob(self, context: Context) -> None:
        rollouts: Rollouts = context["rollouts"]
        if self.config.algorithm.use_rollout_log_probs:
            context["old_log_probs"] = rollouts.batch.log_probs
            return
        old = self._learner.old_log_probs(rollouts.sequences)
        self._record("mismatch", mismatch_metrics(old, rollouts.batch.log_probs, rollouts.batch.mask))
        context["old_log_probs"] = old

    def values(self, context: Context) -> None:
        context["values"] = self._learner.values(context["rollouts"].sequences)

    # Advantages

    def adv(self, context: Context) -> None:
        algorithm = self.config.algorithm
        rollouts: Rollouts = context["rollouts"]
        scored: Scores = context["scores"]
        old = context["old_log_probs"]
        kept = rollouts.batch.mask & ~scored.dropped[:, None]
        scores, mask = apply_truncation(scored.scores, kept, rollouts.batch.truncated, algorithm.truncated)
        if self.config.needs_ref:
            self._record("actor", reference_kl(old, context["ref_log_probs"], mask))
        if algorithm.use_kl_in_reward:
            rewards, kl_metrics = kl_in_reward(
                scores, old, context["ref_log_probs"], mask, self._kl.coef, algorithm.kl_penalty
            )
            self._record("actor", kl_metrics)
            self._update_kl(kl_metrics, len(scores))
        else:
            rewards = score_at_last_token(scores, mask)
        values = context["values"] if self.config.needs_critic else None
        assert algorithm.adv_estimator is not None
        result = ADVANTAGES[algorithm.adv_estimator](
            AdvantageInputs(
                rewards=rewards,
                mask=mask,
                group=rollouts.group,
                values=values,
                bootstrap=rollouts.batch.truncated if algorithm.bootstrap_truncated else None,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                whiten=algorithm.whiten_advantages,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            )
        )
        context["batch"] = TrainingBatch(mask, result.advantages, result.returns, self._is_weights(rollouts, old, mask))
        self._record_scores(scored, rewards, mask, result.advantages)
        if values is not None and result.returns is not None:
            self._record_values(values, result.returns, mask)

    def _is_weights(self, rollouts: Rollouts, old: Tensor, mask: Tensor) -> Tensor:
        correction = self.config.algorithm.rollout_correction
        if correction.mode == "off" or self.config.algorithm.use_rollout_log_probs:
            return torch.ones_like(old)
        weights, metrics = token_importance_weights(old, rollouts.batch.log_probs, mask, correction.cap)
        self._record("rollout_corr", TokenMetrics(mean={"is_capped": metrics.mean["is_capped"]}))
        return weights

    def _update_kl(self, metrics: TokenMetrics, samples: int) -> None:
        self.metrics.mean("actor/reward_kl_penalty_coeff", self._kl.coef, 1)
        total, count = metrics.mean["reward_kl_penalty"]
        if count > 0:
            self._kl.update(float(total / count), samples)

    # Updates

    def update_critic(self, context: Context) -> None:
        rollouts, batch = context["rollouts"], context["batch"]
        metrics = self._learner.update_critic(
            rollouts.sequences, batch.mask, old_values=context["values"], returns=batch.returns, step=self.step
        )
        self.metrics.put(metrics)
        context["critic_updated"] = self.step

    def update_actor(self, context: Context) -> None:
        rollouts, batch = context["rollouts"], context["batch"]
        metrics = self._learner.update_actor(
            rollouts.sequences,
            batch.mask,
            old_log_probs=context["old_log_probs"],
            advantages=batch.advantages,
            is_weights=batch.is_weights,
            ref_log_probs=context["ref_log_probs"] if self.config.actor.use_kl_loss else None,
            step=self.step,
        )
        self._check_first_ratio(metrics["actor/first_log_ratio_max"])
        self.metrics.put(metrics)
        context["actor_updated"] = self.step

    def _check_first_ratio(self, first: float) -> None:
        """Before the first optimizer step the policy is the old one, so its ratio must be 1."""
        algorithm = self.config.algorithm
        exact = self.config.model.dtype == "float32" and not algorithm.use_rollout_log_probs
        if algorithm.debug and exact:
            assert first <= 1e-6, f"first mini-batch: |log ratio| reaches {first}, expected at most 1e-6"

    def sync(self, context: Context) -> None:
        self.metrics.put(self.sync_weights())
        context["synced"] = self.step

    def sync_weights(self) -> dict[str, float]:
        """Bring vLLM to the actor's weights; the one path for start, resume and every step."""
        stats = self._bridge.sync()
        every = self.config.bridge.verify
        if every and self.step % every == 0:
            self._bridge.verify()
        self._platform.synchronize()
        self._rollout.reset_prefix_cache()
        totals = torch.tensor([stats.bytes_received, stats.lower_bound_bytes, stats.elements_bound])
        largest = totals[0].clone()
        dist.all_reduce(totals, group=self._rollout_group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._rollout_group)
        return {
            "sync/bytes_received": int(totals[0]),
            "sync/bytes_received_max": int(largest),
            "sync/lower_bound_bytes": int(totals[1]),
            "sync/elements_bound": int(totals[2]),
        }

    # Metrics

    def _record(self, prefix: str, metrics: TokenMetrics) -> None:
        for name, (total, count) in metrics.mean.items():
            self.metrics.mean(f"{prefix}/{name}", float(total), float(count))
        for name, value in metrics.max.items():
            self.metrics.max(f"{prefix}/{name}", float(value))
        for name, value in metrics.sum.items():
            self.metrics.sum(f"{prefix}/{name}", float(value))

    def _record_spread(self, name: str, values: Tensor) -> None:
        """name/mean, name/max, name/min of a 1-D tensor; nothing where it is empty."""
        if values.numel():
            self.metrics.mean(f"{name}/mean", float(values.double().sum()), values.numel())
            self.metrics.max(f"{name}/max", float(values.max()))
            self.metrics.min(f"{name}/min", float(values.min()))

    def _record_lengths(self, prompts: Sequence[Tensor], batch: RolloutBatch) -> None:
        self._record_spread("prompt_length", torch.tensor([float(p.numel()) for p in prompts]))
        self._record_spread("response_length", batch.lengths.float())
        self.metrics.mean("response_length/clip_ratio", float(batch.truncated.sum()), batch.truncated.numel())

    def _record_scores(self, scored: Scores, rewards: Tensor, mask: Tensor, advantages: Tensor) -> None:
        counted = mask.any(1)
        self._record_spread("critic/score", scored.scores[~scored.dropped])
        self._record_spread("critic/rewards", torch.where(mask, rewards, 0.0).sum(1)[counted])
        self._record_spread("critic/advantages", advantages[mask])
        self.metrics.sum("reward/dropped", float(scored.dropped.sum()))
        for name, values in scored.components.items():
            self._record_spread(f"reward/{name}", values[~values.isnan()])

    def _record_values(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        self._record_spread("critic/returns", returns[mask])
        self._record_spread("critic/values", values[mask])
        explained = float(explained_variance(values, returns, mask))
        self.metrics.mean("critic/vf_explained_var", explained, 1)
