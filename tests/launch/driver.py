"""`driver.py RUN_DIR BEHAVIOUR`: what `mrl train` does around mrl.launch, with the ranks of worker.py."""

from __future__ import annotations

import sys
from pathlib import Path

from mrl.launch import launch, report

if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    worker = Path(__file__).with_name("worker.py")
    status = launch([str(worker), str(run_dir), sys.argv[2]], 2, run_dir)
    report(status, sys.stderr)
    sys.exit(status.exit_code)
