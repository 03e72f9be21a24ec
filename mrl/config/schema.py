"""The configuration of a run. Every default of mrl stands here and only here; importable without torch.

A key has verl's name where the concept is the same. All models are strict: an unknown key or a value of the wrong type
is an error, never ignored. Units are in the field's comment; token budgets count prompt plus response tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Text = Annotated[str, Field(min_length=1)]
KlEstimator = Literal["k1", "k2", "k3", "abs"]


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, immutable once validated."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    """The policy to train: an ordinary HuggingFace directory."""

    path: Text
    """HuggingFace directory: config.json, tokenizer files and (unless init is random) safetensors."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` draws the weights from trainer.seed as transformers does, so a directory without weights will do."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of training; master weights and gradients are fp32 in both cases."""
    trust_remote_code: bool = False
    recompute: Literal["none", "full"] = "none"
    """`full` recomputes every layer's activations in the backward pass."""


class ParallelSection(Section):
    """How Megatron-Core splits actor, critic and reference. Data parallelism is what is left of the world."""

    tensor_model_parallel_size: Positive = 1
    pipeline_model_parallel_size: Positive = 1
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage where it is to differ from the others, which share the rest evenly."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """The same for the last stage."""
    sequence_parallel: bool = True
    """Takes effect where tensor_model_parallel_size > 1."""
    overlap_grad_reduce: bool = False


class OptimSection(Section):
    """Adam with decoupled weight decay; the schedule counts optimizer steps."""

    lr: PositiveFloat = 1e-6
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient-norm limit; 0 switches clipping off."""
    lr_warmup_steps: NonNegative = 0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0


class CriticOptimSection(OptimSection):
    lr: PositiveFloat = 1e-5


class ActorSection(Section):
    optim: OptimSection = OptimSection()
    ppo_mini_batch_size: Positive = 64
    """Prompts per optimizer step (times rollout.n samples)."""
    ppo_epochs: Positive = 1
    ppo_max_token_len_per_gpu: Positive = 16384
    """Tokens of one packed micro-batch; a single sequence longer than this is refused."""
    policy_loss: Literal["ppo"] = "ppo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    entropy_coeff: NonNegativeFloat = 0.0
    use_kl_loss: bool | None = None
    """False for ppo, True for grpo where null."""
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KlEstimator = "k3"
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    target_kl: PositiveFloat | None = None
    """Stops the epochs of one rollout batch early once mean k1(old, new) exceeds it."""


class CriticSection(Section):
    path: Text | None = None
    """HuggingFace directory the critic's trunk starts from; the actor's where null."""
    optim: CriticOptimSection = CriticOptimSection()
    ppo_mini_batch_size: Positive | None = None
    """The actor's where null."""
    ppo_epochs: Positive | None = None
    """The actor's where null."""
    ppo_max_token_len_per_gpu: Positive | None = None
    """The actor's where null."""
    value_clip: PositiveFloat | None = 0.2


class RefSection(Section):
    ppo_max_token_len_per_gpu: Positive | None = None
    """Token budget of a forward-only micro-batch; the actor's where null."""


class RewardSection(Section):
    function: Text
    """`path/to/file.py:function_name`, or a built-in: `exact_match`, `regex_match`, `contains`."""
    style: Literal["sample", "batch"] = "sample"
    """`sample` calls compute_score(...) once a sample, `batch` fn(prompts, completions, **columns) once a group."""
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments passed to the function."""
    num_workers: Positive = 1
    """Processes per rollout replica that score finished samples while others still generate."""
    timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 60.0
    on_error: Literal["stop", "drop"] = "stop"
    """`drop` masks the sample out of every loss and counts it; a wrong-length list always stops."""


class RolloutSection(Section):
    n: Positive = 1
    """Samples per prompt."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """vLLM samples greedily or clamps below 0.01, and the log-probs would not be the sampler's."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Fraction = 0.0
    tensor_model_parallel_size: Positive = 1
    """vLLM's tensor parallelism; the rest of the world is rollout replicas."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """model.dtype where null."""
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 8192
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    """Switches CUDA graphs off; the CPU platform always runs eagerly."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    kv_cache_gib: Positive = 1
    """KV-cache size in whole GiB on the CPU platform (on CUDA gpu_memory_utilization decides)."""
    stop: list[str] = []
    """Stop strings; any entry switches vLLM's detokenising on, at about half the speed."""
    ignore_eos: bool = False


