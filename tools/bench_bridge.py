"""Time a weight sync next to what others do, on the same tensors in the same run.

    python tools/bench_bridge.py [--json]           # four gloo ranks, four layouts, a model of 256 MB
    python tools/bench_bridge.py --device cuda      # one GPU, 1.1B: the local copy, next to export and load

Columns: `mrl` is the bridge's transport; `gather` puts every parameter together whole on every rank, as verl does
(broadcast over PP, all-gather over TP), and copies each rank's part of it into vLLM's parameters; `broadcast` sends
every HF tensor from rank 0, which is taken to have them all, to all ranks. The copies into vLLM's parameters are
plain ones, cheaper than vLLM's own loader. The gather is no straw man: it works in buffers made once, as a caching
allocator would give them, and the rate of its communication alone is set against that of a plain all_gather.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from converters.load import segment_view
from converters.rules import dense
from converters.rules.facts import ModelFacts
from converters.rules.families import facts_of
from converters.rules.megatron import unsharded_params
from converters.rules.segment import ShardLayout
from converters.rules.shard import ParamLayout
from mrl.bridge.megatron_layout import training_groups
from mrl.bridge.plan import RankPlan, ShardGroup, make_plan
from mrl.bridge.transport import execute
from mrl.bridge.vllm_rules import padded_rows, rollout_groups
from mrl.parallel import ParallelLayout

WORLD, REPEATS, BUCKET = 4, 3, 32 << 20
DTYPE = torch.bfloat16
MODEL = ModelFacts("llama", 8, 1024, 16, 4, 64, 2816, 16411, 1e-5, False, False, False, 4096, 0.02)
BIG = ModelFacts("llama", 16, 2048, 32, 8, 64, 8192, 32768, 1e-5, False, False, False, 4096, 0.02)
LAYOUTS = {  # name: (training tp, training pp, rollout tp); the rest is data parallel
    "TP2xPP2->TP2xDP2": (2, 2, 2),
    "PP4->TP4": (1, 4, 4),
    "TP4->TP1xDP4": (4, 1, 1),
    "TP2xDP2->TP4": (2, 1, 4),
}

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""(TP group, PP group) of a rank."""


