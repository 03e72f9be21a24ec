"""Building the parts of a run on one rank, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.export import export_hf
from converters.rules.dense import hf_tensor_shapes
from converters.rules.facts import ModelFacts
from converters.rules.families import facts_of
from mrl.bridge.megatron_layout import training_groups
from mrl.bridge.sync import RolloutSide, WeightBridge
from mrl.bridge.vllm_layout import HF_SHAPES, LOAD_FORMAT, prove_by_read_back, register_traced_loader, vllm_parameters
from mrl.config.rules import optimizer_steps
from mrl.config.schema import OptimSection, RunConfig
from mrl.data.prompts import EncodedPrompt, encode_configured_prompts
from mrl.data.tokenizer import TokenizerFacts, load_tokenizer, read_tokenizer_facts
from mrl.engine.engine import EngineOptions, MegatronEngine
from mrl.learner import Learner, Sequences
from mrl.models.rope import read_rope
from mrl.parallel import ParallelLayout, initialise_megatron, node_of, parallel_layout
from mrl.platform import Platform
from mrl.rewards.scorer import RewardScorer
from mrl.rl.kl import build_kl_controller
from mrl.rollout.engine import RolloutEngine
from mrl.stages import Stages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GATES = {"float32": 1.0001, "bfloat16": 1.02}
"""mean(exp |d log p|) that rollout and trainer may differ by on the first sync (NUMERICS)."""


@dataclass
class Parts:
    """What a trainer drives."""

    rank: int
    world: int
    layout: ParallelLayout
    facts: ModelFacts
    tokenizer: Any
    prompts: list[EncodedPrompt]
    learner: Learner
    rollout: RolloutEngine
    stages: Stages
    scorer: RewardScorer | None
    host_group: dist.ProcessGroup
    platform: Platform
    model_path: Path

    def export(self, target: Path) -> None:
        """Write the actor as a HF directory. Collective."""
        actor = self.learner.actor
        export_hf(
            self.model_path,
            target,
            hf_tensor_shapes(self.facts),
            training_groups(self.facts, self.layout, self.platform.transformer_engine),
            actor.parameters(),
            dist.group.WORLD,
            actor.options.dtype,
            self.platform.device,
        )

    def check_behaviour(self) -> None:
        """After the first sync vLLM must compute the actor's function: prompt log-probs on fixed tokens agree.

        Catches what no layout can show: a copy of the weights that vLLM made elsewhere. Raises ValueError.
        """
        tokens = self._fixed_tokens()
        sequences = Sequences(
            [tokens[:1]],
            tokens[None, 1:],
            torch.tensor([len(tokens) - 1]),
            torch.ones(1, len(tokens) - 1, dtype=torch.bool),
        )
        ours = self.learner.old_log_probs(sequences, temperature=1.0)[0]
        theirs = torch.tensor(self.rollout.prompt_log_probs(tokens.tolist()))
        self.rollout.reset_prefix_cache()
        mismatch = float((ours - theirs).abs().exp().mean())
        worst = torch.tensor(mismatch, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.host_group)
        config = self.learner.config
        gate = max(GATES[config.model.dtype], GATES[str(config.rollout.dtype)])
        if not float(worst) < gate:
            raise ValueError(
                f"after the first weight sync vLLM's log-probs differ from the trainer's: mean exp|dlogp| is "
                f"{float(worst):.5f}, allowed below {gate}; this vLLM computes from other weights than its parameters"
            )

    def _fixed_tokens(self) -> Tensor:
        """64, or as many as fit vLLM's maximum length with one sampled after them."""
        data = self.learner.config.data
        length = min(64, data.max_prompt_length + data.max_response_length - 1)
        generator = torch.Generator().manual_seed(64)
        return torch.randint(0, self.facts.vocab_size, (max(2, length),), generator=generator)

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()


