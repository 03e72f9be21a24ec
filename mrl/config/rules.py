"""Rules that span sections, the world and the model: pure functions, all findings at once, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from converters.rules.facts import ModelFacts
from converters.rules.pipeline import PipelineSplit
from mrl.config.schema import (
    ActorSection,
    AlgorithmSection,
    CriticSection,
    KlControlSection,
    RolloutCorrectionSection,
    RunConfig,
    Section,
)


def violations(config: RunConfig, world_size: int, models: Mapping[str, ModelFacts]) -> list[str]:
    """What makes the run impossible or wrong, a line each: keys with values, then the way out.

    world_size: ranks of all nodes. models: by config key (`model.path`, `critic.path`), those that could be read.
    """
    found = layout_violations(config, world_size, models)
    found += [*_batches(config, world_size), *_lengths(config), *_sampling(config)]
    for key, facts in models.items():
        found += _positions(config, facts, _whose(key))
    if len(models) == 2 and models["critic.path"].vocab_size != models["model.path"].vocab_size:
        found.append(
            f"critic.path's vocab_size={models['critic.path'].vocab_size} is not model.path's "
            f"{models['model.path'].vocab_size}: the two read tokens differently; take a critic of the same vocabulary"
        )
    return found


def layout_violations(config: RunConfig, world_size: int, models: Mapping[str, ModelFacts]) -> list[str]:
    """Those of `violations` that concern how world and models are cut."""
    found = list(_layout(config, world_size))
    for key, facts in models.items():
        found += _training_cut(config, world_size, facts, _whose(key))
    if "model.path" in models:
        found += _rollout_cut(config, world_size, models["model.path"])
    return found


def _whose(key: str) -> str:
    return "the model's" if key == "model.path" else f"{key}'s"


def fitting_world(config: RunConfig) -> int:
    """The smallest world that both parallel layouts divide."""
    training = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    return math.lcm(training, config.rollout.tensor_model_parallel_size)


def warnings(config: RunConfig) -> list[str]:
    """Settings that differ from their default and have no effect in this run, a line each."""
    return [*_idle_algorithm(config), *_idle_sections(config), *_idle_schedule(config)]


def optimizer_steps(config: RunConfig, section: ActorSection | CriticSection) -> int:
    """Optimizer steps of a role per rollout batch."""
    mini, epochs, _ = _resolved(section)
    return config.data.train_batch_size // mini * epochs


def batch_arithmetic(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    """(what, how it comes about) of the numbers that follow from the configuration; call it without violations."""
    parallel, data, rollout = config.parallel, config.data, config.rollout
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    dp, replicas = world_size // (tp * pp), world_size // rollout.tensor_model_parallel_size
    samples = data.train_batch_size * rollout.n
    length = data.max_prompt_length + data.max_response_length
    rows = [
        ("world size", str(world_size)),
        ("training", f"TP {tp} x PP {pp} x DP {dp}"),
        ("rollout", f"TP {rollout.tensor_model_parallel_size} x {replicas} replicas"),
        ("prompts per replica", _spread(data.train_batch_size, replicas)),
        ("samples per step", f"{data.train_batch_size} prompts x {rollout.n} = {samples}"),
        ("samples per DP rank", _spread(samples, dp)),
        ("longest sequence", f"{data.max_prompt_length} + {data.max_response_length} = {length} tokens"),
        ("tokens per step", f"at most {samples * length} ({samples * data.max_response_length} of them responses)"),
    ]
    roles: list[tuple[str, ActorSection | CriticSection]] = [("actor", config.actor)]
    if config.needs_critic:
        roles.append(("critic", config.critic))
    for role, section in roles:
        mini, epochs, budget = _resolved(section)
        steps = optimizer_steps(config, section)
        rows += [
            (f"{role} mini-batch", f"{mini} prompts x {rollout.n} = {mini * rollout.n} samples"),
            (f"{role} optimizer steps per step", f"{steps // epochs} mini-batches x {epochs} epochs = {steps}"),
            (f"{role} optimizer steps in all", str(steps * config.trainer.total_steps)),
            (f"{role} micro-batch", f"at most {budget} tokens, {budget // length} sequences of full length"),
        ]
    return rows


def _layout(config: RunConfig, world: int) -> Iterator[str]:
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if world % (tp * pp):
        yield (
            f"parallel.tensor_model_parallel_size={tp} x parallel.pipeline_model_parallel_size={pp} = {tp * pp} does "
            f"not divide the world of {world} processes; start a multiple of {tp * pp} (--nproc)"
        )
    rollout_tp = config.rollout.tensor_model_parallel_size
    if world % rollout_tp:
        yield (
            f"rollout.tensor_model_parallel_size={rollout_tp} does not divide the world of {world} processes; "
            f"take one of {_divisors(world)}"
        )


def _batches(config: RunConfig, world: int) -> Iterator[str]:
    batch, n = config.data.train_batch_size, config.rollout.n
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    dp = world // (tp * pp)
    replicas = world // config.rollout.tensor_model_parallel_size
    if replicas > batch:
        yield (
            f"data.train_batch_size={batch} leaves some of the {replicas} rollout replicas without a prompt; raise it "
            f"to {replicas}, or raise rollout.tensor_model_parallel_size"
        )
    minis = {"actor": config.actor.ppo_mini_batch_size}
    if config.needs_critic and config.critic.ppo_mini_batch_size != config.actor.ppo_mini_batch_size:
        minis["critic"] = _resolved(config.critic)[0]
    for role, mini in minis.items():
        if batch % mini:
            yield (
                f"{role}.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}; "
                f"take one of {_divisors(batch)}"
            )
        if mini * n < dp:
            yield (
                f"{role}.ppo_mini_batch_size={mini} x rollout.n={n} = {mini * n} samples leave some of the {dp} "
                f"data-parallel ranks without a sequence; raise {role}.ppo_mini_batch_size to {-(-dp // n)}"
            )
    if config.algorithm.adv_estimator == "grpo" and n == 1:
        yield (
            "rollout.n=1 makes every advantage 0 with algorithm.adv_estimator=grpo (a group of one); "
            "set rollout.n to 2 or more"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    length = config.data.max_prompt_length + config.data.max_response_length
    sequence = _sequence(config)
    budgets = {"actor": config.actor.ppo_max_token_len_per_gpu}
    if config.needs_critic:
        budgets["critic"] = _resolved(config.critic)[2]
    if config.needs_ref:
        assert config.ref.ppo_max_token_len_per_gpu is not None
        budgets["ref"] = config.ref.ppo_max_token_len_per_gpu
    for role, budget in budgets.items():
        inherited = role != "actor" and budget == budgets["actor"]
        if budget < length and not inherited:
            yield (
                f"{role}.ppo_max_token_len_per_gpu={budget} is less than {sequence}, "
                f"one sequence of full length; raise it to {length}"
            )
    rollout = config.rollout
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < length:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than {sequence} with "
            f"rollout.enable_chunked_prefill=false; raise it to {length} or switch chunked prefill on"
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs={rollout.max_num_seqs}; vLLM needs a token for each, so raise the first"
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    reason = "it would bias the importance ratio of training rollouts"
    if rollout.top_p < 1.0:
        yield f"rollout.top_p={rollout.top_p:g} is refused: {reason}; leave it at 1"
    if rollout.top_k > 0:
        yield f"rollout.top_k={rollout.top_k} is refused: {reason}; leave it at -1"
    if rollout.min_p > 0.0:
        yield f"rollout.min_p={rollout.min_p:g} is refused: {reason}; leave it at 0"
    if "" in rollout.stop:
        yield "rollout.stop holds empty text, which would stop every response at once; remove it"


def _training_cut(config: RunConfig, world: int, facts: ModelFacts, whose: str) -> Iterator[str]:
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if not _training_tp_fits(facts, tp):
        fits = [t for t in range(1, tp + 1) if _training_tp_fits(facts, t)]
        usable = [t for t in fits if world % (t * pp) == 0] or fits
        yield (
            f"parallel.tensor_model_parallel_size={tp} does not fit {whose} num_attention_heads={facts.num_heads}, "
            f"num_key_value_heads={facts.num_kv_heads} and intermediate_size={facts.ffn_size}; the largest that works "
            f"is {usable[-1]}"
        )
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first is None and last is None:
        if facts.num_layers % pp:
            yield (
                f"parallel.pipeline_model_parallel_size={pp} does not divide {whose} "
                f"num_hidden_layers={facts.num_layers}; take one of {_divisors(facts.num_layers)}, or set "
                "parallel.num_layers_in_first_pipeline_stage or ..._last_pipeline_stage"
            )
        return
    try:
        PipelineSplit(facts.num_layers, pp, 1, first, last)
    except ValueError as error:
        yield (
            f"parallel.pipeline_model_parallel_size={pp}, parallel.num_layers_in_first_pipeline_stage={first} and "
            f"parallel.num_layers_in_last_pipeline_stage={last} do not fit {whose} "
            f"num_hidden_layers={facts.num_layers}: {error}"
        )


def _training_tp_fits(facts: ModelFacts, tp: int) -> bool:
    """Megatron-Core cuts heads and KV groups evenly; of groups fewer than ranks it cuts each into equal rows."""
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    groups_fit = kv_heads % tp == 0 or (tp % kv_heads == 0 and 2 * kv_heads * facts.head_dim % tp == 0)
    return heads % tp == 0 and facts.ffn_size % tp == 0 and groups_fit


def _rollout_cut(config: RunConfig, world: int, facts: ModelFacts) -> Iterator[str]:
    heads, kv_heads, ffn = facts.num_heads, facts.num_kv_heads, facts.ffn_size
    rollout_tp = config.rollout.tensor_model_parallel_size
    fits = [t for t in range(1, rollout_tp + 1) if not (heads % t or ffn % t) and _kv_fits(kv_heads, t)]
    if rollout_tp not in fits:
        usable = [t for t in fits if world % t == 0] or fits
        yield (
            f"rollout.tensor_model_parallel_size={rollout_tp} does not fit the model's num_attention_heads={heads}, "
            f"num_key_value_heads={kv_heads} and intermediate_size={ffn}; the largest that works is {usable[-1]}"
        )


def _kv_fits(kv_heads: int, tp: int) -> bool:
    """vLLM splits KV heads evenly or replicates them evenly."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _positions(config: RunConfig, facts: ModelFacts, whose: str) -> Iterator[str]:
    length = config.data.max_prompt_length + config.data.max_response_length
    if length > facts.max_positions:
        yield f"{_sequence(config)} is more than {whose} {facts.max_positions} positions; lower one of the two"


