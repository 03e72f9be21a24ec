"""The learner: actor, critic and reference engines, and how a rollout batch passes through them.

Shapes: B samples (prompts x n) and R response positions of the whole rollout batch, which every rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import RunConfig
from mrl.data.batching import build_micro_batches
from mrl.data.micro_batch import MicroBatch
from mrl.engine.engine import Loss, MegatronEngine
from mrl.objectives import actor_loss, critic_loss
from mrl.parallel import ParallelLayout
from mrl.rl.aggregation import token_weights
from mrl.rl.metrics import TokenMetrics, merge_metrics
from mrl.seeding import derived_seed


@dataclass(frozen=True)
class Sequences:
    """A rollout batch's tokens. prompts: B token tensors; responses [B, R] int64; lengths [B]; mask [B, R] bool."""

    prompts: Sequence[Tensor]
    responses: Tensor
    lengths: Tensor
    mask: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.responses.shape[0], self.responses.shape[1]


class Learner:
    """Forward passes and updates. All methods are collective over the training ranks."""

    def __init__(
        self,
        config: RunConfig,
        layout: ParallelLayout,
        rank: int,
        actor: MegatronEngine,
        critic: MegatronEngine | None,
        ref: MegatronEngine | None,
        host_group: dist.ProcessGroup,
    ) -> None:
        self.config, self.layout, self.rank = config, layout, rank
        self.actor, self.critic, self.ref = actor, critic, ref
        self._host_group = host_group
        self._speaker = layout.rank_of(dp=0, pp=layout.pp - 1, tp=0)

    # Forward passes

    def old_log_probs(self, sequences: Sequences, temperature: float | None = None) -> Tensor:
        """Log-probs of the response tokens under the actor, [B, R] fp32; at the rollout's temperature where None."""
        budget = self.config.actor.ppo_max_token_len_per_gpu
        return self._score(self.actor, sequences, budget, temperature)

    def ref_log_probs(self, sequences: Sequences) -> Tensor:
        assert self.ref is not None
        return self._score(self.ref, sequences, _set(self.config.ref.ppo_max_token_len_per_gpu))

    def values(self, sequences: Sequences) -> Tensor:
        """The critic's value of the state before each response token, [B, R] fp32."""
        assert self.critic is not None
        return self._score(self.critic, sequences, _set(self.config.critic.ppo_max_token_len_per_gpu))

    def _score(
        self, engine: MegatronEngine, sequences: Sequences, max_tokens: int, temperature: float | None = None
    ) -> Tensor:
        everyone = range(sequences.shape[0])
        micro_batches = self._micro_batches(sequences, everyone, sequences.mask, max_tokens)
        return engine.score(micro_batches, sequences.shape, temperature)

    def _micro_batches(
        self, sequences: Sequences, samples: Sequence[int], mask: Tensor, max_tokens: int
    ) -> list[MicroBatch]:
        return build_micro_batches(
            sequences.prompts,
            sequences.responses,
            sequences.lengths,
            mask,
            samples,
            dp_size=self.layout.dp,
            dp_rank=self.layout.coordinates(self.rank).dp,
            max_tokens=max_tokens,
            pad_multiple=self.layout.tp if self.layout.sequence_parallel else 1,
        )

    # Updates

    def update_actor(
        self,
        sequences: Sequences,
        mask: Tensor,
        *,
        old_log_probs: Tensor,
        advantages: Tensor,
        is_weights: Tensor,
        ref_log_probs: Tensor | None,
        step: int,
    ) -> dict[str, float]:
        """All epochs and mini-batches of one rollout batch; returns metrics named as in metrics.jsonl."""
        section = self.config.actor
        fields = {"old_log_probs": old_log_probs, "advantages": advantages, "is_weights": is_weights}
        if section.use_kl_loss:
            assert ref_log_probs is not None
            fields["ref_log_probs"] = ref_log_probs
        update = _Update(self.actor, "actor", actor_loss(section), section.ppo_mini_batch_size, section.ppo_epochs)
        metrics: dict[str, float] = {}
        totals = TokenMetrics()
        for epoch, samples in self._mini_batches(update, sequences, step):
            reduced = self._optimizer_step(update, sequences, samples, mask, fields, section.ppo_max_token_len_per_gpu)
            if "actor/first_log_ratio_max" not in metrics:
                metrics["actor/first_log_ratio_max"] = float(reduced.max["log_ratio_abs_max"])
            totals = merge_metrics(totals, reduced)
            kl_sum, count = reduced.mean["ppo_kl"]
            if section.target_kl is not None and float(kl_sum) > section.target_kl * float(count):
                metrics["actor/stopped_at_epoch"] = epoch
                break
        return metrics | self._summarise(update, totals)

    def update_critic(
        self, sequences: Sequences, mask: Tensor, *, old_values: Tensor, returns: Tensor, step: int
    ) -> dict[str, float]:
        assert self.critic is not None
        section = self.config.critic
        update = _Update(
            self.critic, "critic", critic_loss(section), _set(section.ppo_mini_batch_size), _set(section.ppo_epochs)
        )
        fields = {"old_values": old_values, "returns": returns}
        totals = TokenMetrics()
        for _, samples in self._mini_batches(update, sequences, step):
            max_tokens = _set(section.ppo_max_token_len_per_gpu)
            totals = merge_metrics(totals, self._optimizer_step(update, sequences, samples, mask, fields, max_tokens))
        return self._summarise(update, totals)

    def _mini_batches(self, update: _Update, sequences: Sequences, step: int) -> Iterator[tuple[int, list[int]]]:
        """(epoch, samples): whole prompts with all their samples, permuted by (seed, step, epoch)."""
        n = self.config.rollout.n
        prompts = sequences.shape[0] // n
        for epoch in range(update.epochs):
            generator = torch.Generator().manual_seed(derived_seed(self.config.trainer.seed, "mini-batch", step, epoch))
            order = torch.randperm(prompts, generator=generator).tolist()
            for start in range(0, prompts, update.mini_batch_size):
                chosen = sorted(order[start : start + update.mini_batch_size])
                yield epoch, [prompt * n + sample for prompt in chosen for sample in range(n)]

    def _optimizer_step(
        self,
        update: _Update,
        sequences: Sequences,
        samples: list[int],
        mask: Tensor,
        fields: dict[str, Tensor],
        max_tokens: int,
    ) -> TokenMetrics:
        weights = torch.zeros(sequences.shape)
        weights[samples] = token_weights(
            mask[samples], self.config.actor.loss_agg_mode, self.config.data.max_response_length
        )
        micro_batches = [
            micro.with_fields(weights=weights, **fields)
            for micro in self._micro_batches(sequences, samples, mask, max_tokens)
        ]
        outcome, results = update.engine.train_step(micro_batches, update.loss)
        update.grad_norms.append(outcome.grad_norm)
        update.skipped += not outcome.applied
        update.lr = outcome.lr
        return self._reduce(merge_metrics(*results))

    def _reduce(self, local: TokenMetrics) -> TokenMetrics:
        """Sum (or maximum) over the ranks that speak; the others learn the names from one of them."""
        names: list[Any] = [(sorted(local.mean), sorted(local.max), sorted(local.sum))]
        dist.broadcast_object_list(names, src=self._speaker, group=self._host_group)
        means, maxima, sums = names[0]
        zero = torch.zeros((), dtype=torch.float64)
        added = torch.stack(
            [part.double().cpu() for name in means for part in local.mean.get(name, (zero, zero))]
            + [local.sum.get(name, zero).double().cpu() for name in sums]
            + [zero]
        )
        dist.all_reduce(added, group=self._host_group)
        largest = torch.stack([local.max.get(name, zero - torch.inf).double().cpu() for name in maxima] + [zero])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host_group)
        return TokenMetrics(
            mean={name: (added[2 * i], added[2 * i + 1]) for i, name in enumerate(means)},
            sum={name: added[2 * len(means) + i] for i, name in enumerate(sums)},
            max={name: largest[i] for i, name in enumerate(maxima)},
        )

    def _summarise(self, update: _Update, totals: TokenMetrics) -> dict[str, float]:
        role = update.role
        metrics = {f"{role}/{name}": float(total / count) for name, (total, count) in totals.mean.items() if count > 0}
        metrics |= {f"{role}/{name}": float(value) for name, value in (totals.max | totals.sum).items()}
        finite = [norm for norm in update.grad_norms if norm < float("inf")]
        metrics[f"{role}/grad_norm"] = sum(finite) / len(finite) if finite else float("nan")
        metrics[f"{role}/lr"] = update.lr
        metrics[f"{role}/skipped_steps"] = float(update.skipped)
        return metrics


@dataclass
class _Update:
    """One role's pass over a rollout batch, and what it gathers on the way."""

    engine: MegatronEngine
    role: str
    loss: Loss
    mini_batch_size: int
    epochs: int

    def __post_init__(self) -> None:
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.lr = 0.0


def _set(value: int | None) -> int:
    """A key that RunConfig has filled in where the user left it null."""
    assert value is not None
    return value
