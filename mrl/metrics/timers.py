"""Wall-clock time per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """`with timers("rollout"): ...` adds to timing_s/rollout. Stages beside each other may time at the same time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def values(self) -> dict[str, float]:
        """timing_s/<name> in seconds."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
