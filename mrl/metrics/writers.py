"""What a run leaves on disk while it goes: metrics.jsonl, rollouts.jsonl and, if asked, TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO


def check_tensorboard() -> None:
    """Raise ValueError where trainer.tensorboard is set and the package is missing."""
    if find_spec("tensorboard") is None:
        raise ValueError("trainer.tensorboard is true but tensorboard is not installed; pip install 'mrl[tensorboard]'")


class RunWriter:
    """Appends to a run's files; every line is flushed, so that a killed run keeps what it had measured."""

    def __init__(self, run_dir: Path, tensorboard: bool) -> None:
        self._board: Any = None
        if tensorboard:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))
        self._metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._rollouts = (run_dir / "rollouts.jsonl").open("a", encoding="utf-8")

    def metrics(self, row: Mapping[str, float]) -> None:
        """One step: `step` first. NaN and infinities are written as null, which JSON has."""
        assert next(iter(row)) == "step"
        _write_line(self._metrics, {name: json_number(value) for name, value in row.items()})
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, row["step"])

    def rollouts(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            _write_line(self._rollouts, row)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()
        if self._board is not None:
            self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """The rows of metrics.jsonl in order; ValueError naming the file where there is none."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {run_dir} is not the directory of an mrl run")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def json_number(value: float) -> float | None:
    """NaN and infinities as null, which JSON has."""
    return value if math.isfinite(value) else None


def _write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    print(json.dumps(row, ensure_ascii=False, allow_nan=False), file=file, flush=True)
