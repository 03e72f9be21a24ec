"""ParallelLayout: how the world is cut, validated once; and the process groups that follow from it.

This module alone touches torch.distributed's default group. The rank order is Megatron-Core's own (`tp-cp-ep-dp-pp`,
tensor parallelism fastest), so coordinates are a closed form of the rank and need no communication.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch.distributed as dist

from converters.rules.facts import ModelFacts
from converters.rules.megatron import Head, ModelShard
from converters.rules.pipeline import PipelineSplit
from mrl.config.schema import ParallelSection


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor x pipeline x data parallelism over `world` ranks.

    first_stage_layers, last_stage_layers: layers of the first and last pipeline stage where they are to differ.
    """

    world: int
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp):
            raise ValueError(
                f"world size {self.world} is not a multiple of tensor_model_parallel_size={self.tp} x "
                f"pipeline_model_parallel_size={self.pp}; start {self.tp * self.pp} ranks or a multiple of it"
            )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        tp = rank % self.tp
        dp = rank // self.tp % self.dp
        return Coordinates(dp=dp, pp=rank // (self.tp * self.dp), tp=tp)

    def pipeline(self, num_layers: int) -> PipelineSplit:
        """How the layers of a model are cut; ValueError where they do not fit."""
        return PipelineSplit(num_layers, self.pp, 1, self.first_stage_layers, self.last_stage_layers)

    def shard(self, facts: ModelFacts, rank: int, head: Head, transformer_engine: bool) -> ModelShard:
        """Which part of a model a rank holds."""
        at = self.coordinates(rank)
        return ModelShard(self.tp, at.tp, self.pipeline(facts.num_layers), at.pp, head, transformer_engine)

    def rank_of(self, dp: int, pp: int, tp: int) -> int:
        return tp + self.tp * (dp + self.dp * pp)


def parallel_layout(section: ParallelSection, world: int) -> ParallelLayout:
    """The layout that a configuration describes over `world` ranks."""
    return ParallelLayout(
        world,
        section.tensor_model_parallel_size,
        section.pipeline_model_parallel_size,
        sequence_parallel=section.sequence_parallel and section.tensor_model_parallel_size > 1,
        first_stage_layers=section.num_layers_in_first_pipeline_stage,
        last_stage_layers=section.num_layers_in_last_pipeline_stage,
    )


def initialise_distributed(backend: str, timeout_s: float = 1800.0) -> tuple[int, int]:
    """Start the default process group from torchrun's environment; returns (rank, world size)."""
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def initialise_disjoint(backend: str, training_world: int, timeout_s: float = 1800.0) -> dist.ProcessGroup:
    """Start one default group of the first `training_world` ranks of torchrun's world and another of the others.

    Megatron-Core and vLLM each build their groups over the whole default world, so where other ranks train than serve,
    each side has its own. Returns the group that spans both sides, in torchrun's rank numbers (for the bridge).
    RANK and WORLD_SIZE are set to the side's, as vLLM reads them.
    """
    from torch.distributed import distributed_c10d

    store, rank, world = next(dist.rendezvous("env://"))
    timeout = datetime.timedelta(seconds=timeout_s)
    trains = rank < training_world
    first = 0 if trains else training_world
    size = training_world if trains else world - training_world
    side = dist.PrefixStore("training" if trains else "rollout", store)
    dist.init_process_group(backend, store=side, rank=rank - first, world_size=size, timeout=timeout)
    os.environ |= {"RANK": str(rank - first), "WORLD_SIZE": str(size)}
    # torch's public functions make groups within the default world only; this is the constructor beneath them.
    spanning, _ = distributed_c10d._new_process_group_helper(
        world, rank, [], backend, dist.PrefixStore("spanning", store), group_name="spanning", timeout=timeout
    )
    # torch looks up this rank's number in the group by its default rank; ranks of the other side get the numbers after.
    distributed_c10d._world.pg_group_ranks[spanning] = {(r - first) % world: r for r in range(world)}
    return spanning


def node_of(rank: int) -> int:
    """The machine a rank runs on: torchrun numbers ranks machine by machine, equally many on each."""
    return rank // int(os.environ["LOCAL_WORLD_SIZE"])


def shut_down_distributed() -> None:
    """Take all groups down at the end of a run; collective. Without it NCCL warns, and may hang, at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def initialise_megatron(layout: ParallelLayout, seed: int) -> None:
    """Build Megatron-Core's groups for `layout` and seed its random state. Call within `platform.megatron()`."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        create_gloo_process_groups=False,  # a second set of groups, of use only to Megatron-Core's own checkpoints
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
