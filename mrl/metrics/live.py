"""What a person watching the run sees: a live panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"

SHOWN = [
    ("reward", "critic/score/mean", "{:.3f}"),
    ("KL to reference", "actor/reward_kl_penalty", "{:.4f}"),
    ("KL to reference", "actor/kl_loss", "{:.4f}"),
    ("response length", "response_length/mean", "{:.1f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("clip fraction", "actor/pg_clipfrac", "{:.3f}"),
    ("gradient norm", "actor/grad_norm", "{:.3f}"),
    ("rollout mismatch", "mismatch/exp_abs_diff", "{:.5f}"),
]
"""(label, metric, format): the rows of the panel, where the run has the metric."""


class View(Protocol):
    """How a rank tells of its progress."""

    def phase(self, text: str) -> None:
        """A part of the run outside the steps begins (building, starting vLLM, exporting)."""

    def stage(self, name: str) -> None:
        """A stage of the current step begins."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step is done."""

    def message(self, text: str) -> None:
        """A line that stays; after `close` it stands below everything."""

    def close(self) -> None:
        """The run is over. May be called twice."""


class SilentView:
    """For the ranks that nobody watches."""

    def phase(self, text: str) -> None: ...

    def stage(self, name: str) -> None: ...

    def step(self, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_view(stream: TextIO, name: str, total_steps: int) -> View:
    return LiveView(stream, name, total_steps) if stream.isatty() else PlainView(stream, total_steps)


def eta_seconds(done: int, total: int, seconds_per_step: list[float]) -> float | None:
    """Time left from the mean of the last ten steps; None before the first."""
    recent = seconds_per_step[-10:]
    return (total - done) * sum(recent) / len(recent) if recent else None


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: list[float], width: int) -> str:
    """The values as bars between their minimum and maximum, averaged into at most `width` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def stage_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage of a step, longest first."""
    times = {k.removeprefix("timing_s/"): v for k, v in metrics.items() if k.startswith("timing_s/")}
    times.pop("step", None)
    return dict(sorted(times.items(), key=lambda item: -item[1]))


class PlainView:
    """One aligned line a step, for logs and pipes."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._stream, self._total = stream, total_steps
        self._phase: tuple[str, float] | None = None
        self._seconds: list[float] = []

    def phase(self, text: str) -> None:
        self._end_phase()
        self._phase = (text, time.monotonic())

    def _end_phase(self) -> None:
        if self._phase is not None:
            text, start = self._phase
            self._phase = None
            self.message(f"{text} ({time.monotonic() - start:.1f} s)")

    def stage(self, name: str) -> None:
        self._end_phase()

    def step(self, metrics: Mapping[str, float]) -> None:
        done = int(metrics["step"])
        self._seconds.append(metrics["timing_s/step"])
        left = eta_seconds(done, self._total, self._seconds)
        longest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in list(stage_times(metrics).items())[:3])
        parts = [f"step {done:>{len(str(self._total))}}/{self._total}"]
        for label, key, form in SHOWN[:5]:
            if key in metrics:
                parts.append(f"{label.split(' to ')[0].replace('response ', '')} {form.format(metrics[key])}")
        parts.append(f"{metrics['timing_s/step']:.2f} s ({longest})")
        parts.append(f"left {clock(left or 0.0)}")
        self.message("  ".join(parts))

    def message(self, text: str) -> None:
        self._end_phase()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._end_phase()


class LiveView:
    """A panel that redraws in place. It draws on its own stream, whatever stdout and stderr have become."""

    def __init__(self, stream: TextIO, name: str, total_steps: int) -> None:
        self._name, self._total = name, total_steps
        self._history: list[dict[str, float]] = []
        self._now, self._since = "starting", time.monotonic()
        self._spinner = Spinner("dots")
        self._console = Console(file=stream, force_terminal=True)
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=8,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def phase(self, text: str) -> None:
        self._now, self._since = text, time.monotonic()

    def stage(self, name: str) -> None:
        self.phase(name)

    def step(self, metrics: Mapping[str, float]) -> None:
        # A new list, because the drawing thread may be reading the old one.
        self._history = [*self._history, dict(metrics)]

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def close(self) -> None:
        self._now = "done"
        self._live.stop()

    def _render(self) -> Group:
        history = self._history
        done = int(history[-1]["step"]) if history else 0
        width = self._console.width
        left = eta_seconds(done, self._total, [row["timing_s/step"] for row in history])
        headline = Text.assemble(
            (f"mrl {self._name}", "bold"), f"  step {done}/{self._total}",
            f"  left {clock(left)}" if left is not None and done < self._total else "",
            overflow="ellipsis", no_wrap=True,
        )  # fmt: skip
        bar = ProgressBar(total=self._total, completed=done, width=max(10, min(60, width - 22)))
        seconds = time.monotonic() - self._since
        elapsed = f" {clock(seconds)}" if seconds >= 2 else ""
        self._spinner.update(text=Text(self._now + elapsed, style="cyan"))
        progress = Table.grid(padding=(0, 2))
        progress.add_row(bar, Text("") if self._now == "done" else self._spinner)
        parts: list[RenderableType] = [headline, progress]
        if history:
            parts += [Padding(self._metrics_table(history, width), (1, 0, 0, 0)), self._stage_table(history[-1], width)]
        return Group(*parts)

    def _metrics_table(self, history: list[dict[str, float]], width: int) -> Table:
        table = Table.grid(padding=(0, 2))
        for label, key, form in SHOWN:
            values = [row[key] for row in history if key in row and row[key] == row[key]]
            if values:
                line = sparkline(values, max(8, min(40, width - 34)))
                table.add_row(
                    label, Text(form.format(values[-1]), style="bold", justify="right"), Text(line, style="green")
                )
        return table

    def _stage_table(self, metrics: Mapping[str, float], width: int) -> Padding:
        times = stage_times(metrics)
        longest = max(times.values(), default=0.0)
        table = Table.grid(padding=(0, 2))
        for name, seconds in list(times.items())[:9]:
            blocks = round(seconds / longest * max(8, min(40, width - 34))) if longest else 0
            table.add_row(name, Text(f"{seconds:.2f} s", justify="right"), Text("━" * blocks, style="blue"))
        return Padding(table, (1, 0, 0, 0))


def closing_lines(run_dir: Path, rows: list[Mapping[str, float]], seconds: float) -> list[str]:
    """What the run came to, for its last lines."""
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    first, last = scores[:3], scores[-5:]
    gained = f"reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}" if scores else "no reward measured"
    return [
        f"done: {len(rows)} steps in {clock(seconds)}, {gained} (mean of the first 3 and the last 5 steps)",
        f"  {run_dir / 'hf'}/  the trained model, an ordinary HuggingFace directory",
        f"  {run_dir / 'curves.png'}, metrics.jsonl, rollouts.jsonl, logs/",
    ]
