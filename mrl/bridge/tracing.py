"""A tensor that remembers which box of a HF tensor it is, so that vLLM's own loader can be watched instead of guessed.

`TracedTensor` wraps a meta tensor. Only operations whose result aliases their input are let through: they keep storage
offset and strides, from which the HF box follows. A `copy_` into real memory is recorded; anything else fails closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from converters.rules.segment import Segment, contiguous_strides


class TraceError(ValueError):
    """vLLM's loader did something to a weight that is not a view and a copy."""


@dataclass(frozen=True)
class Write:
    """One copy into real memory: `target` received the box of `segment_of`'s HF tensor."""

    target: Tensor
    hf_name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    hf_axes: tuple[int, ...]
    """For each axis of `target`, the HF axis that runs along it; -1 for an axis of size 1."""


class TracedTensor(Tensor):
    """A view of HF tensor `hf_name`, without memory. `writes` collects what is copied out of it."""

    hf_name: str
    hf_shape: tuple[int, ...]
    meta: Tensor
    writes: list[Write]

    @staticmethod
    def __new__(cls, meta: Tensor, hf_name: str, hf_shape: tuple[int, ...], writes: list[Write]) -> TracedTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device="cpu"
        )
        wrapper.meta, wrapper.hf_name, wrapper.hf_shape, wrapper.writes = meta, hf_name, hf_shape, writes
        return wrapper

    @classmethod
    def whole(cls, hf_name: str, shape: tuple[int, ...], dtype: torch.dtype, writes: list[Write]) -> TracedTensor:
        return cls(torch.empty(shape, dtype=dtype, device="meta"), hf_name, shape, writes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"TracedTensor({self.hf_name}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], TracedTensor):
            args[1]._record(args[0])
            return args[0]
        traced = next(a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, TracedTensor))
        if not _is_view(func):
            raise TraceError(
                f"{traced.hf_name}: vLLM's loader applies {func.name()} to it; only views and copies can be planned. "
                "This model cannot be synchronised; report its architecture"
            )
        plain = tree_map(lambda a: a.meta if isinstance(a, TracedTensor) else a, (args, kwargs))
        out = func(*plain[0], **plain[1])
        return tree_map(
            lambda t: cls(t, traced.hf_name, traced.hf_shape, traced.writes) if isinstance(t, Tensor) else t, out
        )

    def _record(self, target: Tensor) -> None:
        view = self.meta.expand(target.shape) if self.meta.shape != target.shape else self.meta
        if view.shape != self.meta.shape and view.numel() != self.meta.numel():
            raise TraceError(f"{self.hf_name}: vLLM's loader broadcasts it into {tuple(target.shape)}")
        hf_strides = contiguous_strides(self.hf_shape)
        start, rest = [], view.storage_offset()
        for stride in hf_strides:
            start.append(rest // stride)
            rest %= stride
        size, axes = [1] * len(self.hf_shape), []
        for length, stride in zip(view.shape, view.stride(), strict=True):
            if length == 1:
                axes.append(-1)
                continue
            matching = [k for k, hf_stride in enumerate(hf_strides) if hf_stride == stride and size[k] == 1]
            matching = [k for k in matching if start[k] + length <= self.hf_shape[k]]
            if not matching:
                raise TraceError(f"{self.hf_name}: vLLM's loader reads it with stride {stride}, which is no box of it")
            size[matching[0]] = length
            axes.append(matching[0])
        self.writes.append(Write(target, self.hf_name, tuple(start), tuple(size), tuple(axes)))


def _is_view(func: Any) -> bool:
    """True where the operator's schema says that its result aliases an input it does not write to."""
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def segment_of(write: Write, first_element: int) -> Segment:
    """The Segment of a write whose parameter starts `first_element` elements into the target's storage."""
    strides = [0] * len(write.size)
    for axis, stride in zip(write.hf_axes, write.target.stride(), strict=True):
        if axis >= 0:
            strides[axis] = stride
    return Segment(
        write.hf_name, write.start, write.size, write.target.storage_offset() - first_element, tuple(strides)
    )


def trace_loader(
    load: Callable[[list[tuple[str, Tensor]]], object],
    hf_shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> list[Write]:
    """Feed every HF tensor to `load` as a TracedTensor and return what was written where."""
    writes: list[Write] = []
    load([(name, TracedTensor.whole(name, shape, dtype, writes)) for name, shape in hf_shapes.items()])
    return writes
