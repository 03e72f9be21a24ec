"""`mrl plan`: what a weight sync of a configuration would move, without GPUs, weights or other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from converters.rules.facts import ModelFacts
from mrl.bridge.megatron_layout import training_groups
from mrl.bridge.plan import ShardGroup, lower_bound
from mrl.bridge.traffic import (
    Links,
    RankTraffic,
    count_traffic,
    estimated_seconds,
    gathered,
    hybridflow,
    is_ffn,
    is_qkv,
    model_bytes,
)
from mrl.bridge.vllm_rules import rollout_groups
from mrl.config.schema import RunConfig
from mrl.parallel import ParallelLayout, parallel_layout


@dataclass(frozen=True)
class Setting:
    """What a report is about. ranks_per_node: consecutive ranks on a machine. dtype: the rollout's."""

    facts: ModelFacts
    layout: ParallelLayout
    rollout_tp: int
    rollout_pp: int
    ranks_per_node: int
    dtype: str
    bucket_bytes: int
    relay: bool

    @classmethod
    def of(cls, config: RunConfig, facts: ModelFacts, world: int) -> Setting:
        assert config.rollout.dtype is not None
        return cls(
            facts,
            parallel_layout(config.parallel, world),
            config.rollout.tensor_model_parallel_size,
            1,
            config.trainer.nproc_per_node,
            config.rollout.dtype,
            config.bridge.bucket_mib << 20,
            config.bridge.relay_within_node,
        )

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def sources(self) -> list[ShardGroup]:
        # The two layer specs differ in the names of two norms only.
        return training_groups(self.facts, self.layout, transformer_engine=True)

    def destinations(self, tp: int, order: Sequence[int]) -> list[ShardGroup]:
        """order: the ranks in the order in which vLLM counts them."""
        groups = rollout_groups(self.facts, tuple(range(len(order))), tp, self.rollout_pp, self.dtype)
        return [ShardGroup(tuple(order[r] for r in g.ranks), g.layout, g.dtypes) for g in groups]


