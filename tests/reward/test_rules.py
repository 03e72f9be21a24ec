"""Built-in rewards, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.rewards.rules import contains, exact_match, regex_match


@pytest.mark.parametrize(
    ("solution", "truth", "kwargs", "score"),
    [
        ("42", "42", {}, 1.0),
        ("  42\n", 42, {}, 1.0),
        ("42.", "42", {}, 0.0),
        ("", "", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
    ],
)
def test_exact_match(solution: str, truth: Any, kwargs: dict[str, Any], score: float) -> None:
    assert exact_match("d", solution, truth, {}, **kwargs) == score


def test_contains() -> None:
    assert contains("d", "the answer is 42.", "42", {}) == 1.0
    assert contains("d", "the answer is", "42", {}) == 0.0
    assert contains("d", "STRASSE", "straße", {}, ignore_case=True) == 1.0
    with pytest.raises(ValueError, match="ground_truth is empty"):
        contains("d", "anything", "", {})


def test_regex_match() -> None:
    assert regex_match("d", "x = 17", r"^x = \d+$", {}) == 1.0
    assert regex_match("d", "x = y", r"^x = \d+$", {}) == 0.0
    # With a pattern of its own: the last match's group is compared with the ground truth.
    assert regex_match("d", "#### 3 then #### 42", "42", {}, pattern=r"#### (-?\d+)") == 1.0
    assert regex_match("d", "#### 42 then #### 3", "42", {}, pattern=r"#### (-?\d+)") == 0.0
    assert regex_match("d", "no answer", "42", {}, pattern=r"#### (-?\d+)") == 0.0
    assert regex_match("d", "1 2 42", 42, {}, pattern=r"\d+") == 1.0


def test_no_ground_truth_is_refused() -> None:
    for rule in (exact_match, contains, regex_match):
        with pytest.raises(ValueError, match="no ground truth"):
            rule("d", "x", None, {})
