"""What travels between the scorer and its worker processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Style = Literal["sample", "batch"]


@dataclass(frozen=True)
class RewardSample:
    """A finished response and what its reward may look at.

    prompt_index: the prompt's position in the step (samples of one group share it); sample_index: 0 .. n-1 within the
    group. prompt: text or chat messages. columns: the data row without its prompt (batch style only).
    """

    prompt_index: int
    sample_index: int
    prompt: str | list[dict[str, str]]
    solution_str: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_index, self.sample_index


@dataclass(frozen=True)
class LoadRequest:
    """First message to a worker: which function, called how."""

    function: str
    style: Style
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One sample's score, or why it has none (`error`, and then score is NaN)."""

    score: float
    components: dict[str, float]
    error: str | None = None


@dataclass(frozen=True)
class Reply:
    """A worker's answer to one request: an outcome per sample, or an error for all of them.

    fatal: stops the run whatever reward.on_error says (a list of the wrong length leaves no way to tell whose score is
    whose). traceback_text: Python's traceback where the function raised, else "".
    """

    outcomes: list[Outcome]
    error: str | None = None
    traceback_text: str = ""
    fatal: bool = False
