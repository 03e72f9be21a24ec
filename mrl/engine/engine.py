"""MegatronEngine: actor, critic and reference are the same class with another head and another loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from converters.load import load_parameters
from converters.rules.facts import ModelFacts
from converters.rules.megatron import Head, megatron_layout
from converters.rules.segment import Segment
from mrl.config.schema import OptimSection
from mrl.data.micro_batch import MicroBatch
from mrl.engine.optimizer import GuardedOptimizer, OptimizerStep
from mrl.models.builder import TrunkModel, build_model
from mrl.models.heads import VocabParallelLogProbs
from mrl.models.rope import Rope
from mrl.parallel import ParallelLayout
from mrl.platform import Platform


@dataclass(frozen=True)
class HeadOutput:
    """fp32 results at a micro-batch's N scored positions; the vocabulary head fills two, the value head one."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


Loss = Callable[[HeadOutput, MicroBatch], tuple[Tensor, Any]]
"""(outputs, micro-batch) -> (sum of the loss over its positions, metrics to hand back)."""


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine that is not the model's architecture."""

    head: Head
    dtype: torch.dtype
    temperature: float = 1.0
    """Divides the logits of the vocabulary head, so that log-probs are those of the sampled distribution."""
    recompute: str = "none"
    overlap_grad_reduce: bool = False
    optim: OptimSection | None = None
    """None: forward only, without gradient buffers and optimizer state."""
    total_steps: int = 1
    """Optimizer steps of the whole run, for the learning-rate schedule."""


