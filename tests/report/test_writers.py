"""Files that a run leaves: metrics.jsonl, rollouts.jsonl, TensorBoard, curves.png."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from mrl.metrics.curves import plot_run
from mrl.metrics.writers import RunWriter, read_metrics


def test_each_step_is_one_json_object_on_disk_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, tensorboard=False)
    writer.metrics({"step": 1, "a": 0.5, "b": float("nan"), "c": float("inf")})
    writer.rollouts([{"response": "né\u2028\n"}])
    # Not closed: a killed run has what it had measured.
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": None, "c": None}]
    lines = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line) for line in lines if line] == [{"response": "né\u2028\n"}]
    writer.metrics({"step": 2, "a": 1.0})
    writer.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no such file; .* is not the directory of an mrl run"):
        read_metrics(tmp_path)


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_installed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install 'mrl\[tensorboard\]'"):
        RunWriter(tmp_path, tensorboard=True)


@pytest.mark.parametrize("steps", [1, 30])
def test_the_picture_of_a_run_with_gaps(tmp_path: Path, steps: int) -> None:
    """It is drawn from whatever metrics there are, and shows ink where the curves go."""
    writer = RunWriter(tmp_path, tensorboard=False)
    for step in range(1, steps + 1):
        score = {"critic/score/mean": step / steps, "critic/score/max": 1.0, "critic/score/min": 0.0}
        row = {"step": step, "actor/reward_kl_penalty": 0.01 * step, "timing_s/rollout": 1.0, "timing_s/sync": 0.1}
        writer.metrics({**row, **(score if step != 7 else {}), "response_length/mean": 5.0 + step})
    writer.close()
    picture = plot_run(tmp_path)
    assert picture == tmp_path / "curves.png"
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.size == (1210, 770)
        # The reward's blue inside the axes (the legend stands above them), also for a point without neighbours.
        axes = image.convert("RGB").crop((70, 30, 510, 330))
    assert any(colour == (0, 114, 178) for _, colour in axes.getcolors(1 << 20) or [])
    assert not (tmp_path / ".curves.png.partial").exists()
