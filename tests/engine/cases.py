"""What the ranks of a gang run: engines over tiny models, their outputs and gradients in HF coordinates.

Every function is importable and takes plain arguments; results come back as CPU tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.load import segment_view
from converters.rules.families import facts_of
from converters.rules.segment import Box
from mrl.config.schema import OptimSection
from mrl.data.batching import build_micro_batches
from mrl.data.micro_batch import MicroBatch
from mrl.engine.engine import EngineOptions, HeadOutput, MegatronEngine
from mrl.models.rope import read_rope
from mrl.parallel import ParallelLayout, initialise_megatron
from mrl.platform import select_platform

LENGTHS = [(3, 4), (1, 1), (5, 7), (1, 9), (2, 2), (6, 1), (1, 12), (4, 3)]
"""(prompt, response) tokens of the test sequences: odd lengths, one-token prompts and responses."""


UNPACKED = 0
"""A token budget that stands for one sequence a micro-batch."""


def sequences(vocab: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """prompts, responses [B, R], lengths [B], mask [B, R]; one response has a gap in its mask."""
    generator = torch.Generator().manual_seed(3)
    width = max(r for _, r in LENGTHS)
    prompts = [torch.randint(0, vocab, (p,), generator=generator) for p, _ in LENGTHS]
    responses = torch.randint(0, vocab, (len(LENGTHS), width), generator=generator)
    lengths = torch.tensor([r for _, r in LENGTHS])
    mask = torch.arange(width) < lengths[:, None]
    mask[2, 2:4] = False
    return prompts, responses, lengths, mask


def token_weights(shape: tuple[int, int]) -> Tensor:
    """Arbitrary weights of a test loss, so that no token's gradient can hide behind another's."""
    return torch.linspace(-1.0, 2.0, shape[0] * shape[1]).view(shape)


def destroy_megatron(kept: set[dist.ProcessGroup]) -> None:
    """Take Megatron-Core's groups down, so that another layout can follow. Each gloo group left would cost threads.

    kept: the groups that were there before Megatron-Core's.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
    gc.collect()  # engines hold groups, in cycles


def micro_batches(vocab: int, layout: ParallelLayout, rank: int, max_tokens: int) -> list[MicroBatch]:
    """A rank's micro-batches of the test sequences, packed to the budget; with UNPACKED one sequence in each."""
    prompts, responses, lengths, mask = sequences(vocab)
    everything = list(range(len(prompts)))
    unpacked = max_tokens == UNPACKED
    return [
        micro
        for samples in ([[i] for i in everything] if unpacked else [everything])
        for micro in build_micro_batches(
            prompts,
            responses,
            lengths,
            mask,
            samples,
            dp_size=layout.dp,
            dp_rank=layout.coordinates(rank).dp,
            max_tokens=1 << 20 if unpacked else max_tokens,
            pad_multiple=layout.tp if layout.sequence_parallel else 1,
        )
    ]


class Bench:
    """An engine of one layout in this gang, torn down with its groups."""

    def __init__(
        self, path: str, tp: int, pp: int, head: str, *, optim: OptimSection | None = None, **options: Any
    ) -> None:
        platform = select_platform("cpu")
        rank, world = dist.get_rank(), dist.get_world_size()
        sequence_parallel = options.pop("sequence_parallel", tp > 1)
        max_length = options.pop("max_length", 64)
        self.layout = ParallelLayout(
            world, tp, pp, sequence_parallel=sequence_parallel, first_stage_layers=options.pop("first_stage", None)
        )
        self._kept_groups = set(dist.distributed_c10d._world.pg_map)
        with platform.megatron():
            initialise_megatron(self.layout, seed=1)
        self.facts = facts_of(path)
        self.engine = MegatronEngine(
            self.facts,
            self.layout,
            rank,
            read_rope(path, max_length),
            EngineOptions(head, options.pop("dtype", torch.float32), optim=optim, **options),  # type: ignore[arg-type]
            platform,
        )
        self.engine.load_hf(path)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        dist.barrier()
        del self.engine
        destroy_megatron(self._kept_groups)

    def micro_batches(self, max_tokens: int) -> list[MicroBatch]:
        return micro_batches(self.facts.vocab_size, self.layout, self.engine.rank, max_tokens)

    def hf_gradients(self) -> dict[str, Tensor]:
        """The mean gradient of every HF tensor (fp32), pieced together on rank 0 from all ranks' shards."""
        engine = self.engine
        _gather_dp_shards(engine)
        pieces = []
        for name, segments in engine.layout_of(engine.rank).items():
            grad = dict(engine._model.named_parameters())[name].main_grad
            pieces += [(s.hf_name, s.start, segment_view(grad, s).clone()) for s in segments]
        if engine.options.head == "value" and engine._model.post_process:
            pieces.append(("score.weight", (0, 0), engine._model.output_layer.weight.main_grad.clone()))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, pieces)
        return _assemble([piece for rank in gathered for piece in rank], self.facts)