def _idle_algorithm(config: RunConfig) -> Iterator[str]:
    algorithm, default = config.algorithm, AlgorithmSection()
    if not config.needs_critic:
        changed = _changed(algorithm, default, "gamma", "lam", "whiten_advantages", "bootstrap_truncated")
        yield from _no_effect("algorithm", changed, f"with algorithm.adv_estimator={algorithm.adv_estimator}")
    if algorithm.adv_estimator != "grpo":
        changed = _changed(algorithm, default, "norm_adv_by_std_in_grpo")
        yield from _no_effect("algorithm", changed, f"with algorithm.adv_estimator={algorithm.adv_estimator}")
    control, idle_control = algorithm.kl_ctrl, KlControlSection()
    if not algorithm.use_kl_in_reward:
        why = "with algorithm.use_kl_in_reward=false"
        yield from _no_effect("algorithm", _changed(algorithm, default, "kl_penalty"), why)
        yield from _no_effect("algorithm.kl_ctrl", _changed(control, idle_control, *type(control).model_fields), why)
    elif control.type == "fixed":
        changed = _changed(control, idle_control, "target_kl_per_token", "horizon")
        yield from _no_effect("algorithm.kl_ctrl", changed, "with algorithm.kl_ctrl.type=fixed")
        if control.kl_coef == 0.0:
            yield (
                "algorithm.kl_ctrl.kl_coef=0 computes a KL that changes nothing; "
                "algorithm.use_kl_in_reward=false saves the reference's forward pass"
            )
    correction = algorithm.rollout_correction
    if algorithm.use_rollout_log_probs or correction.mode == "off":
        why = "algorithm.use_rollout_log_probs=true" if algorithm.use_rollout_log_probs else "mode=off"
        changed = _changed(correction, RolloutCorrectionSection(), "cap")
        yield from _no_effect("algorithm.rollout_correction", changed, f"with {why}")


