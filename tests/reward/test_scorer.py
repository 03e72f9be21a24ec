"""The reward scorer with real worker processes: what comes back, what stops a run, and that no process is left."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.rewards.loading import RewardError
from mrl.rewards.protocol import RewardSample
from mrl.rewards.scorer import RewardScorer, ScoredSample

MakeFile = Callable[[str], Path]

PATIENCE_S = 120.0
"""How long a busy machine may take to do what these tests wait for."""

ON_DEMAND = """
    import math, os, sys, time
    from decimal import Decimal
    def helper(x):
        return 1 / x
    def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
        match solution_str:
            case "raise": return helper(0)
            case "exit": sys.exit(3)
            case "die": os._exit(7)
            case "hang": time.sleep(600)
            case "spin":
                import re
                re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ages
            case "none": return None
            case "nan": return math.nan
            case "inf": return 1e39
            case "text": return "1.0"
            case "list": return [1.0]
            case "bool": return True
            case "decimal": return Decimal("0.25")
            case "dict": return {"score": 1, "format": 0.5, "ok": True, "parsed": "42"}
            case "dict without": return {"value": 1}
            case "dict nan": return {"score": 1, "format": math.nan}
        return len(solution_str) + bonus
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> MakeFile:
    def write(text: str) -> Path:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def sample(solution: str, prompt_index: int = 0, sample_index: int = 0, **fields: Any) -> RewardSample:
    fields = {"prompt": "p", "data_source": "d", "ground_truth": None} | fields
    return RewardSample(prompt_index, sample_index, solution_str=solution, **fields)


def score_all(scorer: RewardScorer, solutions: list[str]) -> list[ScoredSample]:
    for index, solution in enumerate(solutions):
        scorer.submit(sample(solution, index))
    return scorer.collect()


def children() -> list[str]:
    """Processes whose parent is this one, zombies included."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = children()
    yield
    assert children() == before


def test_scores_come_back_in_order_each_once(reward_file: MakeFile, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    path = reward_file(f"""
        import os
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            with open({str(calls)!r}, "a") as file:
                file.write(solution_str + chr(10))
            print("this must not reach standard output")
            return ground_truth + extra_info["add"] + len(data_source)
    """)
    with RewardScorer(f"{path}:compute_score", num_workers=2) as scorer:
        for step in range(2):
            for p in (2, 0, 1):
                for s in (1, 0):
                    scorer.submit(sample(f"{step} {p} {s}", p, s, ground_truth=10 * p + s, extra_info={"add": 0.5}))
            scored = scorer.collect()
            assert [(x.prompt_index, x.sample_index) for x in scored] == [(p, s) for p in range(3) for s in range(2)]
            assert [x.score for x in scored] == [1.5, 2.5, 11.5, 12.5, 21.5, 22.5]
    expected = [f"{step} {p} {s}" for step in range(2) for p in range(3) for s in range(2)]
    assert sorted(calls.read_text().split("\n")) == sorted([*expected, ""])


def test_values_and_drops(reward_file: MakeFile) -> None:
    path = reward_file(ON_DEMAND)
    solutions = ["four", "bool", "decimal", "dict", "raise", "exit", "none", "nan", "inf", "text", "list"]
    solutions += ["dict without", "dict nan", "die", "hang", "spin", "four"]
    with RewardScorer(
        f"{path}:compute_score", kwargs={"bonus": 0.5}, num_workers=2, timeout_s=2.0, on_error="drop"
    ) as scorer:
        scored = dict(zip(solutions, score_all(scorer, solutions), strict=False))
        again = score_all(scorer, ["four"])  # the pool goes on after deaths and kills
    assert again[0].score == 4.5
    good = {"four": 4.5, "bool": 1.0, "decimal": 0.25, "dict": 1.0}
    assert {name: scored[name].score for name in good} == good
    assert scored["dict"].components == {"format": 0.5, "ok": 1.0}
    dropped = [name for name in scored if scored[name].dropped]
    assert sorted(dropped) == sorted(set(solutions) - set(good))
    assert all(math.isnan(scored[name].score) and not scored[name].components for name in dropped)
    hints = {
        "raise": "reward.py:5 in helper: ZeroDivisionError: division by zero",
        "exit": "SystemExit: 3",
        "none": "returned None",
        "nan": "returned score nan",
        "inf": "returned score 1e+39",
        "text": "returned str '1.0'",
        "list": "returned list [1.0]",
        "dict without": "without \"score\" (keys: 'value')",
        "dict nan": "returned format nan",
        "die": "ended its process with exit code 7",
        "hang": "did not return within 2 s",
        "spin": "did not return within 2 s",
    }
    for name, hint in hints.items():
        error = scored[name].error
        assert error is not None
        assert hint in error
        assert "\n" not in error


def test_error_stops_with_one_line_and_keeps_the_traceback(reward_file: MakeFile) -> None:
    path = reward_file(ON_DEMAND)
    with RewardScorer(f"{path}:compute_score") as scorer:
        scorer.submit(sample("raise", 3, 1))
        with pytest.raises(RewardError, match=r"reward\.py:5 in helper: ZeroDivisionError") as caught:
            scorer.collect()
    assert "(prompt 3, sample 1); correct it, or set reward.on_error=drop" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "in helper\n    return 1 / x" in caught.value.traceback_text


def test_batch_style_gets_whole_groups_and_columns(reward_file: MakeFile) -> None:
    path = reward_file("""
        def groups(prompts, completions, ground_truth, level, scale, **columns):
            assert prompts == [prompts[0]] * 2 and level == [level[0]] * 2
            assert "reward_model" in columns and "data_source" in columns
            return [{"score": scale * len(c) + g, "rank": i} for i, (c, g) in enumerate(zip(completions, ground_truth))]
        def chat(prompts, completions):
            assert prompts[0][0]["role"] == "user"
            return [len(c[0]["content"]) if c[0]["role"] == "assistant" else -1 for c in completions]
    """)
    columns = {"level": "easy", "reward_model": {"ground_truth": 1}}
    with RewardScorer(f"{path}:groups", style="batch", kwargs={"scale": 10}, group_size=2) as scorer:
        for p, s in ((0, 1), (1, 0), (1, 1), (0, 0)):
            scorer.submit(sample("x" * (p + s), p, s, ground_truth=p, columns=columns))
        scored = scorer.collect()
    assert [x.score for x in scored] == [0, 10, 11, 21]
    assert [x.components["rank"] for x in scored] == [0, 1, 0, 1]
    with RewardScorer(f"{path}:chat", style="batch", group_size=1) as scorer:
        scorer.submit(sample("abc", prompt=[{"role": "user", "content": "hi"}], columns=columns))
        assert scorer.collect()[0].score == 3


def test_batch_drops_single_elements_but_a_wrong_length_always_stops(reward_file: MakeFile) -> None:
    path = reward_file("""
        def score(prompts, completions, **columns):
            return [None if c == "none" else 1.0 for c in completions if c != "gone"]
        def number(prompts, completions, **columns):
            return 1.0
    """)
    with RewardScorer(f"{path}:score", style="batch", group_size=2, on_error="drop") as scorer:
        scorer.submit(sample("none", 0, 0))
        scorer.submit(sample("fine", 0, 1))
        first, second = scorer.collect()
        assert (first.dropped, second.dropped, second.score) == (True, False, 1.0)
        scorer.submit(sample("gone", 0, 0))
        scorer.submit(sample("fine", 0, 1))
        with pytest.raises(RewardError, match=r"reward\.py:2 in score returned 1 scores for 2 completions"):
            scorer.collect()
    with (
        RewardScorer(f"{path}:number", style="batch", on_error="drop") as scorer,
        pytest.raises(RewardError, match=r"returned float 1\.0; .*needs a list"),
    ):
        score_all(scorer, ["x"])


def test_works_while_others_are_submitted(reward_file: MakeFile, tmp_path: Path) -> None:
    """A sample is scored before collect() is called: the rollout need not end first."""
    flag = tmp_path / "flag"
    path = reward_file(f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            open({str(flag)!r}, "w").close()
            return 1
    """)
    with RewardScorer(f"{path}:compute_score") as scorer:
        scorer.submit(sample("a"))
        deadline = time.monotonic() + PATIENCE_S
        while not flag.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert scorer.collect()[0].score == 1


