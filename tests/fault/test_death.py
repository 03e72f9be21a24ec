"""A rank that dies in the middle of a run takes the job down, with its message shown and nothing left half-written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.cli import run_dir_override, start


def rank_pid(run_dir: Path, rank: int) -> int:
    """Process id of a running rank: the one whose command line names the run directory and whose RANK it is."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"--prepared-run-dir\0{run_dir}\0".encode() in command and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"rank {rank} is not running")


def test_a_killed_rank_ends_the_job_within_a_minute(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("train", "configs/demo.yaml", run_dir_override(run_dir), "trainer.total_steps=1000")
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step in 120 s"
        time.sleep(0.1)
    os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
    killed_at = time.monotonic()
    out, err = process.communicate(timeout=90)
    assert time.monotonic() - killed_at < 60
    assert process.returncode == 1
    last = (out + err).splitlines()[-1]
    assert last == f"mrl: rank 1 was killed by SIGKILL (often for want of memory); its log is {run_dir}/logs/rank1.log"
    assert not (run_dir / "hf").exists()
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]