def _idle_sections(config: RunConfig) -> Iterator[str]:
    actor, critic = config.actor, config.critic
    if not actor.use_kl_loss:
        changed = _changed(actor, ActorSection(), "kl_loss_coef", "kl_loss_type")
        yield from _no_effect("actor", changed, "with actor.use_kl_loss=false")
    elif actor.kl_loss_coef == 0.0:
        yield (
            "actor.kl_loss_coef=0 computes a KL that changes nothing; "
            "actor.use_kl_loss=false saves the reference's forward pass"
        )
    if not config.needs_critic:
        idle = critic.model_copy(
            update={
                "path": config.model.path,
                "ppo_mini_batch_size": actor.ppo_mini_batch_size,
                "ppo_epochs": actor.ppo_epochs,
                "ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
                "optim": CriticSection().optim,
                "value_clip": CriticSection().value_clip,
            }
        )
        why = f"with algorithm.adv_estimator={config.algorithm.adv_estimator} (no critic)"
        yield from _no_effect("critic", _changed(critic, idle, *type(critic).model_fields), why)
    if not config.needs_ref and config.ref.ppo_max_token_len_per_gpu != actor.ppo_max_token_len_per_gpu:
        yield "ref.ppo_max_token_len_per_gpu has no effect without a KL term (no reference is built)"
    platform, rollout = config.trainer.platform, config.rollout
    if platform == "cuda":
        changed = _changed(rollout, type(rollout)(), "kv_cache_gib")
        yield from _no_effect("rollout", changed, "with trainer.platform=cuda")
    if platform == "cpu":
        changed = _changed(rollout, type(rollout)(), "gpu_memory_utilization")
        yield from _no_effect("rollout", changed, "with trainer.platform=cpu")


