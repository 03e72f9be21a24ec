"""The two heads, run in the loss: vocabulary-parallel log-probabilities and scalar values.

Shapes: N positions, H hidden, V this TP rank's rows of the (padded) vocabulary, C positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 26
"""Logits materialised at once, in elements of fp32 (256 MiB)."""


class ValueHead(nn.Module):
    """v = h . w in fp32, one scalar a token; zero at the start, so that the first advantages are the returns.

    Replicated over TP. Under sequence parallelism each rank sees only its tokens; the mark makes Megatron-Core sum
    the gradient over TP.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...] fp32."""
        return (hidden.float() @ self.weight.float().t()).squeeze(-1)


class VocabParallelLogProbs(torch.autograd.Function):
    """log p(target) and entropy of softmax(h W^T / temperature), with W's rows spread over the TP group.

    Logits are formed a chunk of positions at a time, in the forward and again in the backward pass, so that no
    [N, V] tensor ever exists. They are rounded to the model's dtype as vLLM's are, then treated in fp32. Rows at and
    beyond `valid_rows` are padding: outside the softmax, with a gradient of exactly 0.

    The gradient of `hidden` is this rank's part; the caller's gather or copy region sums it over TP.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        first_row: int,
        valid_rows: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_NH.shape[0]
        log_probs_N, entropy_N, lse_N = hidden_NH.new_empty((3, count), dtype=torch.float32).unbind(0)
        weight = weight_VH[:valid_rows]
        for rows in _chunks(count, valid_rows):
            logits_CV = torch.nn.functional.linear(hidden_NH[rows], weight).float().div_(temperature)
            peak_C = logits_CV.new_full((logits_CV.shape[0],), -torch.inf)
            if valid_rows:
                peak_C = logits_CV.amax(-1)
            dist.all_reduce(peak_C, dist.ReduceOp.MAX, group=group)
            target_C, owned_C = _local_targets(targets_N[rows], first_row, valid_rows)
            logits_CV -= peak_C.unsqueeze(-1)
            exp_CV = logits_CV.exp()
            chosen_C = torch.zeros_like(peak_C)
            if valid_rows:
                chosen_C = torch.where(owned_C, logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1), 0.0)
            sums_3C = torch.stack([exp_CV.sum(-1), (exp_CV * logits_CV).sum(-1), chosen_C])
            dist.all_reduce(sums_3C, group=group)
            total_C, weighted_C, chosen_C = sums_3C.unbind(0)
            log_total_C = total_C.log()
            log_probs_N[rows] = chosen_C - log_total_C
            entropy_N[rows] = log_total_C - weighted_C / total_C
            lse_N[rows] = peak_C + log_total_C
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse_N, entropy_N)
        ctx.first_row, ctx.valid_rows, ctx.temperature = first_row, valid_rows, temperature
        return log_probs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_log_probs_N, grad_entropy_N = grad_outputs
        hidden_NH, weight_VH, targets_N, lse_N, entropy_N = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_NH)
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        weight = weight_VH[: ctx.valid_rows]
        for rows in _chunks(hidden_NH.shape[0], ctx.valid_rows):
            hidden_CH = hidden_NH[rows]
            logits_CV = torch.nn.functional.linear(hidden_CH, weight).float().div_(ctx.temperature)
            log_p_CV = logits_CV.sub_(lse_N[rows].unsqueeze(-1))
            p_CV = log_p_CV.exp()
            # d log p_t / d z = onehot(t) - p;   d entropy / d z = -p (log p + entropy)
            scale_CV = grad_log_probs_N[rows].unsqueeze(-1) + grad_entropy_N[rows].unsqueeze(-1) * (
                log_p_CV + entropy_N[rows].unsqueeze(-1)
            )
            grad_CV = p_CV.mul_(scale_CV).neg_()
            target_C, owned_C = _local_targets(targets_N[rows], ctx.first_row, ctx.valid_rows)
            if ctx.valid_rows:
                one_hot_C1 = torch.where(owned_C, grad_log_probs_N[rows], 0.0).unsqueeze(1)
                grad_CV.scatter_add_(1, target_C.unsqueeze(1), one_hot_C1)
            grad_CV = grad_CV.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[rows] = grad_CV @ weight
            grad_weight[: ctx.valid_rows] += (grad_CV.t() @ hidden_CH).float()
        return grad_hidden, grad_weight.to(weight_VH.dtype), None, None, None, None, None


def _chunks(count: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _local_targets(targets: Tensor, first_row: int, valid_rows: int) -> tuple[Tensor, Tensor]:
    """Row of each target on this rank (0 where another rank owns it) and whether this rank owns it."""
    local = targets - first_row
    owned = (local >= 0) & (local < valid_rows)
    return torch.where(owned, local, 0), owned