def _gather_dp_shards(engine: MegatronEngine) -> None:
    """After the reduce-scatter each DP rank holds its shard of the summed gradient: complete it everywhere."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    size, me = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return
    for buffer in engine._chunk.buffers:
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(size))
            dist.all_gather(shards, shards[me].clone(), group=group)


def _assemble(pieces: list[tuple[str, tuple[int, ...], Tensor]], facts: Any) -> dict[str, Tensor]:
    from converters.rules.dense import hf_tensor_shapes

    shapes = hf_tensor_shapes(facts) | {"score.weight": (1, facts.hidden_size)}
    out: dict[str, Tensor] = {}
    for name, start, piece in pieces:
        whole = out.setdefault(name, torch.full(shapes[name], torch.nan))
        box = whole[Box(start, tuple(piece.shape)).slices]
        held = ~box.isnan()
        # Replicas (TP for norms, DP, tied stages) must agree.
        assert torch.equal(box[held], piece[held]), f"{name}: ranks hold different gradients"
        box.copy_(piece)
    return out


def full_log_probs(path: str, tp: int, pp: int, max_tokens: int, **options: Any) -> dict[int, Tensor] | None:
    """log softmax over the whole vocabulary at every scored position, {slot: [V]}, on rank 0 (else None).

    Every vocabulary entry is scored as a target of its own, through the engine's ordinary path.
    """
    with Bench(path, tp, pp, "lm", **options) as bench:
        vocab = bench.facts.vocab_size
        every = []
        for micro in bench.micro_batches(max_tokens):
            targets = torch.arange(vocab).repeat(micro.count)
            states, slots = micro.states.repeat_interleave(vocab), micro.slots.repeat_interleave(vocab)
            every.append(
                MicroBatch(
                    micro.tokens, micro.positions, micro.cu_seqlens, micro.max_seqlen,
                    states, targets, slots * vocab + targets, {},
                )
            )  # fmt: skip
        width = max(r for _, r in LENGTHS)
        scored = bench.engine.score(every, (len(LENGTHS), width * vocab))
        return scored.view(len(LENGTHS) * width, vocab) if dist.get_rank() == 0 else None


def weighted_log_prob_loss(output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, Any]:
    assert output.log_probs is not None
    assert output.entropy is not None
    loss = micro.fields["weights"] * (output.log_probs + 0.3 * output.entropy)
    return loss.sum(), loss.sum().item()


def squared_value_loss(output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, Any]:
    assert output.values is not None
    loss = (output.values - micro.fields["weights"]).square()
    return loss.sum(), loss.sum().item()


def gradients(
    path: str, tp: int, pp: int, head: str, max_tokens: int, **options: Any
) -> tuple[float, dict[str, Tensor]] | None:
    """(summed loss over all DP ranks, mean gradient by HF name), on rank 0."""
    with Bench(path, tp, pp, head, optim=OptimSection(lr=1e-3), **options) as bench:
        if head == "value" and bench.engine._model.post_process:
            fill_value_head(bench.engine)
        width = max(r for _, r in LENGTHS)
        weights = token_weights((len(LENGTHS), width))
        micro = [m.with_fields(weights=weights) for m in bench.micro_batches(max_tokens)]
        losses: list[float] = []
        loss: Callable[..., Any] = weighted_log_prob_loss if head == "lm" else squared_value_loss
        bench.engine.accumulate_gradients(micro, loss, losses)
        total = torch.tensor(sum(losses) if bench.engine._speaks() else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        grads = bench.hf_gradients()
        return (float(total), grads) if dist.get_rank() == 0 else None


def fill_value_head(engine: MegatronEngine) -> None:
    """A value head that is not zero, the same in every layout, so that the trunk gets a gradient."""
    weight = engine._model.output_layer.weight
    weight.data.copy_(value_head_weight(weight.shape[1]))


def value_head_weight(hidden: int) -> Tensor:
    return torch.linspace(-0.5, 0.7, hidden)[None]


def train(path: str, tp: int, pp: int, steps: int, poison_rank: int | None = None) -> dict[str, Any] | None:
    """`steps` AdamW steps on the test loss; with `poison_rank` that rank's loss is NaN in every step."""
    section = OptimSection(lr=1e-2, weight_decay=0.1, clip_grad=1.0, betas=(0.9, 0.95))
    with Bench(path, tp, pp, "lm", optim=section, total_steps=steps) as bench:
        before = {name: p.clone() for name, p in bench.engine.parameters().items()}
        micro = [
            m.with_fields(weights=token_weights((len(LENGTHS), max(r for _, r in LENGTHS))))
            for m in bench.micro_batches(64)
        ]

        def loss(output: HeadOutput, batch: MicroBatch) -> tuple[Tensor, Any]:
            total, _ = weighted_log_prob_loss(output, batch)
            return (total * torch.nan if dist.get_rank() == poison_rank else total), None

        outcomes = [bench.engine.train_step(micro, loss)[0] for _ in range(steps)]
        after = bench.engine.parameters()
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        return {
            "outcomes": outcomes,
            "unchanged": unchanged,
            "weights": hf_weights(bench),
        }