class MegatronEngine:
    """One role's shard on this rank.

    All methods are collective: every rank of the layout calls them in the same order, with the same number of
    micro-batches on every data-parallel rank.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layout: ParallelLayout,
        rank: int,
        rope: Rope,
        options: EngineOptions,
        platform: Platform,
    ) -> None:
        self.facts, self.layout, self.rank, self.options, self.platform = facts, layout, rank, options, platform
        with platform.megatron():
            self._model = build_model(
                facts,
                layout,
                rank,
                rope,
                head=options.head,
                dtype=options.dtype,
                recompute=options.recompute,
                transformer_engine=platform.transformer_engine,
            )
            self._chunk: torch.nn.Module = self._model
            self.optimizer: GuardedOptimizer | None = None
            if options.optim is None:
                self._model.requires_grad_(False)
            else:
                self._wrap_for_training(options.optim)
        self._forward_backward = get_forward_backward_func()

    def _wrap_for_training(self, optim: OptimSection) -> None:
        config = self._model.config
        self._chunk = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=self.options.overlap_grad_reduce,
                average_in_collective=False,
            ),
            self._model,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self._chunk.no_sync
        config.grad_scale_func = None
        if self.options.overlap_grad_reduce:
            config.grad_sync_func = self._chunk.start_grad_sync
        self.optimizer = GuardedOptimizer([self._chunk], optim, self.options.dtype, self.options.total_steps)

    # Weights

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by their name in the GPTModel; the live storage, not copies."""
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def layout_of(self, rank: int) -> dict[str, tuple[Segment, ...]]:
        """Which HF boxes any rank's parameters hold: a closed form, no communication."""
        shard = self.layout.shard(self.facts, rank, self.options.head, self.platform.transformer_engine)
        return megatron_layout(self.facts, shard)

    def load_hf(self, path: str | Path) -> None:
        """Fill the weights from a HF directory; raises ValueError where it does not fit."""
        own_init = frozenset({"output_layer.weight"} if self.options.head == "value" else ())
        load_parameters(path, self.facts, self.layout_of(self.rank), self.parameters(), own_init)
        self._master_weights_from_model()

    def _master_weights_from_model(self) -> None:
        if self.optimizer is not None:
            with self.platform.megatron():
                self.optimizer.megatron.reload_model_params()

    # Running

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[MicroBatch], shape: tuple[int, int], temperature: float | None = None
    ) -> Tensor:
        """Forward only: log-probs or, with a value head, values [B, R] fp32 on every rank's CPU, 0 where not scored.

        temperature: the engine's own where None.
        """
        results = self._run(micro_batches, _collect, forward_only=True, temperature=temperature)
        flat = torch.zeros(shape[0] * shape[1], device=self.platform.device)
        if self._speaks():
            for output, micro in zip(results, micro_batches, strict=True):
                flat[micro.slots.to(flat.device)] = output
        dist.all_reduce(flat)  # each slot is written by one rank of the world: the sum is exact
        return flat.view(shape).cpu()

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> tuple[OptimizerStep, list[Any]]:
        """One optimizer step over the micro-batches; the gradient is divided once, by the global count of positions.

        Returns the step's outcome and the losses' metrics, one a micro-batch (empty on ranks that do not speak).
        """
        assert self.optimizer is not None, "a forward-only engine cannot be trained"
        results: list[Any] = []
        self.accumulate_gradients(micro_batches, loss, results)
        with self.platform.megatron():
            outcome = self.optimizer.step()
        return outcome, results if self._speaks() else []

    def accumulate_gradients(self, micro_batches: Sequence[MicroBatch], loss: Loss, results: list[Any]) -> None:
        """Zero the gradients, run forward and backward, reduce; leaves the mean gradient in the DDP buffers."""
        assert self.optimizer is not None
        with self.platform.megatron():
            self._chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        results += self._run(micro_batches, partial(_train, loss), forward_only=False)

    def _speaks(self) -> bool:
        """True on the one tensor-parallel rank of the last stage that reports a data-parallel shard's results."""
        at = self.layout.coordinates(self.rank)
        return at.pp == self.layout.pp - 1 and at.tp == 0

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[..., Any],
        forward_only: bool,
        temperature: float | None = None,
    ) -> list[Any]:
        temperature = self.options.temperature if temperature is None else temperature
        with self.platform.megatron():
            self._chunk.train(not forward_only)
            return self._forward_backward(
                forward_step_func=partial(self._forward_step, finish, temperature),
                data_iterator=iter(micro_batches),
                model=[self._chunk],
                num_microbatches=len(micro_batches),
                seq_length=max(m.tokens.numel() for m in micro_batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _forward_step(
        self, finish: Callable[..., Any], temperature: float, data: Any, chunk: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        micro: MicroBatch = next(data).to(self.platform.device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=micro.cu_seqlens,
            cu_seqlens_kv=micro.cu_seqlens,
            max_seqlen_q=micro.max_seqlen,
            max_seqlen_kv=micro.max_seqlen,
        )
        hidden = chunk(
            input_ids=micro.tokens.unsqueeze(0),
            position_ids=micro.positions.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=packed,
        )

        def after_last_stage(hidden_T1H: Tensor, **kwargs: Any) -> Any:
            return finish(self._head(hidden_T1H, micro, temperature), micro)

        return hidden, after_last_stage

    def _head(self, hidden_T1H: Tensor, micro: MicroBatch, temperature: float) -> HeadOutput:
        sharded = self.layout.sequence_parallel
        if self.options.head == "value":
            values = self._model.output_layer(hidden_T1H.squeeze(1))
            if sharded:
                values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
            return HeadOutput(values=values[micro.states])
        # Each TP rank's vocabulary rows give a part of the hidden states' gradient: summed on the way back.
        if sharded:
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=True)
        else:
            hidden_T1H = copy_to_tensor_model_parallel_region(hidden_T1H)
        first_row, valid_rows = vocabulary_rows(self._model, self.facts, self.layout.coordinates(self.rank).tp)
        log_probs, entropy = VocabParallelLogProbs.apply(
            hidden_T1H.squeeze(1)[micro.states],
            self._model.head_weight(),
            micro.targets,
            first_row,
            valid_rows,
            temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )
        return HeadOutput(log_probs=log_probs, entropy=entropy)


def vocabulary_rows(model: TrunkModel, facts: ModelFacts, tp_rank: int) -> tuple[int, int]:
    """First vocabulary row of this TP rank and how many of its rows are tokens, not padding."""
    per_rank = model.head_weight().shape[0]
    first = tp_rank * per_rank
    return first, max(0, min(per_rank, facts.vocab_size - first))


def _collect(output: HeadOutput, micro: MicroBatch) -> Tensor:
    scores = output.log_probs if output.values is None else output.values
    assert scores is not None
    return scores


def _train(loss: Loss, output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, Tensor, Any]:
    loss_sum, metrics = loss(output, micro)
    count = torch.tensor(micro.count, dtype=torch.int, device=loss_sum.device)
    return loss_sum, count, metrics
