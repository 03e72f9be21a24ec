"""Built-in rewards, for use as `reward.function: exact_match` and the like: 1.0 where the answer is right, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, ignore_case: bool = False
) -> float:
    """The response is the ground truth, but for white space around it."""
    expected, actual = _text(ground_truth).strip(), solution_str.strip()
    return float(_fold(actual, ignore_case) == _fold(expected, ignore_case))


def contains(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, ignore_case: bool = False
) -> float:
    """The ground truth stands somewhere in the response. An empty ground truth is refused: everything contains it."""
    expected = _text(ground_truth)
    if not expected:
        raise ValueError("ground_truth is empty, and every response contains that")
    return float(_fold(expected, ignore_case) in _fold(solution_str, ignore_case))


def regex_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    pattern: str | None = None,
    ignore_case: bool = False,
) -> float:
    """A regular expression matches somewhere in the response.

    With `pattern` (one for all rows), its first group, or the whole match where it has none, must equal the ground
    truth at the last match; without it, the ground truth is the expression.
    """
    flags = re.IGNORECASE if ignore_case else 0
    if pattern is None:
        return float(re.search(_text(ground_truth), solution_str, flags) is not None)
    last = None
    for match in re.finditer(pattern, solution_str, flags):
        last = match
    if last is None:
        return 0.0
    found = last.group(1 if last.re.groups else 0) or ""
    return float(_fold(found.strip(), ignore_case) == _fold(_text(ground_truth).strip(), ignore_case))


BUILT_INS: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "regex_match": regex_match,
    "contains": contains,
}


def _text(ground_truth: Any) -> str:
    """The ground truth as text; numbers are written as Python writes them."""
    if ground_truth is None:
        raise ValueError("the row has no ground truth (reward_model.ground_truth, ground_truth or answer)")
    return str(ground_truth)


def _fold(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text
