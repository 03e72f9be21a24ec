"""Megatron-Core over gloo on the CPU, unmodified: the one place where its hard-coded CUDA calls are answered.

Megatron-Core allocates with ``device="cuda"``, calls ``.cuda()`` and keeps its random state with ``torch.cuda``'s
generators. `CpuPlatform.megatron()` is a context in which those calls answer for the CPU; it is entered only around
Megatron-Core, never around vLLM, whose host code would pay for every intercepted torch call. Two collectives and
Megatron-Core's own modules are patched once, by `install`, at construction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CpuPlatform:
    name = "cpu"
    distributed_backend = "gloo"
    rollout_eager = True
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

    def vllm_environment(self, kv_cache_gib: int) -> dict[str, str]:
        from mrl.platform.cpu_vllm import vllm_environment

        return vllm_environment(kv_cache_gib)

    def prepare_vllm(self) -> None:
        from mrl.platform.cpu_vllm import install_plain_linears, install_private_shared_memory

        install_plain_linears()
        install_private_shared_memory()
        # vLLM compiles a few small sampling functions even when it runs eagerly: seconds of C++ compilation at every
        # start, for nothing on a CPU.
        torch._dynamo.config.disable = True

    def synchronize(self) -> None:
        """CPU work is synchronous."""

    def peak_memory_gib(self) -> float | None:
        return None


@contextlib.contextmanager
def _megatron_on_cpu() -> Iterator[None]:
    """torch.cuda answers for the CPU, in this context only: torch's own compiler (which vLLM uses) must not see it."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _TORCH_CUDA]
    for owner, name, value in _TORCH_CUDA:
        setattr(owner, name, value)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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


_TORCH_CUDA: list[tuple[Any, str, Any]] = [
    (torch.cuda, "current_device", lambda: CPU),
    (torch.cuda, "set_device", lambda device: None),
    (torch.cuda, "synchronize", lambda device=None: None),
    (torch.cuda, "empty_cache", lambda: None),
    (torch.cuda, "current_stream", lambda device=None: _InertStream()),
    (torch.cuda, "default_stream", lambda device=None: _InertStream()),
    (torch.cuda, "set_stream", lambda stream: None),
    (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    (torch.cuda, "Stream", _InertStream),
    (torch.cuda, "Event", _InertEvent),
    (torch.cuda.nvtx, "range_push", lambda msg: None),
    (torch.cuda.nvtx, "range_pop", lambda: None),
    # Random state: Megatron-Core forks "CUDA" generators per model-parallel rank; here they are the CPU's one.
    *(
        (module, name, function)
        for module in (torch.cuda, torch.cuda.random)
        for name, function in (
            ("get_rng_state", lambda device=None: torch.get_rng_state()),
            ("set_rng_state", lambda state, device=None: torch.set_rng_state(state)),
            ("manual_seed", lambda seed: torch.default_generator.manual_seed(seed)),
        )
    ),
    (torch.cuda, "default_generators", _OneGenerator()),
    (torch.cuda, "_lazy_call", lambda function, **kwargs: function()),
    (torch.cuda, "_lazy_init", lambda: None),
]
"""What stands in for torch.cuda around Megatron-Core: (module, name, stand-in)."""


def install() -> None:
    """Patch Megatron-Core and two collectives once per process; later calls change nothing."""
    import megatron.core.optimizer as mcore_optimizer

    from mrl.platform.adamw import AdamW

    if mcore_optimizer.Adam is not AdamW:
        _patch_collectives()
        _patch_megatron()


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
