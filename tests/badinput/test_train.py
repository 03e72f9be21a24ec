"""What a user got wrong, through the real command: exit code 2, one line that names it, nothing half-written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli import DEMO, ROOT, run, run_dir_override


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollot.n=2", "rollot"),
        ("parallel.tensor_model_parallel_size=3", "parallel.tensor_model_parallel_size"),
        ("parallel.pipeline_model_parallel_size=4", "pipeline_model_parallel_size"),
        ("rollout.tensor_model_parallel_size=3", "rollout.tensor_model_parallel_size"),
        ("data.train_files=gone.jsonl", "gone.jsonl"),
        ("reward.function=gone.py:f", "gone.py"),
        ("model.init=pretrained", "model.init=random"),
    ],
)
def test_before_anything_starts(tmp_path: Path, override: str, message: str) -> None:
    code, lines = run("train", DEMO, run_dir_override(tmp_path / "run"), override, timeout_s=60)
    assert code == 2
    assert lines
    assert all(line.startswith("mrl: error: ") for line in lines)
    assert any(message in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_and_an_unknown_family(tiny: Callable[..., str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny("llama", vocab_size=260), tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "demo" / "model" / name, model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    arguments = ("train", DEMO, run_dir_override(tmp_path / "run"), f"model.path={model}", "model.init=pretrained")
    code, lines = run(*arguments, timeout_s=60)
    assert (code, len(lines)) == (2, 1)
    assert "missing model.layers.3.mlp.up_proj.weight" in lines[0]

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    code, lines = run(*arguments, timeout_s=60)
    assert (code, len(lines)) == (2, 1)
    assert "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, Qwen2ForCausalLM" in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_reward_that_raises_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The line names the user's line; the traceback is in the log, not on the terminal; there is no model."""
    reward = tmp_path / "mine.py"
    reward.write_text(
        "calls = []\n\n\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    calls.append(1)\n    return 1 / (100 - len(calls))\n"
    )
    run_dir = tmp_path / "run"
    code, lines = run("train", DEMO, run_dir_override(run_dir), f"reward.function={reward}:score")
    assert code == 2
    assert f"{reward}:6 in score" in lines[-1]
    assert "ZeroDivisionError" in lines[-1]
    assert lines[-1].startswith("mrl: error: ")
    assert not any("Traceback" in line for line in lines)
    log = (run_dir / "logs" / "rank0.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert f'File "{reward}", line 6, in score' in log
    assert not (run_dir / "hf").exists()
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == 1  # the step that was done is kept
