"""Run by a gang: a real actor, a real vLLM and the bridge between them; or a fresh vLLM from a HF directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.export import export_hf
from converters.load import segment_view
from converters.rules.dense import hf_tensor_shapes
from converters.rules.families import facts_of
from mrl.bridge.megatron_layout import training_groups
from mrl.bridge.sync import LiveTensors, RolloutSide, WeightBridge
from mrl.bridge.vllm_layout import HF_SHAPES, LOAD_FORMAT, prove_by_read_back, register_traced_loader, vllm_parameters
from mrl.bridge.vllm_rules import rollout_layout
from mrl.config.schema import OptimSection, RolloutSection
from mrl.parallel import ParallelLayout, initialise_disjoint, shut_down_distributed
from mrl.rollout.engine import Completion, RolloutEngine, check_replica_agrees
from tests.engine.cases import LENGTHS, Bench, token_weights, weighted_log_prob_loss
from tests.rollout.engine_case import sample_rounds

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [3]]
SAMPLES = 2
MAX_RESPONSE = 12
TEMPERATURE = 0.7
EOS = [2, 77]
Dtype = Literal["float32", "bfloat16"]
FIXED = list(range(3, 27))


def start_vllm(
    path: str,
    rollout_tp: int,
    load_format: str,
    loader_config: dict[str, Any],
    dtype: Dtype = "float32",
) -> RolloutEngine:
    from mrl.platform import select_platform

    section = RolloutSection(tensor_model_parallel_size=rollout_tp, dtype=dtype, temperature=TEMPERATURE)
    return RolloutEngine(
        path,
        section,
        select_platform("cpu"),
        max_prompt_length=32,
        max_response_length=MAX_RESPONSE,
        eos_token_ids=EOS,
        seed=11,
        load_format=load_format,
        loader_config=loader_config,
        before_build=register_traced_loader,
    )


def reference_log_probs(path: Path) -> Tensor:
    """Of FIXED, by transformers in fp64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    tokens = torch.tensor(FIXED)
    with torch.no_grad():
        return model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]


def fresh_parameters(path: str, rollout_tp: int, dtype: Dtype = "float32") -> dict[str, Tensor]:
    """Parameters of a vLLM that loaded the HF directory by its own means."""
    engine = start_vllm(path, rollout_tp, "auto", {}, dtype)
    return {name: tensor.clone() for name, tensor in vllm_parameters(engine.model)}


def bridged(
    path: str, out: str, tp: int, pp: int, rollout_tp: int, bucket_bytes: int, first_stage: int | None = None
) -> dict[str, Any]:
    """Sync, train a step, sync again, export; returns what the test compares. Run once in a gang."""
    bench = Bench(path, tp, pp, "lm", optim=OptimSection(lr=1e-2), first_stage=first_stage)
    shapes = hf_tensor_shapes(bench.facts)
    rollout = start_vllm(path, rollout_tp, LOAD_FORMAT, {HF_SHAPES: shapes})
    layout = rollout.model.mrl_layout

    def live() -> dict[str, Tensor]:
        return dict(vllm_parameters(rollout.model))

    prove_by_read_back(layout, live(), shapes)
    group = dist.group.WORLD
    assert group is not None
    sources = training_groups(bench.facts, bench.layout, transformer_engine=False)
    rollout_side = RolloutSide(layout, live)
    bridge = WeightBridge(sources, bench.engine.parameters, rollout_side, shapes, group, bucket_bytes, lambda _rank: 0)

    first = bridge.sync()
    rollout.reset_prefix_cache()
    before = rollout.prompt_log_probs(FIXED)
    weights = token_weights((len(LENGTHS), max(r for _, r in LENGTHS)))
    micro = [m.with_fields(weights=weights) for m in bench.micro_batches(64)]
    bench.engine.train_step(micro, weighted_log_prob_loss)
    with recorded_communication() as sent:
        second = bridge.sync()
    bridge.verify()
    rollout.reset_prefix_cache()
    result = {
        "stats": [first, second],
        "communication": sent,
        "prompt_log_probs": [before, rollout.prompt_log_probs(FIXED)],
        "parameters": {name: tensor.clone() for name, tensor in live().items()},
        "elements": sum(t.numel() for t in live().values()),
        "pads": sum(layout.pad_elements.values()),
        "layout": layout.segments,
        "closed_form": rollout_layout(bench.facts, rollout_tp, dist.get_rank() % rollout_tp),
        **sample_rounds(rollout, rollout_tp, PROMPTS, SAMPLES),
    }
    rollout.reset_prefix_cache()
    export_hf(
        Path(path), Path(out), shapes, sources, bench.engine.parameters(), group, torch.float32, torch.device("cpu"),
        max_shard_bytes=200_000,
    )  # fmt: skip
    return result


