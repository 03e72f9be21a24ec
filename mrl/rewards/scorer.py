"""The reward scorer: finished samples go in while others still generate; scores come out once all are in.

Each worker is a process with a thread here that feeds it. A call that hangs is ended by killing its process alone. A
worker imports the user's file and the standard library, never this run's main module, so it starts at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self

from mrl.rewards.loading import RewardError, check_reward
from mrl.rewards.protocol import LoadRequest, Outcome, Reply, RewardSample, Style

LOAD_TIMEOUT_S = 300.0
"""Limit for importing the user's file, which may pull in large libraries."""
GRACE_S = 2.0
"""How long a worker may take to end by itself when the scorer closes."""


@dataclass(frozen=True)
class ScoredSample:
    """A sample's score. dropped: it has none (score is NaN) and must be masked; `error` says why."""

    prompt_index: int
    sample_index: int
    score: float
    components: dict[str, float]
    dropped: bool = False
    error: str | None = None


class RewardScorer:
    """Scores samples in worker processes. A context manager; close() leaves no process behind.

    function: `path/to/file.py:name` or a built-in. style: `sample` calls it once a sample, `batch` once a group, when
    all `group_size` samples of the group are in. on_error: `stop` raises RewardError from collect(); `drop` returns the
    sample as dropped, except that a list of the wrong length always stops. Raises RewardError where the function cannot
    be loaded.
    """

    def __init__(
        self,
        function: str,
        *,
        style: Style = "sample",
        kwargs: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        timeout_s: float = 60.0,
        on_error: Literal["stop", "drop"] = "stop",
        group_size: int = 1,
    ) -> None:
        assert num_workers > 0
        assert group_size > 0
        self._request = LoadRequest(function, style, dict(kwargs or {}))
        self._timeout_s, self._on_error, self._group_size = timeout_s, on_error, group_size
        check_reward(function, style, self._request.kwargs)
        self._tasks: queue.SimpleQueue[list[RewardSample] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._submitted: set[tuple[int, int]] = set()
        self._waiting: dict[int, list[RewardSample]] = {}
        self._scored: list[ScoredSample] = []
        self._failure: BaseException | None = None
        self._closing = False
        self._workers: list[_Worker | None] = [_Worker(self._request) for _ in range(num_workers)]
        self._threads: list[threading.Thread] = []
        try:
            for worker in self._workers:
                assert worker is not None
                worker.wait_ready()
        except BaseException:
            self.close()
            raise
        for slot in range(num_workers):
            thread = threading.Thread(target=self._serve, args=(slot,), name=f"reward-{slot}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, sample: RewardSample) -> None:
        """Hand over a finished sample; returns at once. Each (prompt_index, sample_index) once per collect()."""
        assert not self._closing
        assert sample.key not in self._submitted, f"sample {sample.key} submitted twice"
        self._submitted.add(sample.key)
        if self._request.style == "sample":
            self._tasks.put([sample])
            return
        group = self._waiting.setdefault(sample.prompt_index, [])
        group.append(sample)
        if len(group) == self._group_size:
            del self._waiting[sample.prompt_index]
            self._tasks.put(sorted(group, key=lambda s: s.key))

    def collect(self) -> list[ScoredSample]:
        """Wait for every submitted sample; their scores in (prompt_index, sample_index) order. Starts the next step.

        Raises RewardError as soon as a sample fails where errors stop the run; only close() is of use after that.
        """
        assert not self._waiting, f"incomplete groups of prompts {sorted(self._waiting)}"
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(self._scored) == len(self._submitted))
            if self._failure is not None:
                raise self._failure
            scored, self._scored = self._scored, []
        self._submitted.clear()
        return sorted(scored, key=lambda s: (s.prompt_index, s.sample_index))

    def close(self) -> None:
        """End all workers: idle ones by closing their connection, others by SIGKILL after GRACE_S seconds."""
        self._closing = True
        while not self._tasks.empty():
            self._tasks.get()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(GRACE_S)
        for worker in self._workers:
            if worker is not None:
                worker.end_process()  # a thread that waits for it sees its end
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for worker in self._workers:
            if worker is not None:
                worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, slot: int) -> None:
        """A worker's thread: its tasks one after the other, with a fresh process after one was lost."""
        try:
            while (samples := self._tasks.get()) is not None and not self._closing:
                worker = self._workers[slot]
                if worker is None:
                    worker = self._workers[slot] = _Worker(self._request)
                    worker.wait_ready()
                try:
                    reply = worker.call(samples, self._timeout_s)
                except _WorkerLostError as lost:
                    worker.kill()
                    if self._closing:
                        return
                    self._workers[slot] = None
                    reply = Reply([], f"reward {self._request.function} {lost}")
                self._take(samples, reply)
            worker = self._workers[slot]
            if worker is not None:
                worker.close()
        except BaseException as error:  # handed to collect(), which raises it in the caller's thread
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _take(self, samples: list[RewardSample], reply: Reply) -> None:
        """Store a reply's scores, or the failure that stops the run."""
        outcomes = reply.outcomes if reply.error is None else [Outcome(math.nan, {}, reply.error)] * len(samples)
        assert len(outcomes) == len(samples)
        bad = [(sample, outcome.error) for sample, outcome in zip(samples, outcomes, strict=True) if outcome.error]
        with self._changed:
            if bad and (self._on_error == "stop" or reply.fatal):
                sample, error = bad[0]
                hint = "" if reply.fatal else "; correct it, or set reward.on_error=drop to mask such samples"
                what = f"prompt {sample.prompt_index}, sample {sample.sample_index}"
                self._failure = self._failure or RewardError(f"{error} ({what}){hint}", reply.traceback_text)
            else:
                for sample, outcome in zip(samples, outcomes, strict=True):
                    dropped = outcome.error is not None
                    self._scored.append(
                        ScoredSample(*sample.key, outcome.score, outcome.components, dropped, outcome.error)
                    )
            self._changed.notify_all()


