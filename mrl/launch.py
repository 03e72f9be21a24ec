"""Starting ranks and learning how they ended.

`launch` runs torchrun's elastic agent in this process; `run_rank` wraps what a rank does. Between them stands
`<run_dir>/status.json`, because the agent turns every failure into exit code 1: the first rank that fails writes it,
or rank 0 at success.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from mrl.rewards.loading import RewardError

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SHUTDOWN_TIMEOUT_S = 600
"""How long ranks may take to end after a signal: long enough for a save."""
ROOT_CAUSE_WINDOW_S = 15
"""A rank killed by a signal this soon after the first failure was not killed by the agent (which waits 30 s)."""


@dataclass(frozen=True)
class Status:
    """How a run ended. exit_code: 0, 2 for a user's mistake, 130 for Ctrl-C, 1 otherwise. rank: -1 for the launcher."""

    exit_code: int
    message: str
    rank: int


def rank_log(run_dir: Path, rank: int) -> Path:
    """The file that holds a rank's output."""
    return run_dir / "logs" / f"rank{rank}.log"


def write_status(run_dir: Path, exit_code: int, message: str, rank: int) -> bool:
    """Write status.json unless one is there: the first to call decides. Returns whether this call did.

    The file appears whole or not at all.
    """
    path = run_dir / "status.json"
    temporary = run_dir / f".status.{socket.gethostname()}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(Status(exit_code, message, rank))) + "\n", encoding="utf-8")
    try:
        os.link(temporary, path)  # unlike a rename, fails where the target exists
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def read_status(run_dir: Path) -> Status | None:
    """The status a rank left, or None."""
    path = run_dir / "status.json"
    if not path.is_file():
        return None
    return Status(**json.loads(path.read_text(encoding="utf-8")))


def report(status: Status, terminal: TextIO) -> None:
    """Tell the user: one line for each line of the message, nothing after success."""
    for line in status.message.splitlines():
        print(f"mrl: error: {line}" if status.exit_code == 2 else f"mrl: {line}", file=terminal, flush=True)


def redirect_output(log: Path) -> TextIO:
    """Send this process's stdout and stderr, that of C libraries too, to `log`; returns the stderr it had."""
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8")
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    return terminal


