"""A rank that behaves as told: `worker.py RUN_DIR BEHAVIOUR`. Small and real: only mrl.launch, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from mrl.launch import end_with_parent, rank_log, redirect_output, run_rank, write_status


def body(behaviour: str, run_dir: Path, rank: int) -> int:
    redirect_output(rank_log(run_dir, rank))
    print(f"OMP_NUM_THREADS {os.environ['OMP_NUM_THREADS']} world {os.environ['WORLD_SIZE']}", flush=True)
    fails = rank == 1
    if fails:  # not before the other has spoken: the agent ends it at once, and the tests read its log
        while not (log := rank_log(run_dir, 0)).exists() or not log.stat().st_size:
            time.sleep(0.01)
    match behaviour:
        case "user" if fails:
            raise ValueError("rollout.n=0 must be > 0")
        case "bug" if fails:
            raise RuntimeError("shapes differ:\n2 and 3")
        case "code" if fails:
            return 5
        case "silent" if fails:
            os._exit(7)
        case "sigkill" if fails:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(run_dir)])
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault" if fails:
            os.kill(os.getpid(), signal.SIGSEGV)
        case "sigkill":  # the other rank sees its connection go, and is the first to say something
            write_status(run_dir, 1, "connection closed by peer", rank)
            return 1
        case "ok":
            return 0
        case "save":
            signal.signal(signal.SIGTERM, lambda number, frame: _save(run_dir, rank, number, frame))
    (run_dir / f"ready{rank}").touch()
    time.sleep(600)
    return 0


def _save(run_dir: Path, rank: int, number: int, frame: FrameType | None) -> None:
    time.sleep(0.5)
    (run_dir / f"saved{rank}").touch()
    if rank == 0:
        write_status(run_dir, 0, "", rank)
    os._exit(0)


if __name__ == "__main__":
    end_with_parent()
    where, own_rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sys.exit(run_rank(where, own_rank, lambda: body(sys.argv[2], where, own_rank), show_traceback=False, speak=False))
