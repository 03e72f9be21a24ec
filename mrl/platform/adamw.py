"""AdamW for Megatron-Core's distributed optimizer on the CPU.

Megatron-Core's checkpoints and its distributed optimizer expect the fused Adam of Transformer Engine: the step counted
in the parameter group, `exp_avg` and `exp_avg_sq` in the state, state made lazily. torch's AdamW keeps its step per
parameter and cannot be loaded back, so the CPU platform brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) and bias correction, fp32 state."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "mrl always decouples the weight decay"
        assert not capturable, "there are no CUDA graphs on the CPU"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            exp_avgs = [self.state[p]["exp_avg"] for p in params]
            exp_avg_sqs = [self.state[p]["exp_avg_sq"] for p in params]
            beta1, beta2 = group["betas"]
            lr, step = group["lr"], group["step"]
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
            denominators = torch._foreach_sqrt(exp_avg_sqs)
            torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr / (1 - beta1**step))
