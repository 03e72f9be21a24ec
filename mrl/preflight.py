"""Everything that can be known to be wrong before a process is started or a model is touched, reported at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.rules.facts import ModelFacts
from converters.rules.families import facts_of
from mrl.config import rules
from mrl.config.load import ConfigError, parse_config
from mrl.config.schema import RunConfig
from mrl.metrics.writers import check_tensorboard
from mrl.rewards.loading import check_reward
from mrl.rundir import check_run_dir, run_dir_of


@dataclass(frozen=True)
class Preflight:
    """A run that may start. warnings: settings without effect."""

    config: RunConfig
    run_dir: Path
    warnings: list[str]
    inputs: tuple[Path, ...]
    """What the run reads; never deleted by overwriting."""


def preflight(
    config_path: str | Path,
    overrides: Sequence[str],
    *,
    world_size: int | None = None,
    overwrite: bool | None = None,
    read_data: bool = True,
) -> Preflight:
    """Load the configuration and check it against the world, the model, the reward and the data.

    world_size: trainer.nnodes x trainer.nproc_per_node where None. overwrite: None leaves the run directory unchecked.
    read_data: look into the files too: every prompt as the model will see it, the names and shapes of all weights.
    Raises ConfigError with every violation.
    """
    parsed = parse_config(config_path, overrides)
    config, found = parsed.config, list(parsed.violations)
    if config is None:
        raise ConfigError(found)

    run_dir = run_dir_of(config, config_path)
    inputs = _inputs(config, Path(config_path))
    more: list[str] = []
    paths = {"model.path": config.model.path}
    if config.needs_critic and config.critic.path not in (None, config.model.path):
        paths["critic.path"] = str(config.critic.path)
    models: dict[str, ModelFacts] = {}
    for key, path in paths.items():
        if key not in parsed.broken:
            more += _said(key, lambda key=key, path=path: models.update({key: facts_of(path)}))  # type: ignore[misc]
            drawn = key == "model.path" and config.model.init == "random"
            if key in models and read_data and not drawn:
                more += _said(key, lambda key=key, path=path: _check_weights(path, models[key]))  # type: ignore[misc]
    world = world_size or config.trainer.nnodes * config.trainer.nproc_per_node
    if world_size is None and {"trainer", "trainer.nproc_per_node", "trainer.nnodes"} & parsed.broken:
        world = rules.fitting_world(config)
    more += rules.violations(config, world, models)
    if "reward.function" not in parsed.broken:
        reward = config.reward
        more += _said("reward.function", lambda: check_reward(reward.function, reward.style, reward.kwargs))
    if "data.train_files" not in parsed.broken:
        more += _said("data.train_files", lambda: _check_data(config, read_data and "model.path" in models))
    if config.trainer.tensorboard:
        more += _said("trainer.tensorboard", check_tensorboard)
    if overwrite is not None:
        replace = overwrite or config.trainer.overwrite
        more += _said("trainer.run_dir", lambda: check_run_dir(run_dir, replace, inputs))
    found += [line for line in more if not parsed.concerns_broken_key(line)]
    if found:
        raise ConfigError(found)
    return Preflight(config, run_dir, rules.warnings(config), inputs)


def _said(key: str, check: Callable[[], object]) -> list[str]:
    """The message of what a check raises for a user's mistake, as a list; empty where it passes."""
    try:
        check()
    except ValueError as error:
        text = str(error)
        return [text if key in text else f"{key}: {text}"]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        what = error.filename or "a file"
        return [f"{key}: {what} cannot be read ({reason}); correct the path or its permissions"]
    return []


def _inputs(config: RunConfig, config_path: Path) -> tuple[Path, ...]:
    reward_file, colon, _ = config.reward.function.rpartition(":")
    reward = [Path(reward_file)] if colon else []
    return (config_path, Path(config.model.path), Path(str(config.critic.path)), *config.prompt_files(), *reward)


def _check_weights(path: str, facts: ModelFacts) -> None:
    """Names and shapes of all tensors against config.json, from the files' headers."""
    from converters.hf_checkpoint import HFCheckpoint  # imports torch
    from converters.load import check_checkpoint

    with HFCheckpoint(path) as checkpoint:
        check_checkpoint(checkpoint, facts)


def _check_data(config: RunConfig, read_data: bool) -> None:
    files = config.prompt_files()
    for path in files:
        if not path.exists():
            raise ValueError(f"prompt file {path} does not exist; correct data.train_files")
    if read_data:
        from mrl.data.prompts import encode_configured_prompts  # imports transformers: a second
        from mrl.data.tokenizer import load_tokenizer, read_tokenizer_facts

        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        read_tokenizer_facts(config.model.path, tokenizer)
        encode_configured_prompts(config, tokenizer)
