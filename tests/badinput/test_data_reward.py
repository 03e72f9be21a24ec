"""Bad prompt files and reward functions: one line each that names the thing and the way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.data.prompts import read_prompts
from mrl.rewards.loading import RewardError, check_reward, load_reward
from mrl.rewards.scorer import RewardScorer

GOOD = '{"prompt": "fine"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + '{"prompt": "cut', r"p\.jsonl:2: not JSON \(Unterminated string .*column 12\); correct the line"),
        (GOOD + "\n[1]", r"p\.jsonl:3: a row must be a JSON object, this is a list"),
        (GOOD + "null", r"p\.jsonl:2: a row must be a JSON object, this is missing or null"),
        (
            '{"question": "x", "answer": 1}',
            r"p\.jsonl:1: no key 'prompt' \(keys here: 'question', 'answer'\); set data",
        ),
        ("{}", r"p\.jsonl:1: no key 'prompt' \(keys here: none\)"),
        ('{"prompt": 7}', r"p\.jsonl:1: prompt must be text or a list of messages, this is a number"),
        ('{"prompt": null}', r"p\.jsonl:1: prompt must be text or a list of messages, this is missing or null"),
        ('{"prompt": []}', r"p\.jsonl:1: prompt is an empty list of messages"),
        ('{"prompt": ["hi"]}', r"p\.jsonl:1: prompt\[0\] must be a message with role and content, this is text"),
        ('{"prompt": [{"role": "user"}]}', r"prompt\[0\] needs text under 'content', this is missing or null"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', r"'content', this is a list"),
        ('{"prompt": "\\ud800"}', r"p\.jsonl:1: prompt has a lone surrogate \\ud800; remove it"),
        ('{"prompt": "x", "extra_info": "y"}', r"p\.jsonl:1: extra_info must be an object, this is text"),
        ('{"prompt": "x", "reward_model": "y"}', r"p\.jsonl:1: reward_model must be an object, this is text"),
        ('{"prompt": "x", "data_source": 1}', r"p\.jsonl:1: data_source must be text, this is a number"),
        ("[" * 100_000, r"p\.jsonl:1: (JSON nested too deeply|not JSON)"),
        ("", r"p\.jsonl holds no prompts"),
        ("\n \n", r"p\.jsonl holds no prompts"),
        (
            GOOD.encode() + b'{"prompt": "\xff"}',
            r"p\.jsonl:2: not UTF-8 \(invalid start byte at byte 12\); re-encode it",
        ),
        (json.dumps({"prompt": "x"}).encode("utf-16"), r"p\.jsonl:1: not UTF-8"),
    ],
)
def test_malformed_jsonl(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts([path])
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_not_theirs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist; correct data.train_files"):
        read_prompts([tmp_path / "gone.jsonl"])
    for name in ("rows.json", "rows.csv"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(ValueError, match=r"neither \.jsonl .* nor \.parquet"):
            read_prompts([tmp_path / name])
    (tmp_path / "rows.parquet").write_text("not parquet at all, not even nearly")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a readable parquet file") as caught:
        read_prompts([tmp_path / "rows.parquet"])
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"data\.train_files is empty"):
        read_prompts([])


SAMPLE = "data_source, solution_str, ground_truth, extra_info"


@pytest.mark.parametrize(
    ("source", "function", "kwargs", "message"),
    [
        ("def compute_score(:\n", "r.py:f", {}, r"r\.py:1: invalid syntax; correct the reward file"),
        ("x = 1\n  y = 2\n", "r.py:f", {}, r"r\.py:2: unexpected indent"),
        ("x = '\0'", "r.py:f", {}, r"r\.py.*null byte"),
        (
            "def a(x): pass\ndef b(x): pass\n",
            "r.py:f",
            {},
            r"r\.py has no function 'f' \(functions there: a, b\); correct",
        ),
        ("", "r.py:f", {}, r"has no function 'f' \(functions there: none\)"),
        ("", "r.py:", {}, r"must end in a function name"),
        ("", "gone.py:f", {}, r"reward file .*gone\.py' does not exist; correct reward.function=.*gone.py:f"),
        (
            "\ndef f(solution_str, ground_truth): pass",
            "r.py:f",
            {},
            r"r\.py:2 in f does not take data_source, extra_info",
        ),
        (f"def f({SAMPLE}): pass", "r.py:f", {"scale": 2}, r"does not take scale"),
        (
            f"def f({SAMPLE}, scale): pass",
            "r.py:f",
            {},
            r"needs scale, which mrl does not pass; give it in reward.kwargs",
        ),
        (f"def f({SAMPLE}): pass", "r.py:f", {"ground_truth": 2}, r"reward.kwargs sets ground_truth, which mrl itself"),
    ],
)
def test_unusable_reward(tmp_path: Path, source: str, function: str, kwargs: dict[str, Any], message: str) -> None:
    """The static check and the loading worker say the same."""
    (tmp_path / "r.py").write_text(source)
    for check in (check_reward, load_reward):
        with pytest.raises(RewardError, match=message) as caught:
            check(f"{tmp_path}/{function}", "sample", kwargs)
        assert "\n" not in str(caught.value)


def test_built_in_names() -> None:
    with pytest.raises(
        RewardError, match=r"'exact' is neither .* nor a built-in \(exact_match, regex_match, contains\)"
    ):
        check_reward("exact", "sample", {})
    with pytest.raises(RewardError, match=r"exact_match scores samples one by one; set reward.style=sample"):
        check_reward("exact_match", "batch", {})
    with pytest.raises(RewardError, match=r"built-in reward contains does not take pattern"):
        check_reward("contains", "sample", {"pattern": "x"})


@pytest.mark.parametrize(
    "source",
    [
        f"def f({SAMPLE}): pass",
        f"def f({SAMPLE}, scale=1, **kwargs): pass",
        "def f(**kwargs): pass",
        f"f = lambda {SAMPLE}: 1",
        "from math import sqrt as f",
        "from math import *",
        f"try:\n    import nothing\nexcept ImportError:\n    def f({SAMPLE}): pass",
    ],
)
def test_what_the_static_check_lets_pass(tmp_path: Path, source: str) -> None:
    (tmp_path / "r.py").write_text(source)
    check_reward(f"{tmp_path}/r.py:f", "sample", {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nimport no_such_module_at_all as f\n", r"r\.py:2: ModuleNotFoundError: No module named .* fails on import"),
        ("import sys as f\nf.exit()\n", r"r\.py:2: SystemExit; the reward file fails on import"),
        ("import os as f\nf._exit(5)\n", r"ended its process with exit code 5 while its file was imported"),
        ("import math as f\n", r"has no function 'f'"),
        ("from math import sqrt as f\n", r"does not take data_source"),
    ],
)
def test_files_that_fail_in_the_worker(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(RewardError, match=message):
        RewardScorer(f"{tmp_path}/r.py:f", num_workers=2)


def test_fetching_the_small_model_never_writes_over_anything(tmp_path: Path) -> None:
    tool = [sys.executable, str(Path(__file__).parents[2] / "tools" / "fetch_smollm2.py"), "--output", str(tmp_path)]
    (tmp_path / "mine").touch()
    refused = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "holds files of something else; remove it or choose another --output" in refused.stderr
    (tmp_path / ".complete").touch()
    again = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, f"{tmp_path} is there already\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".complete", "mine"]
