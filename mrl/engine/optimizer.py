"""The distributed optimizer: built from Megatron-Core's, stepped only on finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mrl.config.schema import OptimSection


@dataclass(frozen=True)
class OptimizerStep:
    """Outcome of one step, equal on all ranks of the model: gradient norm before clipping, whether it was applied."""

    grad_norm: float
    applied: bool
    lr: float


def learning_rate(section: OptimSection, step: int, total_steps: int) -> float:
    """LR of optimizer step `step` (from 0): linear warm-up that ends on lr, then constant, linear or cosine.

    The decay runs from the end of the warm-up to `total_steps` and ends on lr * min_lr_ratio.
    """
    if step < section.lr_warmup_steps:
        return section.lr * (step + 1) / section.lr_warmup_steps
    if section.lr_scheduler_type == "constant":
        return section.lr
    done = (step - section.lr_warmup_steps) / max(1, total_steps - section.lr_warmup_steps)
    done = min(1.0, done)
    left = 1.0 - done if section.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return section.lr * (section.min_lr_ratio + (1.0 - section.min_lr_ratio) * left)


class GuardedOptimizer:
    """Megatron-Core's distributed Adam. A non-finite gradient anywhere skips the step on all ranks together.

    The gradient norm is reduced over the whole model, so every rank takes the same decision from it.
    """

    def __init__(self, chunks: list[torch.nn.Module], section: OptimSection, dtype: torch.dtype, total_steps: int):
        self._section = section
        self._total_steps = total_steps
        self.steps = 0
        config = OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        self.megatron: Any = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        for group in self.megatron.param_groups:
            # Norms and biases carry wd_mult 0; only Megatron-Core's own scheduler would apply it.
            group["weight_decay"] = section.weight_decay * group["wd_mult"]

    def zero_grad(self) -> None:
        self.megatron.zero_grad()

    def step(self) -> OptimizerStep:
        lr = learning_rate(self._section, self.steps, self._total_steps)
        for group in self.megatron.param_groups:
            group["lr"] = lr
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            return OptimizerStep(norm, applied=False, lr=lr)
        if self._section.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self.megatron.get_parameters(), self._section.clip_grad, norm)
        self.megatron.step_with_ready_grads()
        self.steps += 1
        return OptimizerStep(norm, applied=True, lr=lr)
