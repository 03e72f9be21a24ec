"""Typed metrics: what is averaged is kept as sum and count, so that no mean of means can arise."""

from __future__ import annotations


class MetricSet:
    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}

    def mean(self, name: str, total: float, count: float) -> None:
        before = self._means.get(name, (0.0, 0.0))
        self._means[name] = (before[0] + total, before[1] + count)

    def sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def max(self, name: str, value: float) -> None:
        self._max[name] = max(value, self._max.get(name, value))

    def min(self, name: str, value: float) -> None:
        self._min[name] = min(value, self._min.get(name, value))

    def values(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._means.items() if count}
        return means | self._sums | self._max | self._min