def test_workers_do_not_import_torch(reward_file: MakeFile) -> None:
    path = reward_file("""
        import sys
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 1, "heavy": any(m in sys.modules for m in ("torch", "numpy", "transformers"))}
    """)
    with RewardScorer(f"{path}:compute_score") as scorer:
        assert score_all(scorer, ["x"])[0].components == {"heavy": 0.0}


@pytest.mark.parametrize("hang", ["time.sleep(600)", 're.match(r"(a+)+$", "a" * 64 + "b")'])
def test_workers_die_with_a_killed_run(reward_file: MakeFile, tmp_path: Path, hang: str) -> None:
    pid_file = tmp_path / "pid"
    path = reward_file(f"""
        import os, re, time
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            with open({str(pid_file)!r} + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename({str(pid_file)!r} + ".new", {str(pid_file)!r})
            {hang}
    """)
    program = f"""
from mrl.rewards.protocol import RewardSample
from mrl.rewards.scorer import RewardScorer
scorer = RewardScorer({f"{path}:compute_score"!r})
scorer.submit(RewardSample(0, 0, "p", "s", "d", None))
scorer.collect()
"""
    run = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not pid_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker = int(pid_file.read_text())
    finally:
        run.kill()
        run.wait()
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker outlived the run"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie (its new parent may be slow to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_ends_a_hanging_worker_and_what_it_started(reward_file: MakeFile, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    path = reward_file(f"""
        import os, subprocess
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            child = subprocess.Popen(["sleep", "600"])
            with open({str(pid_file)!r} + ".new", "w") as file:
                file.write(str(child.pid))
            os.rename({str(pid_file)!r} + ".new", {str(pid_file)!r})
            child.wait()
    """)
    scorer = RewardScorer(f"{path}:compute_score")
    scorer.submit(sample("x"))
    deadline = time.monotonic() + PATIENCE_S
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    scorer.close()
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_built_in_by_name() -> None:
    with RewardScorer("exact_match", on_error="drop") as scorer:
        scorer.submit(sample(" 42\n", 0, ground_truth=42))
        scorer.submit(sample("43", 1, ground_truth="42"))
        scorer.submit(sample("42", 2, ground_truth=None))
        right, wrong, unknown = scorer.collect()
    assert (right.score, wrong.score, unknown.dropped) == (1.0, 0.0, True)
    assert unknown.error is not None
    assert unknown.error.startswith("built-in reward exact_match: ValueError: the row has no ground truth")
