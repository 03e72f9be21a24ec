"""The CUDA platform: Megatron-Core and vLLM run as they are."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


class CudaPlatform:
    name = "cuda"
    distributed_backend = "nccl"
    rollout_eager = False

    def __init__(self) -> None:
        # Read when the CUDA context is made: kernels of one queue start in order, which overlaps TP communication.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        try:
            # Right after torch: a system cuDNN loaded first would lack the symbols that Transformer Engine wants.
            import transformer_engine.pytorch  # noqa: F401
        except ModuleNotFoundError:
            self.transformer_engine = False
        else:
            self.transformer_engine = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def megatron(self) -> AbstractContextManager[None]:
        return nullcontext()

    def vllm_environment(self, kv_cache_gib: int) -> dict[str, str]:
        del kv_cache_gib  # on CUDA rollout.gpu_memory_utilization sizes the cache
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

    def prepare_vllm(self) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30
