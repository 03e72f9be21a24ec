"""A gang: N processes that join one gloo world once and then run many functions, because starting is what costs."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


class GangError(AssertionError):
    """A rank raised; the message holds its traceback."""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _serve(rank: int, world: int, port: int, calls: Connection) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    from mrl.parallel import initialise_distributed

    torch.set_num_threads(1)
    initialise_distributed("gloo", timeout_s=120)
    while True:
        try:
            function, args, kwargs = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        calls.send(answer)


class Gang:
    """`run` calls an importable function on every rank and returns the results in rank order.

    Raises GangError with the traceback of the rank that failed first; the gang is then closed, as its ranks may be
    stuck in a collective.
    """

    def __init__(self, world: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self._processes:
            raise GangError("this gang was closed by an earlier failure")
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready: list[Any] = list(wait(list(waiting)))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, f"exit code {self._processes[rank].exitcode}"
                if not ok:
                    self.close()
                    raise GangError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
