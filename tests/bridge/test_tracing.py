"""Tracing: views and copies are followed exactly, everything else fails closed with its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from converters.load import segment_view
from converters.rules.segment import Segment
from mrl.bridge.plan import ShardGroup
from mrl.bridge.sync import RolloutSide, WeightBridge
from mrl.bridge.tracing import TraceError, trace_loader
from mrl.bridge.vllm_layout import LayoutError, VllmLayout, layout_from_writes, probe_values, prove_by_read_back
from tests.gang import Gang

SHAPE = (8, 6)
NAMES: dict[str, tuple[int, ...]] = {"w": SHAPE}


class Holder(nn.Module):
    """A module with one parameter `weight` of the given shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)


def trace(module: Holder, load: Callable[[Tensor, Tensor], object]) -> VllmLayout:
    writes = trace_loader(lambda weights: [load(module.weight.data, w) for _, w in weights], NAMES, torch.float32)
    return layout_from_writes(module, writes)


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], object]]] = {
    "whole": ((8, 6), lambda p, w: p.copy_(w)),
    "narrow rows": ((4, 6), lambda p, w: p.copy_(w.narrow(0, 4, 4))),
    "columns": ((8, 3), lambda p, w: p.copy_(w[:, 3:])),
    "transposed": ((6, 8), lambda p, w: p.copy_(w.t())),
    "chunk": ((4, 6), lambda p, w: p.copy_(w.chunk(2)[1])),
    "into a part": ((8, 6), lambda p, w: (p[:4].copy_(w[4:]), p[4:].copy_(w[:4]))),
    "view": ((2, 4, 6), lambda p, w: p.copy_(w.view(2, 4, 6))),
    "unsqueeze": ((8, 1, 6), lambda p, w: p.copy_(w.unsqueeze(1))),
    "data and contiguous": ((8, 6), lambda p, w: p.copy_(w.data.contiguous())),
}


@pytest.mark.parametrize("kind", [k for k in VIEWS if k != "view"])
def test_the_layout_puts_the_right_bits_in_place(kind: str) -> None:
    shape, load = VIEWS[kind]
    layout = trace(Holder(*shape), load)
    values = torch.arange(48.0).view(SHAPE)
    expected, ours = torch.zeros(shape), torch.zeros(shape)
    load(expected, values)
    for segment in layout.segments["weight"]:
        box = values[segment.box.slices]
        segment_view(ours, segment).copy_(box)
    assert torch.equal(ours, expected)


def test_a_view_that_is_no_box_is_refused() -> None:
    """[8, 6] read as [2, 4, 6]: two HF rows' axes for one; every second row: a stride that no box has."""
    with pytest.raises(TraceError, match="w: vLLM's loader reads it with stride"):
        trace(Holder(4, 6), lambda p, w: p.copy_(w[::2]))