def build_parts(
    config: RunConfig,
    run_dir: Path,
    platform: Platform,
    rank: int,
    world: int,
    phase: Callable[[str], None],
    message: Callable[[str], None],
) -> Parts:
    """Everything but the loop. Collective; raises ValueError for what a user did.

    phase(text): what is going on; message(text): a line that stays.
    """
    host_group = dist.new_group(backend="gloo")
    model_path = _model_path(config, run_dir, rank, host_group)
    facts = facts_of(model_path)
    tokenizer = load_tokenizer(model_path, config.model.trust_remote_code)
    tokenizer_facts = read_tokenizer_facts(model_path, tokenizer)
    encoded = encode_configured_prompts(config, tokenizer)
    if encoded.num_filtered:
        message(
            f"{encoded.num_filtered} of {encoded.num_filtered + len(encoded.prompts)} prompts are longer than "
            f"data.max_prompt_length={config.data.max_prompt_length} and left out"
        )
    scorer = _scorer(config, rank)

    layout = parallel_layout(config.parallel, world)
    phase("building the models")
    with platform.megatron():
        initialise_megatron(layout, config.trainer.seed)
    learner = _build_learner(config, layout, rank, platform, model_path, host_group)

    phase("starting vLLM")
    rollout, bridge = _build_rollout(config, facts, platform, model_path, tokenizer_facts, learner.actor)
    control = config.algorithm.kl_ctrl
    stages = Stages(
        config,
        rank,
        world,
        tokenizer,
        learner,
        rollout,
        scorer,
        bridge,
        platform,
        build_kl_controller(control.type, control.kl_coef, control.target_kl_per_token, control.horizon),
        rollout_group=host_group,
        reward_group=dist.new_group(backend="gloo"),
        replica_group=_replica_group(rank, world, config.rollout.tensor_model_parallel_size),
    )
    return Parts(
        rank,
        world,
        layout,
        facts,
        tokenizer,
        encoded.prompts,
        learner,
        rollout,
        stages,
        scorer,
        host_group,
        platform,
        model_path,
    )


def _model_path(config: RunConfig, run_dir: Path, rank: int, group: dist.ProcessGroup) -> Path:
    """The directory to load from; with model.init=random rank 0 first writes one drawn from trainer.seed."""
    source = Path(config.model.path)
    if config.model.init == "pretrained":
        return source
    target = run_dir / "init"
    if rank == 0:
        from mrl.random_init import write_random_model

        write_random_model(source, target, config.trainer.seed)
    dist.barrier(group)
    return target


def _scorer(config: RunConfig, rank: int) -> RewardScorer | None:
    """Each sample is scored once, on TP rank 0 of its replica."""
    if rank % config.rollout.tensor_model_parallel_size:
        return None
    reward = config.reward
    return RewardScorer(
        reward.function,
        style=reward.style,
        kwargs=reward.kwargs,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        group_size=config.rollout.n,
    )


def _build_learner(
    config: RunConfig,
    layout: ParallelLayout,
    rank: int,
    platform: Platform,
    model_path: Path,
    host_group: dist.ProcessGroup,
) -> Learner:
    def engine(head: Any, optim: OptimSection | None, path: Path, steps: int) -> MegatronEngine:
        options = EngineOptions(
            head=head,
            dtype=DTYPES[config.model.dtype],
            temperature=config.rollout.temperature,
            recompute=config.model.recompute if optim is not None else "none",
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            optim=optim,
            total_steps=steps,
        )
        rope = read_rope(path, config.data.max_prompt_length + config.data.max_response_length)
        built = MegatronEngine(facts_of(path), layout, rank, rope, options, platform)
        built.load_hf(path)
        return built

    steps = config.trainer.total_steps
    actor = engine("lm", config.actor.optim, model_path, steps * optimizer_steps(config, config.actor))
    critic = ref = None
    if config.needs_critic:
        section = config.critic
        assert section.path is not None
        path = model_path if section.path == config.model.path else Path(section.path)
        critic = engine("value", section.optim, path, steps * optimizer_steps(config, section))
    if config.needs_ref:
        ref = engine("lm", None, model_path, 1)
    return Learner(config, layout, rank, actor, critic, ref, host_group)


def _build_rollout(
    config: RunConfig,
    facts: ModelFacts,
    platform: Platform,
    model_path: Path,
    tokenizer_facts: TokenizerFacts,
    actor: MegatronEngine,
) -> tuple[RolloutEngine, WeightBridge]:
    shapes = hf_tensor_shapes(facts)
    rollout = RolloutEngine(
        str(model_path),
        config.rollout,
        platform,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        eos_token_ids=tokenizer_facts.eos_token_ids,
        seed=config.trainer.seed,
        load_format=LOAD_FORMAT,
        loader_config={HF_SHAPES: shapes},
        before_build=register_traced_loader,
        trust_remote_code=config.model.trust_remote_code,
    )

    def live() -> dict[str, Tensor]:
        return dict(vllm_parameters(rollout.model))

    layout = rollout.model.mrl_layout
    prove_by_read_back(layout, live(), shapes)
    sources = training_groups(facts, actor.layout, platform.transformer_engine)
    group = dist.group.WORLD
    assert group is not None
    bridge = WeightBridge(
        sources,
        actor.parameters,
        RolloutSide(layout, live),
        shapes,
        group,
        config.bridge.bucket_mib << 20,
        node_of,
        config.bridge.relay_within_node,
    )
    return rollout, bridge


def _replica_group(rank: int, world: int, tp: int) -> dist.ProcessGroup:
    """The gloo group of this rank's rollout replica; every rank makes all of them."""
    groups = [dist.new_group(list(range(first, first + tp)), backend="gloo") for first in range(0, world, tp)]
    return groups[rank // tp]
