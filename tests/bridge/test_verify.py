"""Fingerprints: what they catch, that parts add up, and the bridge's own check over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.load import segment_view
from converters.rules.dense import hf_tensor_shapes
from converters.rules.pipeline import PipelineSplit
from converters.rules.segment import Box
from mrl.bridge.transport import execute
from mrl.bridge.verify import Verifier, WeightMismatchError, fingerprint
from tests.bridge import simulate
from tests.bridge.simulate import Case
from tests.bridge.test_plan import small_case
from tests.gang import Gang

SHAPE = (6, 4, 10)
MASK = (1 << 64) - 1


def values(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_hand(tensor: Tensor, start: tuple[int, int, int] = (0, 0, 0)) -> int:
    """The definition, in Python's integers."""
    total = 0
    for i in range(tensor.shape[0]):
        for j in range(tensor.shape[1]):
            for k in range(tensor.shape[2]):
                z = ((start[0] + i) * 40 + (start[1] + j) * 10 + start[2] + k + 1) * 0x9E3779B97F4A7C15 & MASK
                for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                    signed = z - (1 << 64) if z >> 63 else z
                    z = (z ^ (signed >> shift)) * factor & MASK
                bits = int(tensor[i, j, k].view(torch.int16 if tensor.itemsize == 2 else torch.int32))
                total += bits * (z | 1)
    return total & MASK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_definition(dtype: torch.dtype) -> None:
    whole = values(dtype)
    assert int(fingerprint(whole, Box((0, 0, 0), SHAPE), SHAPE)) & MASK == by_hand(whole)
    part = whole[2:5, 1:, 3:7]
    assert int(fingerprint(part, Box((2, 1, 3), (3, 3, 4)), SHAPE)) & MASK == by_hand(part, (2, 1, 3))


def test_parts_add_up_and_long_tensors_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values()
    total = fingerprint(whole, Box((0, 0, 0), SHAPE), SHAPE)
    left = fingerprint(whole[:, :, :4], Box((0, 0, 0), (6, 4, 4)), SHAPE)
    right = fingerprint(whole[:, :, 4:], Box((0, 0, 4), (6, 4, 6)), SHAPE)
    assert torch.equal(left + right, total)
    monkeypatch.setattr("mrl.bridge.verify.CHUNK", 80)
    assert torch.equal(fingerprint(whole, Box((0, 0, 0), SHAPE), SHAPE), total)


def swapped(axis: int, a: int, b: int) -> Callable[[Tensor], Tensor]:
    def swap(tensor: Tensor) -> Tensor:
        order = list(range(tensor.shape[axis]))
        order[a], order[b] = order[b], order[a]
        return tensor.index_select(axis, torch.tensor(order))

    return swap


def flipped_bit(bit: int) -> Callable[[Tensor], Tensor]:
    def flip(tensor: Tensor) -> Tensor:
        bits = tensor.clone().view(torch.int16)
        bits[3, 2, 1] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
        return bits.view(torch.bfloat16)

    return flip


@pytest.mark.parametrize(
    "fault",
    [swapped(1, 0, 3), swapped(2, 4, 5), swapped(0, 1, 5), *(flipped_bit(bit) for bit in range(16))],
    ids=["rows", "columns", "experts", *(f"bit{bit}" for bit in range(16))],
)
def test_every_fault_shows(fault: Callable[[Tensor], Tensor]) -> None:
    box = Box((0, 0, 0), SHAPE)
    assert not torch.equal(fingerprint(fault(values()), box, SHAPE), fingerprint(values(), box, SHAPE))


def checked(case: Case, fault: str) -> str:
    """Run in a gang: a transport, a fault on the last rank, the check; returns its message."""
    import torch.distributed as dist

    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    sources, destinations = case.sources(), case.destinations()
    held = simulate.training_tensors(case, rank)
    shard = simulate.rollout_shard(case, rank)
    target = simulate.empty_tensors(shard, getattr(torch, case.dtype))
    execute(case.plans()[rank], held.__getitem__, target.__getitem__, group, 1 << 20)
    if rank == case.world - 1:
        _plant(fault, target, shard)
    verifier = Verifier(rank, sources, destinations, hf_tensor_shapes(case.facts))
    try:
        verifier.check(held.__getitem__, target.__getitem__, group)
    except WeightMismatchError as error:
        return str(error)
    return "equal"


def _plant(fault: str, target: dict[str, Tensor], shard: Any) -> None:
    gate_up = "model.layers.1.mlp.gate_up_proj.weight"
    if fault == "swapped gate and up":
        gate, up = (segment_view(target[gate_up], s) for s in shard[gate_up])
        kept = gate.clone()
        gate.copy_(up)
        up.copy_(kept)
    elif fault == "swapped rows":
        norm = target["model.norm.weight"]
        norm[[0, 1]] = norm[[1, 0]]
    elif fault == "stale":
        target["model.layers.0.self_attn.o_proj.weight"].mul_(2)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("none", "equal"),
        ("swapped gate and up", "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight on ranks [3]"),
        ("swapped rows", "model.norm.weight on ranks [3]"),
        ("stale", "model.layers.0.self_attn.o_proj.weight on ranks [3]"),
    ],
)
@pytest.mark.parametrize("disjoint", [False, True])
def test_a_mismatch_names_tensor_and_rank(gang: Callable[[int], Gang], fault: str, named: str, disjoint: bool) -> None:
    case = small_case(
        tp=2, pipeline=PipelineSplit(4) if disjoint else PipelineSplit(4, 2), rollout_tp=1,
        replicas=2 if disjoint else 4, disjoint=disjoint, dtype="bfloat16",
    )  # fmt: skip
    messages = gang(4).run(checked, case, fault)
    assert all(named in message for message in messages), messages
