"""Typed metrics: what is averaged is kept as sum and count, so that no mean of means can arise."""

from __future__ import annotations

from collections.abc import Mapping


class MetricSet:
    """Metrics of one step by name. A name has one type: mean, sum, max or min."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._others: dict[str, tuple[str, float]] = {}

    def put(self, values: Mapping[str, float]) -> None:
        """Add finished numbers; each name once."""
        for name, value in values.items():
            assert name not in self._means, f"{name} is a mean"
            assert name not in self._others, f"{name} is there already"
            self._others[name] = ("number", value)

    def mean(self, name: str, total: float, count: float) -> None:
        """Add `count` items that sum to `total`."""
        assert name not in self._others, f"{name} is a {self._others[name][0]}"
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def sum(self, name: str, value: float) -> None:
        self._combine(name, "sum", value)

    def max(self, name: str, value: float) -> None:
        self._combine(name, "max", value)

    def min(self, name: str, value: float) -> None:
        self._combine(name, "min", value)

    def _combine(self, name: str, kind: str, value: float) -> None:
        assert name not in self._means, f"{name} is a mean"
        if name in self._others:
            before_kind, before = self._others[name]
            assert kind == before_kind, f"{name} is a {before_kind}"
            value = {"sum": before + value, "max": max(before, value), "min": min(before, value)}[kind]
        self._others[name] = (kind, value)

    def values(self) -> dict[str, float]:
        """One number a name; a mean over nothing is left out."""
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        return means | {name: value for name, (_, value) in self._others.items()}
