"""The sums example's reward, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.rewards.loading import check_reward, load_reward

REWARD = f"{Path(__file__).parents[2]}/examples/sums/reward.py:compute_score"


@pytest.mark.parametrize(
    ("answer", "truth", "accuracy", "bare"),
    [
        ("7", "7", 1, 1),
        (" -4\n", "-4", 1, 1),
        ("4", "-4", 0, 1),
        ("3 + 4 = 7", "7", 1, 0),
        ("7 is 3 + 4", "7", 0, 0),
        ("17", "7", 0, 1),
        ("", "7", 0, 0),
        ("seven", "7", 0, 0),
        ("9" * 5000, "7", 0, 1),
    ],
)
def test_score(answer: str, truth: str, accuracy: int, bare: int) -> None:
    check_reward(REWARD, "sample", {})
    value = load_reward(REWARD, "sample", {}).call("sums", answer, truth, {})
    assert value == {"score": pytest.approx(0.9 * accuracy + 0.1 * bare), "accuracy": accuracy, "format": bare}
