"""vLLM on the CPU: weights that can be written (nothing packed), and shared memory that outlives no run."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def vllm_environment(kv_cache_gib: int) -> dict[str, str]:
    """What vLLM's CPU build reads from the environment at import."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM would pin its threads to cores that the trainer's ranks share; torchrun's OMP_NUM_THREADS rules instead.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }


def install_plain_linears() -> None:
    """Replace vLLM's choice of CPU matrix kernels, which packs weights (oneDNN, AMX, zentorch), by F.linear.

    The packed kernels keep a copy of the weight as it was at load: a later write would not be seen.
    """
    from vllm.model_executor.layers import utils

    # vLLM's layers import it when they are built, so its module is the one place. A vLLM that renamed it stops here.
    assert callable(utils.dispatch_cpu_unquantized_gemm)
    utils.dispatch_cpu_unquantized_gemm = _plain_linear


def _plain_linear(layer: nn.Module, remove_weight: bool) -> None:
    del remove_weight  # the live weight is the one that computes
    layer.cpu_linear = torch.nn.functional.linear


def install_private_shared_memory() -> None:
    """Give the shared memory of vLLM's tensor parallelism a name of this job, and take the name away once all are in.

    Under an external launcher vLLM names it by its ranks alone: two jobs on one machine would meet in it, and a job
    after a killed one would refuse to start. Collective over the default group.
    """
    from vllm.distributed.device_communicators import cpu_communicator

    shared: list[Any] = [secrets.token_hex(8)]
    dist.broadcast_object_list(shared, src=0)
    job = shared[0]
    communicator_class = cpu_communicator._CPUSHMDistributed
    plain_init = communicator_class._init_cpu_shm

    def make_group_name(communicator: Any) -> str:
        return f"mrl-{job}-{communicator.unique_name}-{'-'.join(map(str, communicator.ranks))}"

    def init_cpu_shm(self: Any) -> int:
        handle = plain_init(self)
        path = f"/dev/shm/{self.group_name}_{self.communicator.rank_in_group}"
        if os.path.exists(path):
            os.unlink(path)
        return handle

    communicator_class.make_group_name = staticmethod(make_group_name)
    communicator_class._init_cpu_shm = init_cpu_shm
