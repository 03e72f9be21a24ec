"""The command as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DEMO = "configs/demo.yaml"
DEMO_STEPS = 32
"""Steps of the tests' demo run; `make demo` takes some more."""


def start_python(*arguments: str) -> subprocess.Popen[str]:
    """`python ARGUMENTS...` from the project's root, as if no torchrun were around it; output in pipes, no terminal."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    """`mrl ARGUMENTS...`"""
    return start_python("-m", "mrl", *arguments)


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names this run directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run_dir).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def run(*arguments: str, timeout_s: float = 600) -> tuple[int, list[str]]:
    """(exit code, lines on the terminal)"""
    process = start(*arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        raise AssertionError(f"mrl {' '.join(arguments)} took over {timeout_s} s:\n{out}{err}") from None
    return process.returncode, (out + err).splitlines()


def run_dir_override(path: Path) -> str:
    return f"trainer.run_dir={path}"


def rollout_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]
