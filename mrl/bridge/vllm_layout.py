"""vLLM's layout on this rank: traced from vLLM's own loader, then proven by reading real weights back.

vLLM is started with the load format `mrl_traced`. Its loader first traces `model.load_weights` (nothing is written),
then loads one deterministic set of values through the same call, before vLLM post-processes its layers.
`prove_by_read_back` then reads every parameter through its Segments: a layer that vLLM re-packed after loading differs,
and is an error naming it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from converters.load import segment_view
from converters.rules.segment import Segment
from mrl.bridge.tracing import Write, segment_of, trace_loader

LOAD_FORMAT = "mrl_traced"
HF_SHAPES = "mrl_hf_shapes"
"""Key of model_loader_extra_config under which the caller passes the HF tensors' shapes."""


class LayoutError(ValueError):
    """vLLM's parameters cannot be written by plan: the text names the parameter and the reason."""


@dataclass(frozen=True)
class VllmLayout:
    """Parameter name -> Segments, for every parameter of this rank's vLLM model (a tied one under its first name)."""

    segments: dict[str, tuple[Segment, ...]]
    pad_elements: dict[str, int]
    """Elements that no HF tensor fills (vocabulary padding), by parameter; zeroed once."""

    @property
    def elements_bound(self) -> int:
        return sum(s.numel for segments in self.segments.values() for s in segments)


def register_traced_loader() -> None:
    """Teach vLLM the load format `mrl_traced`. Call once vLLM is importable, before the engine is built."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class TracedLoader(BaseModelLoader):
        """Traces the model's own load_weights, then fills it with known values."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to download: the weights come from the trainer."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            hf_shapes = self.load_config.model_loader_extra_config[HF_SHAPES]
            shapes = {name: tuple(shape) for name, shape in hf_shapes.items()}
            dtype = model_config.dtype
            writes = trace_loader(model.load_weights, shapes, dtype)
            model.mrl_layout = layout_from_writes(model, writes)
            device = next(model.parameters()).device
            model.load_weights((name, probe_values(name, shape, dtype, device)) for name, shape in shapes.items())

    register_model_loader(LOAD_FORMAT)(TracedLoader)


def probe_values(hf_name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Known values of a HF tensor: small integers (exact in every float dtype) drawn from the tensor's name."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(hf_name.encode()))
    return torch.randint(-127, 128, shape, generator=generator, device=device, dtype=torch.int16).to(dtype)


def layout_from_writes(model: nn.Module, writes: list[Write]) -> VllmLayout:
    """Attribute each write to the parameter whose memory it lies in; refuse a write outside any parameter."""
    by_storage: dict[int, list[tuple[str, Tensor, int, int]]] = {}
    for name, parameter in model.named_parameters():  # a tied parameter comes once, under its first name
        first = parameter.storage_offset()
        span = (name, parameter, first, first + parameter.numel())
        by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(span)
    segments: dict[str, list[Segment]] = {name: [] for name, _ in model.named_parameters()}
    for write in writes:
        spans = by_storage.get(write.target.untyped_storage().data_ptr(), [])
        offset = write.target.storage_offset()
        owner = next(((name, first) for name, _, first, last in spans if first <= offset < last), None)
        if owner is None:
            raise LayoutError(f"{write.hf_name}: vLLM copies it outside its parameters; it cannot be synchronised")
        segments[owner[0]].append(segment_of(write, owner[1]))
    pads = {}
    for name, parameter in model.named_parameters():
        missing = parameter.numel() - sum(s.numel for s in segments[name])
        if missing < 0:
            raise LayoutError(f"{name}: vLLM's loader writes {-missing} of its elements twice")
        if missing and not _is_vocabulary(model, name):
            raise LayoutError(
                f"{name}: {missing} of {parameter.numel()} elements are filled by no HF tensor; "
                "this model cannot be synchronised"
            )
        if missing:
            pads[name] = missing
    return VllmLayout({name: tuple(parts) for name, parts in segments.items()}, pads)


def _is_vocabulary(model: nn.Module, parameter: str) -> bool:
    """Only vocabulary parameters may have pad rows."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), VocabParallelEmbedding)


def prove_by_read_back(
    layout: VllmLayout, parameters: Mapping[str, Tensor], hf_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Read every parameter back through its Segments and compare with what was loaded, bit for bit.

    Raises LayoutError naming a parameter that vLLM removed, re-shaped or re-packed after loading.
    """
    readers: dict[str, list[tuple[str, Segment]]] = {}
    for name, segments in layout.segments.items():
        if name not in parameters:
            raise LayoutError(f"{name}: vLLM removed it after loading; its weights cannot be written")
        needed = max((s.offset + _extent(s) for s in segments), default=0)
        if parameters[name].numel() < needed or not parameters[name].is_contiguous():
            raise LayoutError(f"{name}: vLLM re-laid it after loading (shape now {tuple(parameters[name].shape)})")
        for segment in segments:
            readers.setdefault(segment.hf_name, []).append((name, segment))
    for hf_name, held in readers.items():
        parameter = parameters[held[0][0]]
        values = probe_values(hf_name, hf_shapes[hf_name], parameter.dtype, parameter.device)
        for name, segment in held:
            box = values[segment.box.slices]
            if not torch.equal(segment_view(parameters[name], segment), box):
                raise LayoutError(
                    f"{name}: its values moved after loading (vLLM re-packed the layer); writing {hf_name} "
                    "into it would be wrong, and mrl has no re-pack rule for it"
                )


def _extent(segment: Segment) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(segment.size, segment.strides, strict=True))


def vllm_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The live parameters, tied ones once."""
    return ((name, parameter.data) for name, parameter in model.named_parameters())