class _WorkerLostError(Exception):
    """A worker that died or did not answer in time; the text completes "reward X ..."."""


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        ours, theirs = socket.socketpair()
        life_end, self._life_fd = os.pipe()
        # The same import path as this process, whose working directory and sys.path may have moved since its start.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mrl.rewards.worker", str(theirs.fileno()), str(life_end)],
                pass_fds=(theirs.fileno(), life_end),
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run; and killing the group takes what the function started
            )
        finally:
            theirs.close()
            os.close(life_end)
        self._connection = Connection(ours.detach())
        self._connection.send(request)

    def wait_ready(self) -> None:
        """Return once the function is loaded; RewardError where it cannot be."""
        try:
            reply = self._receive(LOAD_TIMEOUT_S)
        except _WorkerLostError as lost:
            self.kill()
            raise RewardError(f"reward {self._request.function} {lost} while its file was imported") from lost
        if reply.error is not None:
            raise RewardError(reply.error, reply.traceback_text)

    def call(self, samples: list[RewardSample], timeout_s: float) -> Reply:
        try:
            self._connection.send(samples)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _WorkerLostError(self._death()) from error
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Reply:
        try:
            if not self._connection.poll(timeout_s):
                raise _WorkerLostError(f"did not return within {timeout_s:g} s (reward.timeout_s)")
            reply = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise _WorkerLostError(self._death()) from error
        assert isinstance(reply, Reply)
        return reply

    def _death(self) -> str:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"ended its process {how}"

    def close(self) -> None:
        """Let the process end by itself, then make sure."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self.kill()

    def end_process(self) -> None:
        """End the process and everything it started, from any thread; no zombie is left. May be called twice."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def kill(self) -> None:
        """End the process and close the connection; no other thread may be reading it. May be called twice."""
        self.end_process()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        self._connection.close()
