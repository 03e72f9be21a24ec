"""Stages with declared reads and writes: the graph an algorithm is made of, and the runner that orders it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import Any, Literal, Protocol


class Context:
    """What a stage sees of the step's fields: those it declared, nothing else."""

    def __init__(self, stage: Stage, fields: dict[str, Any]) -> None:
        self._stage, self._fields = stage, fields
        self.written: dict[str, Any] = {}

    def __getitem__(self, field: str) -> Any:
        assert field in self._stage.reads, f"stage {self._stage.name} reads {field!r} but does not declare it"
        return self._fields[field]

    def __setitem__(self, field: str, value: Any) -> None:
        assert field in self._stage.writes, f"stage {self._stage.name} writes {field!r} but does not declare it"
        self.written[field] = value


@dataclass(frozen=True)
class Stage:
    """One step of an algorithm.

    reads, writes: names of fields. run(context) does the work. device: `device` stages run one at a time, in the main
    thread, in the same order on every rank (they hold collectives); a `host` stage runs in a thread beside them.
    """

    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    run: Callable[[Context], None]
    device: Literal["device", "host"] = "device"


class Timers(Protocol):
    """A context manager a stage name, which times what happens inside."""

    def __call__(self, name: str) -> Any: ...


def order(stages: Sequence[Stage], inputs: Collection[str]) -> list[Stage]:
    """The stages in an order in which every field is written before it is read; as declared where that is free.

    Raises ValueError naming field and stage: a field with two writers, one that nobody writes, a cycle.
    """
    writers: dict[str, str] = dict.fromkeys(inputs, "the step's inputs")
    for stage in stages:
        for field in sorted(stage.writes):
            if field in writers:
                raise ValueError(f"field {field!r} is written by stage {stage.name!r} and by {writers[field]!r}")
            writers[field] = stage.name
    for stage in stages:
        for field in sorted(stage.reads - writers.keys()):
            raise ValueError(f"stage {stage.name!r} reads {field!r}, which no stage writes; written: {sorted(writers)}")
    done, ordered, left = set(inputs), [], list(stages)
    while left:
        ready = next((stage for stage in left if stage.reads <= done), None)
        if ready is None:
            raise ValueError(f"stages {[stage.name for stage in left]} wait for each other's fields")
        left.remove(ready)
        ordered.append(ready)
        done |= ready.writes
    return ordered


def run(
    ordered: Sequence[Stage],
    fields: dict[str, Any],
    timers: Timers,
    on_stage: Callable[[str], None],
) -> dict[str, Any]:
    """Run stages that `order` returned; fills `fields` in place and returns it.

    Host stages start as soon as their fields are there and run beside device stages. The first exception of any stage
    is raised as it was, with the stage's name as a note.
    """

    def work(stage: Stage) -> dict[str, Any]:
        context = Context(stage, fields)
        try:
            with timers(stage.name):
                stage.run(context)
        except Exception as error:
            error.add_note(f"in stage {stage.name}")
            raise
        missing = stage.writes - context.written.keys()
        assert not missing, f"stage {stage.name} did not write {sorted(missing)}"
        return context.written

    waiting = [stage for stage in ordered if stage.device == "host"]
    running: dict[Future[dict[str, Any]], Stage] = {}

    def settle(futures: Iterable[Future[dict[str, Any]]]) -> None:
        for future in list(futures):
            running.pop(future)
            fields.update(future.result())

    def start_host_stages() -> None:
        for stage in [s for s in waiting if s.reads <= fields.keys()]:
            waiting.remove(stage)
            running[_in_thread(work, stage)] = stage

    for stage in (s for s in ordered if s.device == "device"):
        start_host_stages()
        while not stage.reads <= fields.keys():
            settle(wait(running, return_when=FIRST_COMPLETED).done)
            start_host_stages()
        on_stage(stage.name)
        fields.update(work(stage))
    while running or waiting:
        start_host_stages()
        settle(wait(running, return_when=FIRST_COMPLETED).done)
    return fields


def _in_thread(work: Callable[[Stage], dict[str, Any]], stage: Stage) -> Future[dict[str, Any]]:
    """Run a host stage in a daemon thread: where a device stage fails, nobody waits for it, at exit neither.

    An executor would: its threads are joined, and a reward may take minutes.
    """
    future: Future[dict[str, Any]] = Future()

    def body() -> None:
        try:
            future.set_result(work(stage))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=body, name=f"host-stage-{stage.name}", daemon=True).start()
    return future


def graph_lines(ordered: Sequence[Stage], inputs: Collection[str]) -> list[str]:
    """The graph as text: a line a stage, in order, with what it reads and writes."""
    width = max(len(stage.name) for stage in ordered)
    lines = [f"{'(inputs)':<{width}}  -> {', '.join(sorted(inputs))}"]
    for stage in ordered:
        beside = "  [host, beside the device stages]" if stage.device == "host" else ""
        reads, writes = ", ".join(sorted(stage.reads)), ", ".join(sorted(stage.writes))
        lines.append(f"{stage.name:<{width}}  {reads} -> {writes}{beside}")
    return lines
