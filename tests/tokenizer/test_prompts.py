"""Reading prompts in verl's columns and flat ones, and the order they are dealt in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.prompts import Prompt, PromptStream, read_prompts

VERL_ROW: dict[str, Any] = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2? 日本"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_verl_rows_read_alike_from_jsonl_and_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW, VERL_ROW]), tmp_path / "a.parquet")
    from_parquet = read_prompts([tmp_path / "a.parquet"])
    from_jsonl = read_prompts([jsonl(tmp_path / "a.jsonl", VERL_ROW, VERL_ROW)])
    for prompts, origin in ((from_parquet, "a.parquet:row 1"), (from_jsonl, "a.jsonl:2")):
        columns = {key: value for key, value in VERL_ROW.items() if key != "prompt"}
        expected = Prompt(
            1, VERL_ROW["prompt"], "gsm8k", "4", {"split": "train", "index": 7}, columns, str(tmp_path / origin)
        )
        assert prompts[1] == expected


def test_flat_columns(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "ground_truth": 1, "answer": 2},
        {"prompt": "b", "answer": 2},
        {"prompt": "c"},
        {"prompt": "d", "reward_model": {"ground_truth": None}, "ground_truth": 1},
        {"prompt": "e", "reward_model": {"style": "rule"}, "ground_truth": 1},
    ]
    prompts = read_prompts([jsonl(tmp_path / "sums.jsonl", *rows)])
    assert [p.ground_truth for p in prompts] == [1, 2, None, None, 1]
    assert {p.data_source for p in prompts} == {"sums"}
    assert prompts[0].columns == {"ground_truth": 1, "answer": 2}
    assert prompts[2].extra_info == {}


def test_several_files_other_key_blank_lines_and_byte_order_mark(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", {"question": "1"}, {"question": "2"})
    second = tmp_path / "b.jsonl"
    second.write_bytes(b'\xef\xbb\xbf{"question": "3"}\r\n\n  \n{"question": "4\xe2\x80\xa8"}')
    prompts = read_prompts([first, second], prompt_key="question")
    assert [(p.index, p.content) for p in prompts] == [(0, "1"), (1, "2"), (2, "3"), (3, "4\u2028")]
    assert prompts[3].origin.endswith("b.jsonl:4")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_prompts", "batch_size"), [(10, 4), (10, 10), (7, 3), (3, 8), (1, 2)])
def test_every_epoch_has_every_prompt_once(num_prompts: int, batch_size: int, shuffle: bool) -> None:
    stream = PromptStream(num_prompts, batch_size, seed=5, shuffle=shuffle)
    dealt = [i for step in range(num_prompts * 2) for i in stream.batch(step)]
    epochs = [dealt[start : start + num_prompts] for start in range(0, len(dealt) - num_prompts + 1, num_prompts)]
    assert all(Counter(epoch) == Counter(range(num_prompts)) for epoch in epochs)
    if not shuffle:
        assert epochs[0] == list(range(num_prompts))


def test_order_depends_on_seed_and_step_alone() -> None:
    stream = PromptStream(100, 30, seed=1, shuffle=True)
    forward = [stream.batch(step) for step in range(10)]
    assert [PromptStream(100, 30, 1, True).batch(step) for step in reversed(range(10))] == forward[::-1]
    assert PromptStream(100, 30, 2, True).batch(0) != forward[0]
    whole = PromptStream(100, 100, 1, True)
    assert whole.batch(0) != whole.batch(1)
    assert whole.batch(0) != list(range(100))
    assert stream.epoch(10) == 3.0
