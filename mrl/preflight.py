"""Everything that can be known to be wrong before a process is started or a model is touched, reported at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.rules.facts import read_config
from converters.rules.families import facts_of
from mrl.config import rules
from mrl.config.load import ConfigError, parse_config
from mrl.config.schema import RunConfig
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

    world_size: trainer.nproc_per_node where None. overwrite: None leaves the run directory unchecked. read_data: look
    into the files too: every prompt row (not tokenised), the names and shapes of all weights. Raises ConfigError with
    every violation.
    """
    parsed = parse_config(config_path, overrides)
    config, found = parsed.config, list(parsed.violations)
    if config is None:
        raise ConfigError(found)

    model = Path(config.model.path)
    run_dir = run_dir_of(config, config_path)
    inputs = _inputs(config, Path(config_path))
    more: list[str] = []
    if "model.path" not in parsed.broken:
        more += _said(lambda: facts_of(model)) or _said(lambda: _check_weights(config, "model.path", model, read_data))
    if config.needs_critic and config.critic.path not in (None, config.model.path):
        critic = Path(str(config.critic.path))
        more += _said(lambda: facts_of(critic)) or _said(
            lambda: _check_weights(config, "critic.path", critic, read_data)
        )
    hf_config: dict[str, Any] | None = None
    if not _said(lambda: read_config(model)):
        hf_config = read_config(model)
    more += rules.violations(config, world_size or config.trainer.nproc_per_node, hf_config)
    if "reward.function" not in parsed.broken:
        more += _said(lambda: check_reward(config.reward.function, config.reward.style, config.reward.kwargs))
    if "data.train_files" not in parsed.broken:
        more += _check_data(config, read_data)
    if overwrite is not None:
        more += _said(lambda: check_run_dir(run_dir, overwrite or config.trainer.overwrite, inputs))
    found += [line for line in more if not parsed.concerns_broken_key(line)]
    if found:
        raise ConfigError(found)
    return Preflight(config, run_dir, rules.warnings(config), inputs)


def _said(check: Callable[[], object]) -> list[str]:
    """The message of the ValueError that a check raises, as a list; empty where it passes."""
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []


def _inputs(config: RunConfig, config_path: Path) -> tuple[Path, ...]:
    reward_file, colon, _ = config.reward.function.rpartition(":")
    reward = [Path(reward_file)] if colon else []
    return (config_path, Path(config.model.path), Path(str(config.critic.path)), *config.prompt_files(), *reward)


def _check_weights(config: RunConfig, key: str, path: Path, read_data: bool) -> None:
    """Names and shapes of all tensors against config.json, from the files' headers."""
    if config.model.init == "pretrained" and read_data:
        from converters.hf_checkpoint import HFCheckpoint  # imports torch
        from converters.load import check_checkpoint

        try:
            with HFCheckpoint(path) as checkpoint:
                check_checkpoint(checkpoint, facts_of(path))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def _check_data(config: RunConfig, read_data: bool) -> list[str]:
    files = config.prompt_files()
    missing = [f"prompt file {path} does not exist; correct data.train_files" for path in files if not path.is_file()]
    if missing or not read_data:
        return missing
    from mrl.data.prompts import read_prompts  # imports transformers: a second

    return _said(lambda: read_prompts(files, config.data.prompt_key))
