"""The picture of a run: reward, KL, length and entropy, time per stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.metrics.writers import read_metrics

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
STAGE_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000"]
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""


def plot_run(run_dir: Path) -> Path:
    """Write <run_dir>/curves.png from metrics.jsonl and return its path. Missing or null values leave gaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    steps = [int(row["step"] or 0) for row in rows]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    reward, kl, length, stages = figure.subplots(2, 2).flat

    _line(reward, steps, rows, "critic/score/mean", "mean", BLUE)
    low, high = _column(rows, "critic/score/min"), _column(rows, "critic/score/max")
    reward.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0, label="min to max")
    _finish(reward, "Reward", "score")

    _line(kl, steps, rows, "actor/reward_kl_penalty", "reference, in reward", ORANGE)
    _line(kl, steps, rows, "actor/kl_loss", "reference, in loss", ORANGE)
    _line(kl, steps, rows, "actor/ppo_kl", "old policy", GREY)
    _finish(kl, "KL divergence", "nats per token")

    _line(length, steps, rows, "response_length/mean", "length", GREEN)
    _finish(length, "Length, entropy", "tokens")
    entropy = length.twinx()
    _line(entropy, steps, rows, "actor/entropy", "entropy (right)", ORANGE)
    entropy.set_ylabel("nats per token")
    entropy.spines[["top"]].set_visible(False)
    _legend(length, *length.get_lines(), *entropy.get_lines())

    names = [n for n in _stage_names(rows) if any(v > 0 for v in _column(rows, f"timing_s/{n}"))]
    if names:
        columns = [[v if v == v else 0.0 for v in _column(rows, f"timing_s/{n}")] for n in names]
        colours = [STAGE_COLOURS[i % len(STAGE_COLOURS)] for i in range(len(names))]
        if len(steps) == 1:  # an area needs two points
            stages.stackplot([steps[0] - 0.4, steps[0] + 0.4], [c * 2 for c in columns], labels=names, colors=colours)
        else:
            stages.stackplot(steps, columns, labels=names, colors=colours)
    _finish(stages, "Time per stage", "seconds")
    if names:
        stages.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)

    partial = run_dir / ".curves.png.partial"
    figure.savefig(partial, dpi=110, format="png")
    os.replace(partial, run_dir / "curves.png")
    return run_dir / "curves.png"


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    nan = float("nan")
    return [nan if row.get(key) is None else float(row[key]) for row in rows]


def _stage_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(k.removeprefix("timing_s/") for row in rows for k in row if k.startswith("timing_s/"))
    return [name for name in names if name != "step"]


def _line(axis: Any, steps: list[int], rows: Sequence[dict[str, Any]], key: str, label: str, colour: str) -> None:
    values = _column(rows, key)
    present = [v == v for v in values]
    if any(present):
        # A point without neighbours makes no line: it gets a dot.
        padded = [False, *present, False]
        alone = [i for i, there in enumerate(present) if there and not padded[i] and not padded[i + 2]]
        axis.plot(steps, values, color=colour, label=label, linewidth=1.6, marker="o", markersize=4, markevery=alone)


def _finish(axis: Any, title: str, unit: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel("step")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    _legend(axis, *axis.get_legend_handles_labels()[0])


def _legend(axis: Any, *handles: Any) -> None:
    if handles:
        # Beside the title, where no curve can pass.
        axis.legend(
            handles=handles, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.99),
            ncols=len(handles), borderaxespad=0.0, handlelength=1.2, columnspacing=1.0,
        )  # fmt: skip
