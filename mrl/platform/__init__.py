"""The one place that knows on which device mrl runs.

`select_platform` is called once per process, before Megatron-Core or vLLM is imported; the Platform is then passed to
whoever needs it. Nothing else in mrl asks whether a GPU is present.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Platform(Protocol):
    """What the rest of mrl may know about the device."""

    name: str
    """`cpu` or `cuda`."""
    distributed_backend: str
    """Backend of the default process group: `gloo` or `nccl`."""
    rollout_eager: bool
    """True where vLLM cannot capture CUDA graphs."""
    transformer_engine: bool
    """True where Transformer Engine's layers are used; False takes Megatron-Core's local layer spec."""

    @property
    def device(self) -> torch.device: ...

    def set_device(self, local_rank: int) -> None:
        """Bind this process to its device."""

    def megatron(self) -> AbstractContextManager[None]:
        """Context in which Megatron-Core is built and run."""

    def vllm_environment(self, kv_cache_gib: int) -> dict[str, str]:
        """Environment variables that vLLM reads at import."""

    def prepare_vllm(self) -> None:
        """Make vLLM's layers safe to write weights into; called after its import, before its model is built."""

    def synchronize(self) -> None:
        """Wait for the device, so that what was timed has happened."""

    def peak_memory_gib(self) -> float | None:
        """Peak device memory since start, in GiB; None where there is no device memory of its own."""


def select_platform(choice: str) -> Platform:
    """`auto` takes CUDA where torch sees a device; `cpu` and `cuda` insist.

    Raises ValueError where `cuda` is asked for and torch sees none.
    """
    from mrl.platform.cpu import CpuPlatform
    from mrl.platform.cuda import CudaPlatform

    if choice not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.platform: {choice!r} is not one of auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if choice == "cuda" and not has_cuda:
        raise ValueError("trainer.platform=cuda: torch sees no CUDA device; use trainer.platform=cpu or auto")
    if choice == "cpu" or not has_cuda:
        return CpuPlatform()
    return CudaPlatform()