@pytest.mark.parametrize(
    ("operator", "load"),
    [
        ("clone", lambda p, w: p.copy_(w.clone())),
        ("cat", lambda p, w: p.copy_(torch.cat([w[:4], w[4:]]))),
        ("_to_copy", lambda p, w: p.copy_(w.to(torch.float64))),
        ("_local_scalar_dense", lambda p, w: p.fill_(w[0, 0].item())),
        ("index", lambda p, w: p.copy_(w[torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])])),
        ("mul", lambda p, w: p.copy_(w * 2)),
        ("add_", lambda p, w: p.add_(w)),
    ],
)
def test_anything_but_a_view_is_refused_by_name(operator: str, load: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(TraceError, match=rf"^w: vLLM's loader applies aten::{operator}.* to it; only views and copies"):
        trace(Holder(8, 6), load)


def test_a_parameter_nobody_fills_is_refused() -> None:
    with pytest.raises(LayoutError, match="weight: 6 of 54 elements are filled by no HF tensor"):
        trace(Holder(9, 6), lambda p, w: p[:8].copy_(w))


def test_a_copy_outside_the_parameters_is_refused() -> None:
    elsewhere = torch.zeros(SHAPE)
    with pytest.raises(LayoutError, match="w: vLLM copies it outside its parameters"):
        trace(Holder(8, 6), lambda p, w: elsewhere.copy_(w))


def test_writing_an_element_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="weight: vLLM's loader writes 24 of its elements twice"):
        trace(Holder(8, 6), lambda p, w: (p.copy_(w), p[:4].copy_(w[:4])))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda p: p.flip(0).contiguous(), "weight: its values moved after loading"),
        (lambda p: p.t(), "weight: vLLM re-laid it after loading"),
        (lambda p: torch.empty(0), "weight: vLLM re-laid it after loading"),
        (None, "weight: vLLM removed it after loading"),
    ],
)
def test_read_back_finds_what_was_re_laid(fault: Callable[[Tensor], Tensor] | None, message: str) -> None:
    layout = trace(Holder(8, 6), lambda p, w: p.copy_(w))
    loaded = probe_values("w", SHAPE, torch.float32, torch.device("cpu"))
    prove_by_read_back(layout, {"weight": loaded.clone()}, NAMES)
    with pytest.raises(LayoutError, match=message):
        prove_by_read_back(layout, {} if fault is None else {"weight": fault(loaded.clone())}, NAMES)


def test_probe_values_are_exact_in_every_dtype_and_differ_by_name() -> None:
    cpu = torch.device("cpu")
    one = probe_values("a", (64, 64), torch.float32, cpu)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(probe_values("a", (64, 64), dtype, cpu).float(), one)
    assert not torch.equal(probe_values("b", (64, 64), torch.float32, cpu), one)


def bridge_of(live: dict[str, Tensor]) -> WeightBridge:
    """A gang of one, whose source and destination are the same dict with a parameter `weight` that `w` fills."""
    layout = VllmLayout({"weight": (Segment("w", (0, 0), SHAPE, 0, (6, 1)),)}, {})
    group = dist.group.WORLD
    assert group is not None
    sources = [ShardGroup((0,), layout.segments)]
    rollout = RolloutSide(layout, lambda: live)
    return WeightBridge(sources, lambda: live, rollout, NAMES, group, 1 << 20, lambda _rank: 0)


def unbound_parameter() -> str:
    try:
        bridge_of({"weight": torch.zeros(SHAPE), "forgotten": torch.zeros(3)})
    except LayoutError as error:
        return str(error)
    return "no error"


def re_laid_later(fault: str) -> str:
    """A parameter that takes another form after planning; moved storage alone is no fault."""
    live = {"weight": torch.zeros(SHAPE)}
    bridge = bridge_of(live)
    live["weight"] = torch.zeros(SHAPE)
    bridge.sync()
    weight = live.pop("weight")
    if fault == "strides":
        live["weight"] = weight.t().contiguous().t()
    elif fault == "dtype":
        live["weight"] = weight.bfloat16()
    elif fault == "new":
        live |= {"weight": weight, "other": weight}
    try:
        bridge.sync()
    except LayoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("strides", "weight: (shape, strides, dtype) was ((8, 6), (6, 1), 'torch.float32') when the weight sync was"),
        ("dtype", "is ((8, 6), (6, 1), 'torch.bfloat16') now"),
        ("removed", "and is None now"),
        ("new", "other: (shape, strides, dtype) was None"),
    ],
)
def test_a_parameter_re_laid_after_planning_is_refused(gang: Callable[[int], Gang], fault: str, message: str) -> None:
    """KNOWN_FAULTS 19."""
    assert message in gang(1).run(re_laid_later, fault)[0]


def test_an_unaccounted_parameter_is_refused(gang: Callable[[int], Gang]) -> None:
    """KNOWN_FAULTS 18."""
    message = gang(1).run(unbound_parameter)[0]
    assert message.startswith("vLLM's parameters hold 51 elements, of which 48 are bound or declared padding")