class KlControlSection(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    target_kl_per_token: PositiveFloat = 0.01
    horizon: Positive = 10000
    """Samples over which the adaptive controller corrects a full relative error."""


class RolloutCorrectionSection(Section):
    """Importance weights for the gap between rollout and trainer log-probabilities."""

    mode: Literal["off", "token"] = "token"
    cap: PositiveFloat = 2.0


class AlgorithmSection(Section):
    name: Literal["ppo", "grpo"] = "ppo"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    adv_estimator: Literal["gae", "grpo"] | None = None
    """gae for ppo and grpo for grpo where null."""
    norm_adv_by_std_in_grpo: bool = True
    whiten_advantages: bool = True
    """gae only: zero mean and unit variance over the whole rollout batch."""
    use_kl_in_reward: bool | None = None
    """True for ppo, False for grpo where null."""
    kl_penalty: KlEstimator = "k1"
    kl_ctrl: KlControlSection = KlControlSection()
    use_rollout_log_probs: bool = False
    """Bypass: take vLLM's log-probs as the old ones instead of recomputing them in the trainer."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    bootstrap_truncated: bool = False
    """gae only: a response cut at the length limit continues with its last value instead of ending at 0."""
    truncated: Literal["keep", "zero_reward", "mask"] = "keep"
    """What happens to a response cut at the length limit: nothing, score 0, or out of every loss."""
    debug: bool = False
    """Assert that the first mini-batch's ratio is 1 (1e-6 in fp32)."""


class DataSection(Section):
    train_files: Text | list[Text]
    """jsonl or parquet files, read in the given order."""
    prompt_key: str = "prompt"
    train_batch_size: Positive = 64
    """Prompts per step, over all ranks."""
    max_prompt_length: Positive = 512
    max_response_length: Positive = 512
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length (counted and said) instead of refusing them."""
    shuffle: bool = True
    apply_chat_template: bool | None = None
    """True for message lists and False for plain text where null."""


class BridgeSection(Section):
    bucket_mib: Positive = 256
    """Staging memory of one bucket; a sync holds at most two."""
    verify: NonNegative = 0
    """Compare fingerprints of both sides at every n-th step's sync and at the first; 1 is every step, 0 never."""
    relay_within_node: bool = True
    """With several rollout replicas on a machine, a byte comes in from other machines once and is passed on inside."""


class TrainerSection(Section):
    total_steps: Positive
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    run_dir: Text | None = None
    """runs/<config name> where null."""
    overwrite: bool = False
    nproc_per_node: Positive = 1
    """Processes that `mrl train` starts on this machine; torchrun's own number wins where torchrun starts mrl."""
    nnodes: Positive = 1
    """Machines of the job, for `mrl check` and `mrl plan`; `mrl train` by itself starts one."""
    log_rollouts: NonNegative = 64
    """Rows per step written to rollouts.jsonl; 0 writes none."""
    tensorboard: bool = False
    platform: Literal["auto", "cpu", "cuda"] = "auto"


class RunConfig(Section):
    """A whole run. Cross-section rules are in mrl.config.rules, so that all violations are reported together."""

    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    ref: RefSection = RefSection()
    reward: RewardSection
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    data: DataSection
    bridge: BridgeSection = BridgeSection()
    trainer: TrainerSection

    @model_validator(mode="after")
    def _resolve_inherited(self) -> RunConfig:
        """Fill the keys whose default is another key, so that code below reads one resolved value."""
        is_ppo = self.algorithm.name == "ppo"
        budget = self.actor.ppo_max_token_len_per_gpu
        inherited: dict[str, dict[str, Any]] = {
            "actor": {"use_kl_loss": not is_ppo},
            "critic": {
                "path": self.model.path,
                "ppo_mini_batch_size": self.actor.ppo_mini_batch_size,
                "ppo_epochs": self.actor.ppo_epochs,
                "ppo_max_token_len_per_gpu": budget,
            },
            "ref": {"ppo_max_token_len_per_gpu": budget},
            "rollout": {"dtype": self.model.dtype},
            "algorithm": {"adv_estimator": "gae" if is_ppo else "grpo", "use_kl_in_reward": is_ppo},
        }
        for name, values in inherited.items():
            section = self.__dict__[name]
            unset = {key: value for key, value in values.items() if section.__dict__[key] is None}
            # A copy: the section may be the class's own default, shared by every config of this process.
            self.__dict__[name] = section.model_copy(update=unset)
        return self

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def needs_ref(self) -> bool:
        return bool(self.algorithm.use_kl_in_reward) or bool(self.actor.use_kl_loss)

    def prompt_files(self) -> list[Path]:
        files = self.data.train_files
        return [Path(f) for f in ([files] if isinstance(files, str) else files)]
