"""Segments: the one language in which converters and the weight bridge speak of weights.

Everything is expressed in HF coordinates: the name of a HF tensor and a box in it. A shard (one rank's parameter, in
Megatron-Core or in vLLM) is a list of Segments, each of which says where one box of one HF tensor lives inside it.
This module knows neither torch nor any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """The box ``[start, start + size)`` of HF tensor ``hf_name``, living in a local parameter.

    Element ``i`` of the box (a multi-index with one entry per HF axis) is stored ``offset + sum(i[k] * strides[k])``
    elements after the parameter's first element. A Segment carries no dtype.
    """

    hf_name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)

    def within(self, box: Box) -> Segment:
        """The part of this segment that holds ``box``, which must lie inside it."""
        shift = [b - s for b, s in zip(box.start, self.start, strict=True)]
        assert all(d >= 0 and d + n <= m for d, n, m in zip(shift, box.size, self.size, strict=True)), (self, box)
        offset = self.offset + sum(d * stride for d, stride in zip(shift, self.strides, strict=True))
        return Segment(self.hf_name, box.start, box.size, offset, self.strides)


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a HF tensor: ``[start, start + size)`` on each axis."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into its tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None where they share no element."""
        start, size = [], []
        # Plans intersect hundreds of thousands of boxes, most of which miss each other on the first axis.
        for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True):
            low = a if a > b else b
            length = (a + m if a + m < b + n else b + n) - low
            if length <= 0:
                return None
            start.append(low)
            size.append(length)
        return Box(tuple(start), tuple(size))


ShardLayout = Mapping[str, Sequence[Segment]]
"""One rank's parameters: parameter name -> the Segments that fill it (pads have none)."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