def run_rank(run_dir: Path, rank: int, body: Callable[[], int], *, show_traceback: bool, speak: bool) -> int:
    """Run `body` as this rank and return its exit code, having recorded it.

    ValueError is the user's mistake (2), any other exception ours (1): the status gets its one line and the rank's log
    its traceback, which `show_traceback` also prints. speak: print the line here (nobody else will). Ctrl-C ends the
    process at once, whatever it waits for: files are renamed into place, so none is left half-written.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:  # body may redirect stderr
        try:
            code = body()
        except ValueError as error:
            status, text = Status(2, str(error) or type(error).__name__, rank), _traceback_of(error)
        except Exception as error:
            line = " ".join(str(error).split())
            what = f"{type(error).__name__}: {line}" if line else type(error).__name__
            status = Status(1, f"rank {rank} failed: {what}; its log is {rank_log(run_dir, rank)}", rank)
            text = _traceback_of(error)
        else:
            if rank == 0 or code != 0:
                message = f"rank {rank} ended with exit code {code}; its log is {rank_log(run_dir, rank)}"
                write_status(run_dir, code if code in (0, 2) else 1, message if code else "", rank)
            return code
        with rank_log(run_dir, rank).open("a", encoding="utf-8") as log:
            log.write(text)
        is_first = write_status(run_dir, status.exit_code, status.message, rank)
        if show_traceback and is_first:
            terminal.write(text)
        if speak and is_first:
            report(status, terminal)
        return status.exit_code


def launch(
    arguments: Sequence[str], nproc: int, run_dir: Path, *, shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S
) -> Status:
    """Run `python *arguments` as nproc ranks on this machine and wait for their end.

    A rank that fails takes the others down: SIGTERM at once, SIGKILL after 30 s. A signal to this process goes on to
    the ranks, which then have shutdown_timeout_s. The agent's own words go to logs/torchrun.log. Needs `run_dir/logs`.
    """
    os.environ["OMP_NUM_THREADS"] = str(omp_threads(nproc))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    run_id = uuid.uuid4().hex
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=run_id,
        role="mrl",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=SIGNALS,
        logs_specs=_no_redirection(run_dir),
        **_shutdown_option(LaunchConfig, shutdown_timeout_s),
    )
    (run_dir / "status.json").unlink(missing_ok=True)
    handlers = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, SIGNALS.split(","))}
    with _agent_log(run_dir / "logs" / "torchrun.log") as log:
        log.info("OMP_NUM_THREADS=%s, %s ranks: %s", os.environ["OMP_NUM_THREADS"], nproc, " ".join(arguments))
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            log.error("%s", error)
            return _after_failure(run_dir, error.failures)
        except SignalException as error:
            log.error("%s", error)
            return _after_signal(run_dir, error.sigval)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _kill_leftovers(run_id)
    status = read_status(run_dir)
    return status or Status(1, f"all ranks ended without a status; their logs are in {run_dir / 'logs'}", -1)


def _shutdown_option(config_class: type, seconds: int) -> dict[str, int]:
    """torch before 2.12 has no such option: its agent waits 30 s."""
    return {"shutdown_timeout": seconds} if "shutdown_timeout" in {f.name for f in fields(config_class)} else {}


def end_with_parent() -> None:
    """On Linux: have the kernel send this process SIGTERM should the launcher be killed without a chance to do so."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def omp_threads(nproc: int) -> int:
    """CPU threads of each of nproc ranks: they share the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def _traceback_of(error: BaseException) -> str:
    """The traceback; a reward's is that of the user's function, in the worker that ran it."""
    if isinstance(error, RewardError) and error.traceback_text:
        return error.traceback_text.rstrip("\n") + "\n"
    return "".join(traceback.format_exception(error))


def _after_failure(run_dir: Path, failures: dict[int, Any]) -> Status:
    """From the agent's failures (global rank -> ProcessFailure, in the order seen) to what the user needs to know.

    A crash goes before another rank's exception: that one is then of a lost connection, though it may come first. A
    user's mistake goes before both, and an abort after: it is how C++ answers a lost connection.
    """
    status = read_status(run_dir)
    if status is not None and status.exit_code == 2:
        return status
    first = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        by_agent = failure.timestamp - first > ROOT_CAUSE_WINDOW_S
        if failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, signal.SIGABRT) and not by_agent:
            return _silent_death(run_dir, rank, failure.exitcode)
    if status is not None and status.exit_code != 0:
        return status
    rank = next(iter(failures))
    return _silent_death(run_dir, rank, failures[rank].exitcode)


def _silent_death(run_dir: Path, rank: int, code: int) -> Status:
    """code: as subprocess has it, the negative signal number for a rank killed by one."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and said nothing"
    hint = " (often for want of memory)" if code == -signal.SIGKILL else ""
    return Status(1, f"rank {rank} {how}{hint}; its log is {rank_log(run_dir, rank)}", rank)


def _after_signal(run_dir: Path, number: signal.Signals) -> Status:
    """A run that ended by itself after the signal (having saved) says so; otherwise the signal ended it."""
    status = read_status(run_dir)
    if status is not None:
        return status
    if number == signal.SIGINT:
        return Status(130, f"interrupted; {run_dir} holds the steps done so far", -1)
    return Status(1, f"stopped by {number.name}; {run_dir} holds the steps done so far", -1)


def _no_redirection(run_dir: Path) -> object:
    """torchrun's LogsSpecs with ranks on this terminal (they redirect themselves) and no directories of its own."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Terminal(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(run_dir / "logs")

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest(
                stdouts=dict.fromkeys(envs, ""),
                stderrs=dict.fromkeys(envs, ""),
                error_files={rank: str(run_dir / "logs" / f"error{rank}.json") for rank in envs},
            )

    return Terminal()


@contextmanager
def _agent_log(path: Path) -> Iterator[logging.Logger]:
    """Logger of torchrun's agent, written to `path` and nowhere else while the context lasts."""
    logger = logging.getLogger("torch.distributed")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.handlers, logger.propagate, logger.level  # torch puts a handler for stderr there
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield logger
    finally:
        logger.handlers, logger.propagate, level = before
        logger.setLevel(level)
        handler.close()


def _kill_leftovers(run_id: str) -> None:
    """SIGKILL what ranks started and left behind (reward workers of a killed rank): known by the run's own id."""
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's process, or one that has just ended
