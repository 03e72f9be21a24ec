"""A rank that dies takes the job down, with its message shown, what was done kept and nothing half-written."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.metrics.writers import read_metrics
from tests.cli import DEMO, processes_of, rollout_rows, run_dir_override, start


def rank_pid(run_dir: Path, rank: int) -> int:
    """Process id of a running rank; a child that it is just forking off looks the same, but is younger."""
    return min(
        pid
        for pid in processes_of(run_dir)
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )


@dataclass(frozen=True)
class Killed:
    """A run whose rank 1 got SIGKILL in its third step."""

    run_dir: Path
    exit_code: int
    lines: list[str]
    seconds: float


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    process = start("train", DEMO, run_dir_override(run_dir), "trainer.total_steps=1000")
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no second step in 120 s"
        time.sleep(0.05)
    os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
    killed_at = time.monotonic()
    out, err = process.communicate(timeout=120)
    return Killed(run_dir, process.returncode, (out + err).splitlines(), time.monotonic() - killed_at)


def test_a_killed_rank_ends_the_job_within_a_minute(killed: Killed) -> None:
    assert killed.seconds < 60
    assert killed.exit_code == 1
    log = killed.run_dir / "logs" / "rank1.log"
    assert killed.lines[-1] == f"mrl: rank 1 was killed by SIGKILL (often for want of memory); its log is {log}"
    assert not (killed.run_dir / "hf").exists()
    assert not [path for path in killed.run_dir.iterdir() if path.name.startswith(".")]


def test_what_it_had_done_is_kept_and_equals_another_run_of_its_seed(killed: Killed, demo: Path) -> None:
    """Two runs of one seed: the same metrics (but for times and memory) and the same samples, bit for bit."""
    varying = ("timing_s/", "perf/", "memory/")
    steps = zip(read_metrics(killed.run_dir)[:2], read_metrics(demo)[:2], strict=True)
    for ours, theirs in steps:
        assert ours.keys() == theirs.keys()
        assert {k: v for k, v in ours.items() if not k.startswith(varying) and theirs[k] != v} == {}
    first_two = [[row for row in rollout_rows(d) if row["step"] <= 2] for d in (killed.run_dir, demo)]
    assert len(first_two[0]) == 128
    assert first_two[0] == first_two[1]