def plan_report(setting: Setting, links: Links) -> dict[str, Any]:
    """Everything that `mrl plan` says, as plain data; bytes and seconds."""
    facts, world, dtype = setting.facts, setting.layout.world, setting.dtype
    order = range(world)
    sources, destinations = setting.sources(), setting.destinations(setting.rollout_tp, order)
    traffic = count_traffic(sources, destinations, setting.node_of, setting.relay)
    # Ranks of the same shards on both sides lack the same: the bound is computed once for each kind.
    kinds = {rank: (i, j) for i, s in enumerate(sources) for j, d in enumerate(destinations)
             for rank in set(s.ranks) & set(d.ranks)}  # fmt: skip
    bounds: dict[tuple[int, int], int] = {}
    for rank, kind in kinds.items():
        if kind not in bounds:
            bounds[kind] = lower_bound(rank, [sources[kind[0]]], [destinations[kind[1]]])
    message = setting.bucket_bytes // 2
    ranks = [
        {
            "rank": rank,
            "same_gpu": t.same_gpu,
            "same_node": t.same_node,
            "across_nodes": t.across_nodes,
            "bytes_received": t.received,
            "bytes_sent": t.sent,
            "lower_bound": bounds[kinds[rank]],
            # Two turns in flight, each with a message out and one in of half a bucket.
            "bucket_peak": min(setting.bucket_bytes, t.sent) + min(setting.bucket_bytes, t.received),
        }
        for rank, t in sorted(traffic.items())
    ]
    return {
        "model_bytes": model_bytes(facts, dtype),
        "world": world,
        "nodes": -(-world // setting.ranks_per_node),
        "training": {"tp": setting.layout.tp, "pp": setting.layout.pp, "dp": setting.layout.dp},
        "rollout": {
            "tp": setting.rollout_tp,
            "pp": setting.rollout_pp,
            "replicas": world // (setting.rollout_tp * setting.rollout_pp),
            "dtype": dtype,
        },
        "bytes_received_max": max(r["bytes_received"] for r in ranks),
        "bytes_received": sum(r["bytes_received"] for r in ranks),
        "lower_bound_max": max(r["lower_bound"] for r in ranks),
        "lower_bound": sum(r["lower_bound"] for r in ranks),
        "same_gpu": sum(r["same_gpu"] for r in ranks),
        "same_node": sum(r["same_node"] for r in ranks),
        "across_nodes": sum(r["across_nodes"] for r in ranks),
        "bucket_peak_max": max(r["bucket_peak"] for r in ranks),
        "estimated_seconds": estimated_seconds(traffic.values(), links, message),
        "links": asdict(links),
        "others_max": _others(setting, sources, destinations),
        "moves_less": _alternatives(setting, sources, sum(r["bytes_received"] for r in ranks)),
        "ranks": ranks,
    }


def _others(
    setting: Setting, sources: Sequence[ShardGroup], destinations: Sequence[ShardGroup]
) -> dict[str, int | float | None]:
    """The largest bytes that a rank receives under other designs; None where a design cannot express the layout."""
    facts, dtype = setting.facts, setting.dtype

    def bound(names: Any) -> Mapping[int, RankTraffic]:
        return count_traffic(sources, destinations, setting.node_of, False, names)

    def largest(*parts: Mapping[int, Any]) -> int:
        return max(sum(_received(part[rank]) for part in parts) for rank in parts[0])

    return {
        "full_gather": largest(gathered(facts, sources, destinations, dtype)),
        "hybridflow": hybridflow(
            facts, setting.layout.tp * setting.layout.pp, setting.rollout_tp * setting.rollout_pp, dtype
        ),
        "ffn_only": largest(
            gathered(facts, sources, destinations, dtype, lambda name: not is_ffn(name)), bound(is_ffn)
        ),
        "m2n": None
        if setting.layout.pp > 1 or setting.rollout_pp > 1
        else largest(gathered(facts, sources, destinations, dtype, is_qkv), bound(lambda name: not is_qkv(name))),
    }


def _received(part: RankTraffic | int) -> int:
    return part.received if isinstance(part, RankTraffic) else part


def _alternatives(setting: Setting, sources: Sequence[ShardGroup], moved: int) -> list[dict[str, Any]]:
    """Other rollout TPs and rank orders that would move fewer bytes in all, the fewest first."""
    facts, world = setting.facts, setting.layout.world
    found = []
    for tp in (t for t in range(1, world // setting.rollout_pp + 1) if world % (t * setting.rollout_pp) == 0):
        cut_evenly = facts.num_heads % tp == 0 and facts.ffn_size % tp == 0
        if not cut_evenly or (facts.num_kv_heads % tp and tp % facts.num_kv_heads):
            continue
        for name, order in _orders(setting, tp).items():
            if (tp, name) == (setting.rollout_tp, "consecutive"):
                continue
            traffic = count_traffic(sources, setting.destinations(tp, order), setting.node_of, setting.relay)
            total = sum(t.received for t in traffic.values())
            if total < moved:
                found.append({"rollout_tp": tp, "rank_order": name, "bytes_received": total})
    return sorted(found, key=lambda row: row["bytes_received"])


def _orders(setting: Setting, tp: int) -> dict[str, list[int]]:
    """consecutive: a replica's TP ranks are neighbours. strided: the neighbours of a training TP group belong to one
    TP rank of several replicas, so that what they hold together is what each of them needs."""
    world, training_tp = setting.layout.world, setting.layout.tp
    orders = {"consecutive": list(range(world))}
    if 1 < tp < training_tp and training_tp % tp == 0:
        share = training_tp // tp
        orders["strided"] = [
            first + part * share + replica
            for first in range(0, world, training_tp)
            for replica in range(share)
            for part in range(tp)
        ]
    return orders


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people: decimal gigabytes."""
    training, rollout = report["training"], report["rollout"]
    bound = max(report["lower_bound_max"], 1)
    lines = [
        f"model       {_gb(report['model_bytes'])} as {rollout['dtype']}",
        (
            f"training    TP {training['tp']} x PP {training['pp']} x DP {training['dp']}, "
            f"{report['world']} ranks on {report['nodes']} machines"
        ),
        f"rollout     TP {rollout['tp']} x PP {rollout['pp']}, {rollout['replicas']} replicas",
        "",
        (
            f"{'ranks':<16}{'same GPU':>12}{'same node':>12}{'across':>12}{'received':>12}{'bound':>12}{'sent':>12}"
            f"{'buckets':>12}"
        ),
    ]
    columns = ("same_gpu", "same_node", "across_nodes", "bytes_received", "lower_bound", "bytes_sent", "bucket_peak")
    shown = [(row["rank"], "".join(f"{_gb(row[column]):>12}" for column in columns)) for row in report["ranks"]]
    for figures, rows in groupby(shown, key=lambda row: row[1]):
        numbers = [rank for rank, _ in rows]
        label = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines.append(f"{label:<16}{figures}")
    lines += [
        "",
        (
            f"{'a rank receives at most':<44}{_gb(report['bytes_received_max']):>10}   the lower bound: "
            f"{_gb(report['lower_bound_max'])}"
        ),
    ]
    names = {
        "full_gather": "every tensor gathered (verl, slime)",
        "hybridflow": "HybridFlow's formula",
        "ffn_only": "planned FFN, the rest gathered (NeMo-RL)",
        "m2n": "M2N, QKV whole (vLLM)",
    }
    for key, name in names.items():
        figure = report["others_max"][key]
        text = "no PP" if figure is None else f"{_gb(figure):>10}   {figure / bound:.1f} x the bound"
        lines.append(f"  {name:<42}{text:>10}")
    links = report["links"]
    estimate = (
        f"estimated time {report['estimated_seconds']:.3f} s (GPU {links['gpu']:g}, node {links['node']:g}, network "
        f"{links['network']:g} GB/s, {links['latency_us']:g} us a message)"
    )
    return [*lines, "", estimate, *_advice(report)]


def _advice(report: Mapping[str, Any]) -> Iterable[str]:
    for row in report["moves_less"][:3]:
        order = "" if row["rank_order"] == "consecutive" else f" with {row['rank_order']} ranks"
        yield (
            f"rollout.tensor_model_parallel_size={row['rollout_tp']}{order} would move {_gb(row['bytes_received'])} "
            f"in all instead of {_gb(report['bytes_received'])}"
        )


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
