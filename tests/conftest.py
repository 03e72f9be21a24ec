"""Shared fixtures: persistent process gangs, tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import DEMO, DEMO_STEPS, run, run_dir_override
from tests.gang import Gang
from tests.tiny import make_model


@pytest.fixture(scope="session")
def gang() -> Iterator[Callable[[int], Gang]]:
    """gang(world) is the session's gang of that many gloo ranks, started on first use."""
    started: dict[int, Gang] = {}

    def get(world: int) -> Gang:
        if world not in started:
            started[world] = Gang(world)
        return started[world]

    yield get
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """tiny(family, **config changes) -> directory of a random model, written once a session."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> str:
        key = "-".join([family, *(f"{k}={v}" for k, v in sorted(changes.items()))])
        if key not in made:
            made[key] = make_model(root / str(len(made)), family, **changes)
        return str(made[key])

    return get


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a whole demo run, made once a session."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    code, lines = run("train", DEMO, run_dir_override(run_dir), f"trainer.total_steps={DEMO_STEPS}")
    assert code == 0, "\n".join(lines)
    assert lines[0] == f"mrl: 2 processes, writing to {run_dir} (logs in {run_dir / 'logs'})"
    assert sum(line.startswith("step ") for line in lines) == DEMO_STEPS
    assert lines[-3].startswith(f"done: {DEMO_STEPS} steps in ")
    return run_dir
