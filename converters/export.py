"""Writing a HF directory from the shards of all ranks: the weight bridge's plan, with files as the destination.

A shard file belongs to one writer rank; the files take turns, so that a writer holds one file's tensors at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from converters.hf_checkpoint import INDEX, SINGLE
from converters.rules.segment import Segment, contiguous_strides
from mrl.bridge.plan import ITEMSIZE, ShardGroup, make_plan
from mrl.bridge.transport import execute

MAX_SHARD_BYTES = 5 * 10**9
CARRIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "tokenizer*", "LICENSE*")
"""What an export takes over from the source directory besides config.json: tokenizer, chat template, code."""


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: str, max_shard_bytes: int) -> list[list[str]]:
    """Tensor names by file, in checkpoint order; a tensor larger than the limit gets a file of its own."""
    files: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size = ITEMSIZE[dtype] * _numel(shape)
        if files[-1] and held + size > max_shard_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def export_hf(
    source_dir: Path,
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Sequence[ShardGroup],
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Collective: write `target`, complete or not at all.

    shapes: HF tensors to write. sources: every rank's shards; tensors: this rank's parameters. The directory is
    written under a temporary name beside `target` and renamed once rank 0 knows that every file is in place; it must
    be on a file system that all ranks see. Raises FileExistsError where `target` exists, ValueError on all ranks where
    a parameter holds NaN or infinities.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another place or remove it")
    _check_finite(tensors, group)
    partial = target.with_name(f".{target.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group)
    dtype_name = str(dtype).removeprefix("torch.")
    files = plan_files(shapes, dtype_name, max_shard_bytes)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    for index, (file_name, members) in enumerate(zip(names, files, strict=True)):
        writer = index % world
        layout = {name: (_whole(name, shapes[name]),) for name in members}
        whole = ShardGroup((writer,), layout, dict.fromkeys(members, dtype_name))
        plan = make_plan(rank, sources, [whole])
        out = {n: torch.empty(shapes[n], dtype=dtype, device=device) for n in members} if rank == writer else {}
        execute(plan, tensors.__getitem__, out.__getitem__, group, bucket_bytes=256 << 20)
        if rank == writer:
            _save({name: tensor.cpu() for name, tensor in out.items()}, partial / file_name)
    dist.barrier(group)
    if rank == 0:
        if len(files) > 1:
            _write_index(partial, names, files)
        _carry_over(source_dir, partial, dtype_name)
        os.rename(partial, target)
    dist.barrier(group)


def _check_finite(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    mine = next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for rank, name in enumerate(found):
        if name is not None:
            raise ValueError(
                f"{name} of rank {rank} holds NaN or infinite values: the training has diverged, so no model is "
                "written; lower the learning rate"
            )


def _whole(name: str, shape: tuple[int, ...]) -> Segment:
    return Segment(name, (0,) * len(shape), shape, 0, contiguous_strides(shape))


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_index(folder: Path, names: list[str], files: list[list[str]]) -> None:
    """The index is made from what lies on disk, not from the plan."""
    total = sum((folder / name).stat().st_size - _header_bytes(folder / name) for name in names)
    weight_map = {tensor: name for name, members in zip(names, files, strict=True) for tensor in members}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _carry_over(source_dir: Path, target: Path, dtype_name: str) -> None:
    """Tokenizer, generation config, chat template and custom code as they are; config.json with the dtype written."""
    carried = {path for pattern in CARRIED for path in source_dir.glob(pattern)}
    for path in sorted(carried):
        if path.is_file() and path.name not in (INDEX, "config.json"):
            shutil.copy2(path, target / path.name)
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (target / "config.json").write_text(json.dumps(config | {key: dtype_name}, indent=2) + "\n", encoding="utf-8")
