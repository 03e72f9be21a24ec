"""Typed metrics and timers."""

from __future__ import annotations

import threading

import pytest

from mrl.metrics.reduce import MetricSet
from mrl.metrics.timers import Timers


def test_means_are_weighted_by_their_counts() -> None:
    """Two ranks' worth of samples, 1 and 3 of them: (1 + 3 + 3 + 3) / 4, not the mean of the means 1 and 3."""
    metrics = MetricSet()
    metrics.mean("score", 1.0, 1)
    metrics.mean("score", 9.0, 3)
    metrics.mean("nothing", 0.0, 0)
    assert metrics.values() == {"score": 2.5}


def test_sums_and_extremes() -> None:
    metrics = MetricSet()
    for value in (2.0, -1.0, 4.0):
        metrics.sum("sum", value)
        metrics.max("max", value)
        metrics.min("min", value)
    assert metrics.values() == {"sum": 5.0, "max": 4.0, "min": -1.0}


def test_a_name_has_one_type() -> None:
    metrics = MetricSet()
    metrics.mean("a", 1.0, 1)
    metrics.max("b", 1.0)
    for wrong in (lambda: metrics.sum("a", 1.0), lambda: metrics.mean("b", 1.0, 1), lambda: metrics.min("b", 1.0)):
        with pytest.raises(AssertionError, match="is a"):
            wrong()


def test_timers_add_up_and_may_run_beside_each_other() -> None:
    timers = Timers()
    inside = threading.Event()

    def host() -> None:
        with timers("reward"):
            inside.set()

    with timers("rollout"):
        thread = threading.Thread(target=host)
        thread.start()
        assert inside.wait(10)
        thread.join()
    first = timers.values()
    assert first.keys() == {"timing_s/rollout", "timing_s/reward"}
    assert first["timing_s/rollout"] >= first["timing_s/reward"] >= 0
    with pytest.raises(RuntimeError, match="stop"), timers("rollout"):
        raise RuntimeError("stop")
    assert timers.values()["timing_s/rollout"] >= first["timing_s/rollout"]
