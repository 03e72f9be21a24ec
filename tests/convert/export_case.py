"""Run by a gang: load a HF directory into an engine's shards and write it out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converters.export import export_hf
from converters.rules.dense import hf_tensor_shapes
from mrl.bridge.megatron_layout import training_groups
from tests.engine.cases import Bench


def round_trip(path: str, out: str, tp: int, pp: int, **options: Any) -> None:
    """Load `path` cut into tp x pp and export to `out`; options: dtype, max_shard_bytes, poison.

    poison: a parameter that gets a NaN where a rank has it, as a model that has diverged.
    """
    poison = options.pop("poison", None)
    max_shard_bytes = options.pop("max_shard_bytes", 1 << 40)
    dtype = options.get("dtype", torch.float32)
    group = dist.group.WORLD
    assert group is not None
    with Bench(path, tp, pp, "lm", **options) as bench:
        if poison in bench.engine.parameters():
            bench.engine.parameters()[poison].view(-1)[-1] = torch.nan
        export_hf(
            Path(path),
            Path(out),
            hf_tensor_shapes(bench.facts),
            training_groups(bench.facts, bench.layout, transformer_engine=False),
            bench.engine.parameters(),
            group,
            dtype,
            torch.device("cpu"),
            max_shard_bytes,
        )
