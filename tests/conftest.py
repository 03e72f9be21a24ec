"""Shared fixtures: persistent process gangs, tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