@dataclass
class Bench:
    """One rank's side of one layout."""

    facts: ModelFacts
    layout: ParallelLayout
    rank: int
    plan: RankPlan
    training: dict[str, Tensor]
    rollout: dict[str, Tensor]
    wanted: ShardLayout
    scratch: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, facts: ModelFacts, layout: ParallelLayout, rollout_tp: int, rank: int, device: str) -> Bench:
        sources = training_groups(facts, layout, transformer_engine=False)
        destinations = rollout_groups(facts, tuple(range(layout.world)), rollout_tp, 1, "bfloat16")
        shard = layout.shard(facts, rank, "lm", transformer_engine=False)
        training = {
            name: torch.zeros(torch.Size(param.local_shape(layout.tp)).numel(), dtype=DTYPE, device=device)
            for name, param in unsharded_params(facts, shard).items()
        }
        for name, segments in _of(sources, rank).items():
            for segment in segments:
                generator = torch.Generator(device=device).manual_seed(
                    zlib.crc32(f"{segment.hf_name}{segment.start}".encode())
                )
                view = segment_view(training[name], segment)
                view.copy_(torch.rand(view.shape, generator=generator, device=device))
        wanted = _of(destinations, rank)
        rows = padded_rows(facts, rollout_tp) * facts.hidden_size
        rollout = {
            name: torch.zeros(
                rows if _is_vocabulary(name) else sum(s.numel for s in segments), dtype=DTYPE, device=device
            )
            for name, segments in wanted.items()
        }
        return cls(facts, layout, rank, make_plan(rank, sources, destinations), training, rollout, wanted)

    def sync(self) -> int:
        """The bridge; returns the bytes received."""
        return execute(
            self.plan, self.training.__getitem__, self.rollout.__getitem__, dist.group.WORLD, BUCKET
        ).bytes_received

    def gathered(self, groups: Groups) -> int:
        """Every parameter whole on every rank, then loaded; returns bytes received."""
        received = 0
        for param, parts, nbytes in self.collected(groups):
            self.load(self.to_hf(param, parts))
            received += nbytes
        return received

    def collected(self, groups: Groups) -> Iterator[tuple[ParamLayout, list[Tensor], int]]:
        """Each parameter of the model with its shards of all TP ranks, and the bytes that this took."""
        tp_group, pp_group = groups
        layout, at = self.layout, self.layout.coordinates(self.rank)
        for stage in range(layout.pp):
            first = layout.rank_of(at.dp, stage, 0)
            params = unsharded_params(self.facts, layout.shard(self.facts, first, "lm", transformer_engine=False))
            for name, param in params.items():
                numel, received = torch.Size(param.local_shape(layout.tp)).numel(), 0
                mine = self.training[name] if at.pp == stage else self._buffer("mine", numel)
                if layout.pp > 1:
                    dist.broadcast(mine, layout.rank_of(at.dp, stage, at.tp), group=pp_group)
                    received += mine.nbytes if at.pp != stage else 0
                parts = [mine]
                if layout.tp > 1 and param.tp_axis is not None:
                    parts = [self._buffer(f"part {tp}", numel) for tp in range(layout.tp)]
                    dist.all_gather(parts, mine, group=tp_group)
                    received += mine.nbytes * (layout.tp - 1)
                yield param, parts, received

    def to_hf(self, param: ParamLayout, parts: list[Tensor]) -> dict[str, Tensor]:
        shapes = dense.hf_tensor_shapes(self.facts)
        whole: dict[str, Tensor] = {}
        for tp_rank, part in enumerate(parts):
            for segment in param.segments(len(parts), tp_rank):
                shape = torch.Size(shapes[segment.hf_name])
                target = whole.setdefault(segment.hf_name, self._buffer(segment.hf_name, shape.numel()).view(shape))
                target[segment.box.slices].copy_(segment_view(part, segment))
        return whole

    def _buffer(self, use: str, numel: int) -> Tensor:
        if (use, numel) not in self.scratch:
            self.scratch[use, numel] = torch.empty(numel, dtype=DTYPE, device=next(iter(self.training.values())).device)
        return self.scratch[use, numel]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of whole HF tensors into vLLM's parameters."""
        for name, segments in self.wanted.items():
            for segment in segments:
                if segment.hf_name in tensors:
                    segment_view(self.rollout[name], segment).copy_(tensors[segment.hf_name][segment.box.slices])

    def broadcast(self, whole: Mapping[str, Tensor]) -> int:
        """Rank 0 sends every HF tensor; `whole` is rank 0's copy of the model."""
        received = 0
        for name, shape in dense.hf_tensor_shapes(self.facts).items():
            tensor = whole[name] if self.rank == 0 else self._buffer(name, torch.Size(shape).numel()).view(shape)
            dist.broadcast(tensor, 0)
            received += tensor.nbytes if self.rank else 0
            self.load({name: tensor})
        return received

    def export(self) -> dict[str, Tensor]:
        """The whole model in HF tensors, from this rank alone (TP1 x PP1)."""
        params = unsharded_params(self.facts, self.layout.shard(self.facts, 0, "lm", transformer_engine=False))
        return {k: v for name, param in params.items() for k, v in self.to_hf(param, [self.training[name]]).items()}


def _of(groups: list[ShardGroup], rank: int) -> ShardLayout:
    return next(group.layout for group in groups if rank in group.ranks)


def _is_vocabulary(name: str) -> bool:
    return name in ("model.embed_tokens.weight", dense.LM_HEAD)