def hf_weights(bench: Bench) -> dict[str, Tensor]:
    """The model's weights by HF name, pieced together from all ranks."""
    engine = bench.engine
    pieces = [
        (s.hf_name, s.start, segment_view(parameter, s).float().clone())
        for name, parameter in engine.parameters().items()
        if name in engine.layout_of(engine.rank)
        for s in engine.layout_of(engine.rank)[name]
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    return _assemble([piece for rank in gathered for piece in rank], bench.facts)


def padded_rows_gradient(path: str, tp: int) -> float:
    """Largest |gradient| over this rank's vocabulary pad rows (embedding and head)."""
    with Bench(path, tp, 1, "lm", optim=OptimSection(lr=1e-3)) as bench:
        micro = [
            m.with_fields(weights=token_weights((len(LENGTHS), max(r for _, r in LENGTHS))))
            for m in bench.micro_batches(64)
        ]
        bench.engine.accumulate_gradients(micro, weighted_log_prob_loss, [])
        held = bench.engine.layout_of(dist.get_rank())
        largest = 0.0
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            grad = dict(bench.engine._model.named_parameters())[name].main_grad
            rows = sum(s.size[0] for s in held[name])
            largest = max(largest, float(grad[rows:].abs().max()) if rows < grad.shape[0] else 0.0)
        return largest


def scored(path: str, tp: int, pp: int, head: str, max_tokens: int) -> Tensor:
    with Bench(path, tp, pp, head) as bench:
        shape = (len(LENGTHS), max(r for _, r in LENGTHS))
        return bench.engine.score(bench.micro_batches(max_tokens), shape)


def entropies(path: str, tp: int) -> Tensor:
    """Entropy at every scored position, [B, R], as the training pass hands it to a loss."""
    with Bench(path, tp, 1, "lm", optim=OptimSection()) as bench:
        shape = (len(LENGTHS), max(r for _, r in LENGTHS))
        flat = torch.zeros(shape[0] * shape[1])

        def loss(output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, Any]:
            assert output.log_probs is not None
            assert output.entropy is not None
            flat[micro.slots] = output.entropy.detach()
            return output.log_probs.sum(), None

        bench.engine.accumulate_gradients(bench.micro_batches(UNPACKED), loss, [])
        return flat.view(shape)
