"""Which layers a pipeline stage holds: even, uneven (first and last stage of their own size) and interleaved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSplit:
    """Megatron-Core's cut of the layers into pp stages of vpp chunks each.

    first, last: layers of the first and of the last stage where they differ from the others'. Raises ValueError naming
    the sizes where they do not fit together.
    """

    num_layers: int
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.pp == 1 and (self.first is not None or self.last is not None or self.vpp > 1):
            raise ValueError("a pipeline of one stage has neither a first and last stage of their own size nor chunks")
        fixed = [size for size in (self.first, self.last) if size is not None]
        left, stages = self.num_layers - sum(fixed), self.pp - len(fixed)
        if left < stages or (left % stages if stages else left):
            raise ValueError(
                f"{self.num_layers} layers do not divide over {self._text()}; {left} are left for {stages} stages"
            )
        for size in (*fixed, left // stages if stages else 0):
            if size % self.vpp:
                raise ValueError(f"a stage of {size} layers does not divide into {self.vpp} virtual stages")

    def _text(self) -> str:
        own = [f"{name} {size}" for name, size in (("first", self.first), ("last", self.last)) if size is not None]
        return f"{self.pp} pipeline stages" + (f" ({', '.join(own)})" if own else "")

    def stage_size(self, pp_rank: int) -> int:
        """Layers of a stage, all its chunks together."""
        if pp_rank == 0 and self.first is not None:
            return self.first
        if pp_rank == self.pp - 1 and self.last is not None:
            return self.last
        fixed = [size for size in (self.first, self.last) if size is not None]
        return (self.num_layers - sum(fixed)) // (self.pp - len(fixed))

    def layers(self, pp_rank: int, chunk: int = 0) -> range:
        """Global indices of a chunk's layers: chunk 0 of all stages in turn, then chunk 1 of all, and so on."""
        before = sum(self.stage_size(p) for p in range(pp_rank)) // self.vpp
        start = chunk * (self.num_layers // self.vpp) + before
        return range(start, start + self.stage_size(pp_rank) // self.vpp)