def disjoint(path: str, out: str, port: int) -> dict[str, Any]:
    """Ranks 0-1 train (TP2, fp32), ranks 2-3 serve (TP2, bf16): neither has the other's groups or parameters."""
    shut_down_distributed()
    os.environ["MASTER_PORT"] = str(port)
    rank = int(os.environ["RANK"])
    group = initialise_disjoint("gloo", training_world=2, timeout_s=120)
    facts = facts_of(path)
    shapes = hf_tensor_shapes(facts)
    layout = ParallelLayout(2, 2)
    sources = training_groups(facts, layout, transformer_engine=False)
    rollout_side = None
    training: LiveTensors = dict
    if rank < 2:
        training = Bench(path, 2, 1, "lm").engine.parameters
    else:
        rollout = start_vllm(path, 2, LOAD_FORMAT, {HF_SHAPES: shapes}, "bfloat16")
        rollout_side = RolloutSide(rollout.model.mrl_layout, lambda: dict(vllm_parameters(rollout.model)))
        prove_by_read_back(rollout_side.layout, rollout_side.tensors(), shapes)
    bridge = WeightBridge(sources, training, rollout_side, shapes, group, 1 << 16, lambda _rank: 0)
    stats = bridge.sync()
    bridge.verify()
    result: dict[str, Any] = {"stats": stats, "parameters": {}}
    if rollout_side is None:
        assert dist.group.WORLD is not None
        export_hf(
            Path(path), Path(out), shapes, sources, training(), dist.group.WORLD, torch.float32, torch.device("cpu")
        )
    else:
        result["parameters"] = {name: tensor.clone() for name, tensor in rollout_side.tensors().items()}
        result["prompt_log_probs"] = rollout.prompt_log_probs(FIXED)
    return result


def pipelined(path: str) -> dict[str, Any]:
    """vLLM over two pipeline stages, filled from TP2. No generation: vLLM's CPU runner has none with stages."""
    from mrl.platform import select_platform

    bench = Bench(path, 2, 1, "lm")
    shapes = hf_tensor_shapes(bench.facts)
    platform = select_platform("cpu")
    os.environ.update(platform.vllm_environment(1))
    from vllm import LLM

    platform.prepare_vllm()
    register_traced_loader()
    engine = LLM(
        model=path, dtype="float32", pipeline_parallel_size=2, distributed_executor_backend="external_launcher",
        max_model_len=48, skip_tokenizer_init=True, enforce_eager=True, load_format=LOAD_FORMAT,
        model_loader_extra_config={HF_SHAPES: shapes},
    )  # fmt: skip
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    rollout = RolloutSide(model.mrl_layout, lambda: dict(vllm_parameters(model)))
    prove_by_read_back(rollout.layout, rollout.tensors(), shapes)
    sources = training_groups(bench.facts, bench.layout, transformer_engine=False)
    assert dist.group.WORLD is not None
    bridge = WeightBridge(sources, bench.engine.parameters, rollout, shapes, dist.group.WORLD, 1 << 16, lambda _rank: 0)
    stats = bridge.sync()
    weights = load_file(Path(path) / "model.safetensors")
    return {
        "stats": stats,
        "layout": rollout.layout.segments,
        "closed_form": rollout_layout(bench.facts, 1, 0, pp=2, pp_rank=dist.get_rank()),
        "wrong": [
            f"{name}: {segment.hf_name}"
            for name, segments in rollout.layout.segments.items()
            for segment in segments
            if not torch.equal(
                segment_view(rollout.tensors()[name], segment), weights[segment.hf_name][segment.box.slices]
            )
        ],
    }


def planted_disagreement() -> str:
    """Rank 1 sampled another token than rank 0: the error every rank gets."""
    from array import array

    group = dist.group.WORLD
    assert group is not None
    token = 5 + dist.get_rank()
    completion = Completion(0, 0, array("q", [token]), array("d", [-1.0]), "stop")
    try:
        check_replica_agrees([completion], group)
    except RuntimeError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def recorded_communication() -> Iterator[dict[str, int]]:
    """Count bytes given to isend and irecv on this rank; any other communication raises."""
    import torch.distributed.distributed_c10d as c10d

    counted = {"isend": 0, "irecv": 0}
    saved: list[tuple[Any, str, Any]] = []

    def patch(name: str, function: Any) -> None:
        for module in (dist, c10d):
            saved.append((module, name, getattr(module, name)))
            setattr(module, name, function)

    def counting(name: str) -> Any:
        plain = getattr(c10d, name)

        def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            counted[name] += tensor.nbytes
            return plain(tensor, *args, **kwargs)

        return wrapper

    def forbidden(name: str) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{name} during a sync")

        return wrapper

    for name in ("isend", "irecv"):
        patch(name, counting(name))
    for name in (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce", "scatter",
        "gather", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "send",
        "recv", "broadcast_object_list", "gather_object", "scatter_object_list",
    ):  # fmt: skip
        patch(name, forbidden(name))
    try:
        yield counted
    finally:
        for module, name, function in reversed(saved):
            setattr(module, name, function)
