"""The runner of stages: order, what a stage may touch, host work beside device work, failures; and PPO and GRPO."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import pytest

from mrl import algorithms
from mrl.config.schema import RunConfig
from mrl.dataflow import Context, Stage, graph_lines, order, run


def stage(
    name: str,
    reads: str,
    writes: str,
    work: Callable[[Context], None] | None = None,
    device: Literal["device", "host"] = "device",
) -> Stage:
    def default(context: Context) -> None:
        for field in writes.split():
            context[field] = name

    return Stage(name, frozenset(reads.split()), frozenset(writes.split()), work or default, device)


class Recorder:
    """Timers that only note which stages were timed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        self.names.append(name)
        return nullcontext()


def execute(stages: list[Stage], inputs: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """(fields, timed stages, announced device stages)"""
    timers, announced = Recorder(), list[str]()
    fields = run(order(stages, inputs), dict(inputs), timers, announced.append)
    return fields, timers.names, announced


def test_fields_are_written_before_they_are_read_whatever_the_listing() -> None:
    stages = [stage("c", "b", "c_out"), stage("b", "a", "b"), stage("a", "start", "a")]
    assert [s.name for s in order(stages, {"start"})] == ["a", "b", "c"]
    fields, timed, announced = execute(stages, {"start": 0})
    assert fields == {"start": 0, "a": "a", "b": "b", "c_out": "c"}
    assert timed == announced == ["a", "b", "c"]


def test_the_listing_decides_where_the_fields_do_not() -> None:
    stages = [stage("x", "start", "x"), stage("y", "start", "y")]
    assert [s.name for s in order(stages, {"start"})] == ["x", "y"]
    assert [s.name for s in order(stages[::-1], {"start"})] == ["y", "x"]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "start", "f"), stage("b", "start", "f")], "field 'f' is written by stage 'b' and by 'a'"),
        ([stage("a", "start", "start")], "field 'start' is written by stage 'a' and by \"the step's inputs\""),
        ([stage("a", "ghost", "f")], "stage 'a' reads 'ghost', which no stage writes"),
        ([stage("a", "g", "f"), stage("b", "f", "g")], r"stages \['a', 'b'\] wait for each other's fields"),
    ],
)
def test_graphs_that_cannot_run_are_named(stages: list[Stage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order(stages, {"start"})


def test_a_stage_may_touch_only_what_it_declared() -> None:
    def reads_more(context: Context) -> None:
        context["f"] = context["other"]

    def writes_more(context: Context) -> None:
        context["other"] = 1

    def writes_nothing(context: Context) -> None: ...

    for work, message in (
        (reads_more, "reads 'other' but does not declare it"),
        (writes_more, "writes 'other' but does not declare it"),
        (writes_nothing, r"did not write \['f'\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            execute([stage("a", "start", "f", work)], {"start": 0, "other": 0} if work is reads_more else {"start": 0})


def test_host_work_runs_beside_device_work() -> None:
    """The device stage waits for a sign that only the running host stage gives, and the other way round."""
    host_started, device_done = threading.Event(), threading.Event()
    threads: dict[str, str] = {}

    def host(context: Context) -> None:
        threads["host"] = threading.current_thread().name
        host_started.set()
        assert device_done.wait(10)
        context["scores"] = 1

    def device(context: Context) -> None:
        threads["device"] = threading.current_thread().name
        assert host_started.wait(10)
        device_done.set()
        context["log_probs"] = 2

    def join(context: Context) -> None:
        context["sum"] = context["scores"] + context["log_probs"]

    stages = [
        stage("reward", "start", "scores", host, device="host"),
        stage("ref", "start", "log_probs", device),
        stage("adv", "scores log_probs", "sum", join),
    ]
    fields, timed, announced = execute(stages, {"start": 0})
    assert fields["sum"] == 3
    assert threads["device"] == threading.main_thread().name != threads["host"]
    assert sorted(timed) == ["adv", "ref", "reward"]
    assert announced == ["ref", "adv"]


def test_a_failing_device_stage_does_not_wait_for_a_host_stage() -> None:
    release, failed_first = threading.Event(), []

    def host(context: Context) -> None:
        failed_first.append(not release.wait(30))
        context["scores"] = 1

    def device(context: Context) -> None:
        raise ValueError("device")

    with pytest.raises(ValueError, match="device"):
        execute(
            [stage("reward", "start", "scores", host, device="host"), stage("ref", "start", "log_probs", device)],
            {"start": 0},
        )
    assert not failed_first  # the host stage still waits
    release.set()


def test_a_host_stage_at_the_end_is_waited_for() -> None:
    fields, _, _ = execute([stage("a", "start", "a"), stage("log", "a", "logged", device="host")], {"start": 0})
    assert fields["logged"] == "log"


@pytest.mark.parametrize("device", ["host", "device"])
def test_a_failure_is_raised_as_it_was(device: Literal["device", "host"]) -> None:
    def fail(context: Context) -> None:
        raise ValueError("rewards.py:3: no")

    with pytest.raises(ValueError, match="no") as caught:
        execute([stage("reward", "start", "scores", fail, device), stage("adv", "scores", "batch")], {"start": 0})
    assert str(caught.value) == "rewards.py:3: no"
    assert caught.value.__notes__ == ["in stage reward"]


def config(**algorithm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "reward": {"function": "exact_match"},
            "data": {"train_files": "p.jsonl"},
            "trainer": {"total_steps": 1},
            "algorithm": algorithm,
        }
    )


def names(configured: RunConfig) -> list[str]:
    return [line.split()[0] for line in algorithms.graph_lines(configured)]


def test_ppo_and_grpo_are_two_lists_of_stages() -> None:
    first = ["(inputs)", "rollout", "reward", "ref_log_prob", "old_log_prob"]
    assert names(config(name="ppo")) == [*first, "values", "adv", "update_critic", "update_actor", "sync"]
    assert names(config(name="grpo")) == [*first, "adv", "update_actor", "sync"]


def test_without_kl_nobody_asks_for_the_reference() -> None:
    assert "ref_log_prob" not in names(config(name="ppo", use_kl_in_reward=False))


def test_graph_lines_tell_reads_writes_and_place() -> None:
    lines = graph_lines(order([stage("reward", "a", "b", device="host")], {"a"}), {"a"})
    assert lines == ["(inputs)  -> a", "reward  a -> b  [host, beside the device stages]"]
