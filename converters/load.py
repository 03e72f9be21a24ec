"""Filling a rank's parameters from a HF directory: only the slices that the rank holds are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from converters.hf_checkpoint import HFCheckpoint
from converters.rules import dense
from converters.rules.facts import ModelFacts
from converters.rules.segment import Segment, ShardLayout


def segment_view(parameter: Tensor, segment: Segment) -> Tensor:
    """The elements of `segment` inside `parameter`, as a view shaped like the HF box."""
    return parameter.as_strided(segment.size, segment.strides, parameter.storage_offset() + segment.offset)


def check_checkpoint(checkpoint: HFCheckpoint, facts: ModelFacts) -> None:
    """Raise one ValueError naming every tensor that does not fit the model."""
    twin = (dense.LM_HEAD, dense.EMBEDDING) if facts.tied_embeddings else None
    checkpoint.check(dense.hf_tensor_shapes(facts), twin)


@torch.no_grad()
def load_parameters(
    path: str | Path,
    facts: ModelFacts,
    layout: ShardLayout,
    parameters: Mapping[str, Tensor],
    own_init: frozenset[str] = frozenset(),
) -> None:
    """Fill `parameters` in place; pads become zero.

    Strict both ways: every parameter is in `layout` or in `own_init` (a value head, which no causal LM checkpoint
    has), and every HF tensor of the model is in the checkpoint. A copy casts to the parameter's dtype.
    """
    unmapped = parameters.keys() - layout.keys() - own_init
    unfilled = layout.keys() - parameters.keys()
    assert not unmapped, f"parameters without a rule: {sorted(unmapped)}"
    assert not unfilled, f"rules without a parameter: {sorted(unfilled)}"
    with HFCheckpoint(path) as checkpoint:
        check_checkpoint(checkpoint, facts)
        for name, segments in layout.items():
            parameter = parameters[name]
            filled = sum(segment.numel for segment in segments)
            assert filled <= parameter.numel(), f"{name}: {filled} elements for {parameter.numel()}"
            if filled < parameter.numel():
                parameter.zero_()
            for segment in segments:
                segment_view(parameter, segment).copy_(checkpoint.read(segment.hf_name, segment.box))
