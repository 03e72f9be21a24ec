"""Cutting an unsharded Megatron-Core parameter for one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from converters.rules.segment import Segment, contiguous_strides

VOCAB_MULTIPLE = 8
"""Rows of the embedding per TP rank are a multiple of this, the tensor cores' alignment for 16-bit types."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the padded vocabulary: the next multiple of `VOCAB_MULTIPLE * tp`."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Block:
    """The box [start, start + size) of a HF tensor, placed at `at` of a parameter's logical coordinates.

    `axes[k]` is the logical axis that HF axis k runs along. Defaults: the box starts at 0, lies at 0, same axes.
    """

    hf_name: str
    size: tuple[int, ...]
    start: tuple[int, ...] = ()
    at: tuple[int, ...] = ()
    axes: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        zeros = (0,) * len(self.size)
        object.__setattr__(self, "start", self.start or zeros)
        object.__setattr__(self, "at", self.at or zeros)
        object.__setattr__(self, "axes", self.axes or tuple(range(len(self.size))))


@dataclass(frozen=True)
class ParamLayout:
    """An unsharded parameter: its logical shape, the axis that tensor parallelism cuts, and what fills it.

    The logical shape may split a stored axis (gate and up: [2, F, H] stored as [2F, H]); storage is row-major.
    """

    shape: tuple[int, ...]
    tp_axis: int | None
    blocks: tuple[Block, ...]

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Logical shape of one rank's shard. The cut axis must divide by tp."""
        if self.tp_axis is None:
            return self.shape
        cut = self.shape[self.tp_axis]
        if cut % tp:
            hf_name = self.blocks[0].hf_name
            raise ValueError(f"{hf_name}: axis of {cut} cannot be cut over tensor_model_parallel_size={tp}")
        return tuple(n // tp if axis == self.tp_axis else n for axis, n in enumerate(self.shape))

    def segments(self, tp: int, tp_rank: int) -> tuple[Segment, ...]:
        """What rank `tp_rank` of `tp` holds, in elements of its own storage."""
        local = self.local_shape(tp)
        strides = contiguous_strides(local)
        segments = []
        for block in self.blocks:
            start, size, at = list(block.start), list(block.size), list(block.at)
            if self.tp_axis is not None:
                first = tp_rank * local[self.tp_axis]
                hf_axis = block.axes.index(self.tp_axis)
                lo = max(at[self.tp_axis], first)
                hi = min(at[self.tp_axis] + size[hf_axis], first + local[self.tp_axis])
                if hi <= lo:
                    continue
                start[hf_axis] += lo - at[self.tp_axis]
                size[hf_axis] = hi - lo
                at[self.tp_axis] = lo - first
            offset = sum(a * s for a, s in zip(at, strides, strict=True))
            hf_strides = tuple(strides[axis] for axis in block.axes)
            segments.append(Segment(block.hf_name, tuple(start), tuple(size), offset, hf_strides))
        return tuple(segments)