def _idle_schedule(config: RunConfig) -> Iterator[str]:
    roles: list[tuple[str, ActorSection | CriticSection]] = [("actor", config.actor)]
    if config.needs_critic:
        roles.append(("critic", config.critic))
    for role, section in roles:
        per_step = optimizer_steps(config, section)
        total = per_step * config.trainer.total_steps
        optim = section.optim
        if optim.lr_scheduler_type == "constant":
            changed = _changed(optim, type(optim)(), "min_lr_ratio")
            yield from _no_effect(f"{role}.optim", changed, f"with {role}.optim.lr_scheduler_type=constant")
        if optim.lr_warmup_steps >= total:
            yield (
                f"{role}.optim.lr_warmup_steps={optim.lr_warmup_steps} is not over within the run's "
                f"{total} optimizer steps: {role}.optim.lr is never reached"
            )
        if role == "actor" and config.actor.target_kl is not None and per_step == 1:
            yield "actor.target_kl has no effect with one optimizer step per rollout batch"


def _changed(section: Section, default: Section, *keys: str) -> list[str]:
    values, defaults = section.model_dump(), default.model_dump()
    return [key for key in keys if values[key] != defaults[key]]


def _no_effect(section: str, keys: list[str], why: str) -> Iterator[str]:
    for key in keys:
        yield f"{section}.{key} has no effect {why}"


def _resolved(section: ActorSection | CriticSection) -> tuple[int, int, int]:
    """(mini-batch size, epochs, token budget); RunConfig has filled in what the critic inherits."""
    mini, epochs, budget = section.ppo_mini_batch_size, section.ppo_epochs, section.ppo_max_token_len_per_gpu
    assert mini is not None
    assert epochs is not None
    assert budget is not None
    return mini, epochs, budget


def _sequence(config: RunConfig) -> str:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response}"


def _spread(count: int, parts: int) -> str:
    return str(count // parts) if count % parts == 0 else f"{count // parts} to {count // parts + 1}"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
