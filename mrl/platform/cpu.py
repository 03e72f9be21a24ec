"""Megatron-Core over gloo on the CPU, unmodified: the one place where its hard-coded CUDA calls are answered.

Megatron-Core allocates with ``device="cuda"``, calls ``.cuda()`` and keeps its random state with ``torch.cuda``'s
generators. `CpuPlatform.megatron()` is a context in which those calls answer for the CPU; it is entered only around
Megatron-Core, never around vLLM, whose host code would pay for every intercepted torch call. What can be patched
once without a cost (streams, events, generators, two collectives) is patched by `install`, at construction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CpuPlatform:
    name = "cpu"
    distributed_backend = "gloo"
    rollout_eager = True
    can_sleep = False
    transformer_engine = False

    def __init__(self) -> None:
        install()

    @property
    def device(self) -> torch.device:
        return CPU

    def set_device(self, local_rank: int) -> None:
        """Nothing to bind."""

    def megatron(self) -> contextlib.AbstractContextManager[None]:
        return _megatron_on_cpu()

    def vllm_environment(self, kv_cache_gib: float) -> dict[str, str]:
        from mrl.platform.cpu_vllm import vllm_environment

        return vllm_environment(kv_cache_gib)

    def prepare_vllm(self) -> None:
        from mrl.platform.cpu_vllm import install_plain_linears

        install_plain_linears()

    def synchronize(self) -> None:
        """CPU work is synchronous."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def peak_memory_gib(self) -> float | None:
        return None


@contextlib.contextmanager
def _megatron_on_cpu() -> Iterator[None]:
    with _CudaMeansCpu():
        yield


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Reads `cuda` as `cpu` in factory calls, `.to()`, `.cuda()` and `.type()`; pinned memory is ordinary memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts parameters by these names.
            return func(args[0]).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _InertStream:
    """A CUDA stream where all work is synchronous: nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _InertEvent:
        return _InertEvent()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _InertEvent:
    """A CUDA event that has always happened."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _OneGenerator:
    """`torch.cuda.default_generators`, whatever the index: the CPU's generator."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


def install() -> None:
    """Patch torch.cuda and Megatron-Core once per process; later calls change nothing."""
    if torch.cuda.current_device is _current_device:
        return
    _patch_torch_cuda()
    _patch_collectives()
    _patch_megatron()


def _current_device() -> torch.device:
    return CPU


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _current_device
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = lambda device=None: _InertStream()
    cuda.default_stream = lambda device=None: _InertStream()
    cuda.set_stream = lambda stream: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _InertStream
    cuda.Event = _InertEvent
    cuda.nvtx.range_push = lambda msg: None
    cuda.nvtx.range_pop = lambda: None
    # Random state: Megatron-Core forks "CUDA" generators per model-parallel rank; here they are the CPU's one.
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.default_generators = _OneGenerator()
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda._lazy_init = lambda: None


def _patch_collectives() -> None:
    """gloo refuses what Megatron-Core's MoE dispatchers do with NCCL: tensor split sizes and unequal all_gather."""
    plain_all_to_all = dist.all_to_all_single
    plain_all_gather = dist.all_gather

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return plain_all_to_all(output, input, sizes[0], sizes[1], group=group, async_op=async_op)

    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if len({t.shape for t in tensor_list}) <= 1:
            return plain_all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "an all_gather of unequal shapes over gloo is synchronous"
        for index, target in enumerate(tensor_list):
            source = dist.get_global_rank(group, index) if group is not None else index
            if source == dist.get_rank():
                target.copy_(tensor)
            dist.broadcast(target, src=source, group=group)
        return None

    dist.all_to_all_single = all_to_all_single
    dist.all_gather = all_gather


def _patch_megatron() -> None:
    import megatron.core.optimizer as mcore_optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.transformer.moe.moe_utils as moe_utils

    from mrl.platform.adamw import AdamW

    mcore_optimizer.Adam = AdamW
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.Adam = AdamW
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
    # megatron-core 0.16.1 defines this name only where Transformer Engine imports, and reads it everywhere.
    moe_utils.te_general_gemm = None
