"""mrl.launch with real ranks: exit codes, the one line a user sees, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.launch import Status, omp_threads, read_status, write_status
from tests.cli import processes_of, start_python

HERE = Path(__file__).parent


def start(run_dir: Path, behaviour: str) -> subprocess.Popen[str]:
    (run_dir / "logs").mkdir()
    return start_python(str(HERE / "driver.py"), str(run_dir), behaviour)


def run(run_dir: Path, behaviour: str) -> tuple[int, list[str]]:
    """(exit code, lines on the terminal)"""
    process = start(run_dir, behaviour)
    out, err = process.communicate(timeout=100)
    return process.returncode, (out + err).splitlines()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for 60 s"
        time.sleep(0.05)


LOG1 = "{run}/logs/rank1.log"


@pytest.mark.parametrize(
    ("behaviour", "code", "lines"),
    [
        ("ok", 0, []),
        ("user", 2, ["mrl: error: rollout.n=0 must be > 0"]),
        ("bug", 1, [f"mrl: rank 1 failed: RuntimeError: shapes differ: 2 and 3; its log is {LOG1}"]),
        ("code", 1, [f"mrl: rank 1 ended with exit code 5; its log is {LOG1}"]),
        ("silent", 1, [f"mrl: rank 1 ended with exit code 7 and said nothing; its log is {LOG1}"]),
        ("sigkill", 1, [f"mrl: rank 1 was killed by SIGKILL (often for want of memory); its log is {LOG1}"]),
        ("segfault", 1, [f"mrl: rank 1 was killed by SIGSEGV; its log is {LOG1}"]),
    ],
)
def test_exit_code_and_line(tmp_path: Path, behaviour: str, code: int, lines: list[str]) -> None:
    assert run(tmp_path, behaviour) == (code, [line.format(run=tmp_path) for line in lines])
    wait_for(lambda: processes_of(tmp_path) == [])
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"OMP_NUM_THREADS {threads} world 2" in (tmp_path / "logs" / "rank0.log").read_text()
    assert f"OMP_NUM_THREADS={threads}" in (tmp_path / "logs" / "torchrun.log").read_text()
    if behaviour in ("user", "bug"):
        assert "Traceback (most recent call last)" in (tmp_path / "logs" / "rank1.log").read_text()
    if behaviour == "ok":
        assert read_status(tmp_path) == Status(0, "", 0)


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "mrl: interrupted; {run} holds the steps done so far"),
        (signal.SIGTERM, 1, "mrl: stopped by SIGTERM; {run} holds the steps done so far"),
        (signal.SIGUSR1, 1, "mrl: stopped by SIGUSR1; {run} holds the steps done so far"),
    ],
)
def test_signal_ends_every_rank(tmp_path: Path, number: signal.Signals, code: int, line: str) -> None:
    process = start(tmp_path, "sleep")
    wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, (out + err).splitlines()) == (code, [line.format(run=tmp_path)])
    assert processes_of(tmp_path) == []


def test_ranks_that_save_after_sigterm_decide_the_code(tmp_path: Path) -> None:
    process = start(tmp_path, "save")
    wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep")
    wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: processes_of(tmp_path) == [])


def test_first_status_wins(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    assert write_status(tmp_path, 2, "first", 3)
    assert not write_status(tmp_path, 1, "second", 0)
    assert read_status(tmp_path) == Status(2, "first", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_cores_are_shared() -> None:
    cores = len(os.sched_getaffinity(0))
    assert omp_threads(1) == cores
    assert omp_threads(cores * 3) == 1
