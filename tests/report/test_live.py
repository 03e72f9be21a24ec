"""What a person sees: a line a step in a pipe, a panel on a terminal (drawn on a real pseudo-terminal)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest

from mrl.metrics.live import LiveView, PlainView, clock, closing_lines, eta_seconds, open_view, sparkline

STEP = {
    "step": 1.0,
    "critic/score/mean": 0.25,
    "actor/reward_kl_penalty": 0.001,
    "response_length/mean": 7.5,
    "actor/entropy": 2.5,
    "timing_s/step": 2.0,
    "timing_s/rollout": 1.25,
    "timing_s/update_actor": 0.5,
    "timing_s/sync": 0.125,
    "timing_s/adv": 0.0625,
}


def test_eta_is_the_mean_of_the_last_ten_steps() -> None:
    assert eta_seconds(0, 5, []) is None
    assert eta_seconds(12, 20, [100.0, 100.0, *[2.0] * 10]) == 16.0


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [([], 5, ""), ([1.0], 5, "▁"), ([0.0, 7.0], 5, "▁█"), ([0, 0, 7, 7], 2, "▁█"), (list(range(8)), 8, "▁▂▃▄▅▆▇█")],
)
def test_sparkline(values: list[float], width: int, text: str) -> None:
    assert sparkline(values, width) == text


def test_plain_lines_tell_phases_then_steps_then_the_end(tmp_path: Path) -> None:
    stream = StringIO()
    view = open_view(stream, "demo", 10)
    assert isinstance(view, PlainView)
    view.phase("building the models")
    view.phase("starting vLLM")
    view.stage("rollout")
    view.step(STEP)
    view.phase("writing the trained model")
    for line in closing_lines(tmp_path, [STEP], 65.0):
        view.message(line)
    view.close()
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"\d+\.\d+ s", "T", line) for line in lines[:2]] == ["building the models (T)", "starting vLLM (T)"]
    assert lines[2] == (
        "step  1/10  reward 0.250  KL 0.0010  length 7.5  entropy 2.500  "
        "2.00 s (rollout 1.25, update_actor 0.50, sync 0.12)  left 0:18"
    )
    assert lines[3].startswith("writing the trained model (")
    assert lines[4] == "done: 1 steps in 1:05, reward 0.250 -> 0.250 (mean of the first 3 and the last 5 steps)"
    assert len(lines) == 7


def _read_all(master: int) -> bytes:
    """All that is drawn until the terminal's other end closes (Linux then reports an input error)."""
    chunks = []
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 1 << 16):
            chunks.append(chunk)
    return b"".join(chunks)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_the_panel_fits_the_terminal(columns: int, rows: int, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream, ThreadPoolExecutor() as pool:
        reading = pool.submit(_read_all, master)
        view = open_view(stream, "demo", 10)
        assert isinstance(view, LiveView)
        view.phase("starting vLLM")
        for step in range(1, 11):
            view.stage("update_actor")
            view.step({**STEP, "step": float(step), "critic/score/mean": step / 10})
        view.close()
        view.message("done: ten steps")
        view.close()
        stream.close()
        drawn = reading.result().decode()
    os.close(master)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    last = plain[plain.rindex("mrl demo") :]
    assert "step 10/10" in last
    assert re.search(r"reward +1\.000 +▁.*█", last)
    assert re.search(r"rollout +1\.25 s +━+", last)
    frame = last.replace("\r", "").rstrip("\n").split("\n")
    assert frame.pop() == "done: ten steps"
    assert max(map(len, frame)) <= columns
    assert len(frame) < rows