def timed(run: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    """(median of the slowest rank's seconds, the last result); once before without the clock."""
    run()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        result = run()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    return median(seconds), result


def total(value: float) -> float:
    """Sum over ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def worker(rank: int, port: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    rows: dict[str, Any] = {}
    for name, (tp, pp, rollout_tp) in LAYOUTS.items():
        rows[name] = row = measure(ParallelLayout(WORLD, tp, pp), rollout_tp, rank)
        if rank == 0:
            say(f"{name:<18} {row['bytes'] / 1e6:8.1f} MB {row['seconds']:7.3f} s   gather "
                f"{row['gather_bytes'] / 1e6:8.1f} MB {row['gather_seconds']:7.3f} s   broadcast "
                f"{row['broadcast_bytes'] / 1e6:8.1f} MB {row['broadcast_seconds']:7.3f} s")  # fmt: skip
    if rank == 0:
        answers.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(layout: ParallelLayout, rollout_tp: int, rank: int) -> dict[str, Any]:
    bench = Bench.build(MODEL, layout, rollout_tp, rank, "cpu")
    groups = make_groups(layout, rank)
    seconds, nbytes = timed(bench.sync)
    ours = {name: tensor.clone() for name, tensor in bench.rollout.items()}
    gather_seconds, gather_bytes = timed(lambda: bench.gathered(groups))
    for name, tensor in bench.rollout.items():
        assert torch.equal(tensor, ours[name]), f"{name}: gather and bridge differ"
    whole: dict[str, Tensor] = {}
    for param, parts, _ in bench.collected(groups):
        whole |= {name: tensor.clone() for name, tensor in bench.to_hf(param, parts).items()} if rank == 0 else {}
    collect_seconds, _ = timed(lambda: [nbytes for _, _, nbytes in bench.collected(groups)])
    broadcast_seconds, broadcast_bytes = timed(lambda: bench.broadcast(whole))
    elements = sum(tensor.numel() for tensor in bench.rollout.values())
    pads = sum(bench.rollout[n].numel() - sum(s.numel for s in bench.wanted[n]) for n in bench.rollout)
    return {
        "bytes": int(total(nbytes)),
        "bound": int(total(bench.plan.lower_bound_bytes)),
        "seconds": seconds,
        "gather_bytes": int(total(gather_bytes)),
        "gather_seconds": gather_seconds,
        "gather_rate": total(gather_bytes) / collect_seconds,
        "all_gather_rate": all_gather_rate(),
        "broadcast_bytes": int(total(broadcast_bytes)),
        "broadcast_seconds": broadcast_seconds,
        "coverage": total(bench.plan.elements_bound) / total(elements - pads),
    }


def make_groups(layout: ParallelLayout, rank: int) -> Groups:
    """All ranks make all groups."""
    at = layout.coordinates(rank)
    tp_groups = {
        (dp, pp): dist.new_group([layout.rank_of(dp, pp, tp) for tp in range(layout.tp)])
        for dp in range(layout.dp) for pp in range(layout.pp)
    }  # fmt: skip
    pp_groups = {
        (dp, tp): dist.new_group([layout.rank_of(dp, pp, tp) for pp in range(layout.pp)])
        for dp in range(layout.dp) for tp in range(layout.tp)
    }  # fmt: skip
    return tp_groups[at.dp, at.pp], pp_groups[at.dp, at.tp]


def all_gather_rate() -> float:
    """Bytes a second that four ranks receive in one plain all_gather of 8 MB pieces."""
    mine = torch.zeros(4 << 20, dtype=DTYPE)
    parts = [torch.empty_like(mine) for _ in range(WORLD)]
    seconds, _ = timed(lambda: dist.all_gather(parts, mine), repeats=7)
    return WORLD * mine.nbytes * (WORLD - 1) / seconds


def planner() -> dict[str, float]:
    """A middle rank's plan of Llama-3-70B, TP8 x PP8 x DP16 -> 128 replicas of TP8."""
    facts = facts_of("configs/models/llama3_70b.json")

    def plan() -> RankPlan:
        sources = training_groups(facts, ParallelLayout(1024, 8, 8), transformer_engine=True)
        destinations = rollout_groups(facts, tuple(range(1024)), 8, 1, "bfloat16")
        return make_plan(400, sources, destinations, lambda rank: rank // 8)

    begin = time.perf_counter()
    plan()
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"ranks": 1024, "seconds": seconds, "peak_mb": peak / 1e6}


def four_ranks() -> dict[str, Any]:
    context = mp.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    processes = mp.start_processes(worker, (port, answers), nprocs=WORLD, join=False, start_method="spawn")
    while not processes.join():  # raises what a rank raised
        pass
    rows = answers.get()
    far = [row["gather_seconds"] / row["seconds"] for row in rows.values() if row["gather_bytes"] >= 3 * row["bound"]]
    return {
        "model_bytes": 2 * sum(torch.Size(s).numel() for s in dense.hf_tensor_shapes(MODEL).values()),
        "coverage": min(row["coverage"] for row in rows.values()),
        "bytes_over_bound": sum(row["bytes"] for row in rows.values()) / sum(row["bound"] for row in rows.values()),
        "speedup_vs_gather": min(far),
        "gather_over_all_gather": min(row["gather_rate"] / row["all_gather_rate"] for row in rows.values()),
        "layouts": rows,
        "planner": planner(),
    }


def one_gpu(device: str) -> dict[str, Any]:
    """World of one: the local copy of a 1.1B model next to export and load, and the copy of as many bytes."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    facts = BIG if device == "cuda" else MODEL
    bench = Bench.build(facts, ParallelLayout(1), 1, 0, device)
    nbytes = sum(tensor.nbytes for tensor in bench.rollout.values())
    source, target = (torch.zeros(nbytes // 2, dtype=DTYPE, device=device) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(run: Callable[[], Any]) -> float:
        return timed(lambda: (run(), wait()), repeats=20)[0]

    return {
        "device": device,
        "bytes": nbytes,
        "sync_seconds": seconds(bench.sync),
        "export_and_load_seconds": seconds(lambda: bench.load(bench.export())),
        "copy_seconds": seconds(lambda: target.copy_(source)),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON on stdout")
    parser.add_argument("--device", choices=["gloo", "cpu", "cuda"], default="gloo", help="gloo: four ranks")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = four_ranks() if arguments.device == "gloo" else one_gpu(arguments.device)
    if arguments.json:
        print(json.dumps(result), flush=True)
    else:
        print("\n".join(f"{key:<24}{value}" for key, value in result.items() if not isinstance(value, dict)))


if __name__ == "__main__":
    main()
