"""A bad configuration gets one line a fault, naming the thing, the value and the way out: all at once, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mrl.cli import main
from mrl.config import rules
from mrl.config.load import ConfigError, dump_config, leaf_keys, load_config
from mrl.config.schema import RunConfig
from mrl.preflight import preflight
from mrl.rundir import prepare_run_dir

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
HF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 260,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good configuration in the current directory, for a world of 4."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(MODEL, "model")
    Path("model/config.json").write_text(json.dumps(HF))
    Path("prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    content = {
        "model": {"path": "model", "init": "random"},
        "parallel": {"tensor_model_parallel_size": 2},
        "reward": {"function": "exact_match"},
        "data": {
            "train_files": "prompts.jsonl",
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 16,
        },
        "actor": {"ppo_mini_batch_size": 4},
        "trainer": {"total_steps": 3, "nproc_per_node": 4},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))
    return Path("run.yaml")


def violations(path: Path, overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        preflight(path, overrides, overwrite=False)
    return caught.value.violations


TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"

ONE_FAULT: list[tuple[list[str], list[str]]] = [
    # unknown keys: the nearest valid name
    (["rollot.n=2"], ["unknown section rollot", "did you mean rollout?"]),
    (["actor.lr=1e-5"], ["unknown key actor.lr=1", "did you mean actor.optim.lr?"]),
    (["actor.optim.lrr=1"], ["unknown key actor.optim.lrr=1", "did you mean actor.optim.lr?"]),
    (["rollout.gamma=1"], ["unknown key rollout.gamma=1", "did you mean algorithm.gamma?"]),
    (["rollout.tensor_parallel_size=2"], ["unknown key", "did you mean rollout.tensor_model_parallel_size?"]),
    (["trainer.zzz=2"], ["unknown key trainer.zzz=2", "total_steps, seed"]),
    (["seed=2"], ["unknown key seed=2", "did you mean trainer.seed?"]),
    (["a.b.c=1"], ["unknown section a", "sections: model, parallel"]),
    # types and ranges
    (["trainer.total_steps=ten"], ["trainer.total_steps=ten", "an integer"]),
    (["trainer.total_steps=2.5"], ["trainer.total_steps=2.5", "an integer"]),
    (["trainer.total_steps=0"], ["trainer.total_steps=0", "> 0"]),
    (["trainer.total_steps=null"], ["trainer.total_steps=null", "an integer"]),
    (["rollout.n=true"], ["rollout.n=true", "an integer"]),
    (["actor.optim.lr=fast"], ["actor.optim.lr=fast", "a number"]),
    (["actor.optim.lr='1e-6'"], ["actor.optim.lr='1e-6'", "a number"]),
    (["actor.optim.lr=.nan"], ["actor.optim.lr=.nan", "finite"]),
    (["actor.optim.betas=[0.9]"], ["actor.optim.betas=[0.9]", "2 entries"]),
    (["actor.optim.betas=[0.9, 1]"], ["actor.optim.betas[1]=1", "< 1"]),
    (["algorithm.gamma=1.5"], ["algorithm.gamma=1.5", "<= 1"]),
    (["algorithm.name=pppo"], ["algorithm.name=pppo", "ppo or grpo"]),
    (["actor.dual_clip=0.5"], ["actor.dual_clip=0.5", "> 1", "or null"]),
    (["data.shuffle=yes"], ["data.shuffle=yes", "true or false"]),
    (["data.train_files=3"], ["data.train_files=3", "text or a list of text"]),
    (["rollout.stop=[1]"], ["rollout.stop[0]=1", "text"]),
    (["algorithm.kl_ctrl=0.1"], ["algorithm.kl_ctrl=0.1", "section of keys", "kl_coef"]),
    (["rollout=null"], ["rollout=null", "section of keys", "leave it out"]),
    # overrides
    (["rollout.n"], ["override 'rollout.n'", "section.key=value"]),
    (["rollout.n="], ["override 'rollout.n='", "rollout.n=null"]),
    (["rollout.n=[1"], ["override rollout.n:1", "not valid YAML"]),
    (["model.path.x=1"], ["model.path is the value model", "set model.path"]),
    # the layout
    ([f"{PP}=3"], [f"{TP}=2 x {PP}=3 = 6", "world of 4", "multiple of 6"]),
    (
        [f"{TP}=16", "trainer.nproc_per_node=16", "data.train_batch_size=16"],
        [f"{TP}=16", "num_attention_heads=8", "num_key_value_heads=4", "works is 8"],
    ),
    ([f"{TP}=3", "trainer.nproc_per_node=6"], [f"{TP}=3", "num_attention_heads=8", "works is 2"]),
    ([f"{PP}=4", "trainer.nproc_per_node=8"], [f"{PP}=4", "num_hidden_layers=6", "1, 2, 3, 6"]),
    (
        [f"{PP}=8", "trainer.nproc_per_node=16", "data.train_batch_size=16"],
        [f"{PP}=8", "num_hidden_layers=6", "1, 2, 3, 6", "num_layers_in_first_pipeline_stage"],
    ),
    (["rollout.tensor_model_parallel_size=8"], ["rollout.tensor_model_parallel_size=8", "world of 4", "1, 2, 4"]),
    (
        ["rollout.tensor_model_parallel_size=16", "trainer.nproc_per_node=16", "actor.ppo_mini_batch_size=8"],
        ["rollout.tensor_model_parallel_size=16", "num_attention_heads=8", "largest that works is 8"],
    ),
    # batches and lengths
    (["actor.ppo_mini_batch_size=3"], ["actor.ppo_mini_batch_size=3", "data.train_batch_size=8", "1, 2, 4, 8"]),
    (["critic.ppo_mini_batch_size=3"], ["critic.ppo_mini_batch_size=3", "data.train_batch_size=8"]),
    (["actor.ppo_mini_batch_size=1"], ["actor.ppo_mini_batch_size=1", "2 data-parallel ranks", "to 2"]),
    (["data.train_batch_size=2", "actor.ppo_mini_batch_size=2"], ["data.train_batch_size=2", "4 rollout replicas"]),
    (["algorithm.name=grpo"], ["rollout.n=1", "grpo", "to 2 or more"]),
    (["actor.ppo_max_token_len_per_gpu=31"], ["actor.ppo_max_token_len_per_gpu=31", "raise it to 32"]),
    (["critic.ppo_max_token_len_per_gpu=31"], ["critic.ppo_max_token_len_per_gpu=31", "raise it to 32"]),
    (["ref.ppo_max_token_len_per_gpu=31"], ["ref.ppo_max_token_len_per_gpu=31", "raise it to 32"]),
    (["data.max_response_length=241"], ["data.max_response_length=241", "256 positions", "lower"]),
    (["rollout.max_num_batched_tokens=255"], ["max_num_batched_tokens=255", "max_num_seqs=256", "raise"]),
    (
        ["rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=31", "rollout.max_num_seqs=8"],
        ["max_num_batched_tokens=31", "raise it to 32"],
    ),
    # sampling
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "refused", "at 1"]),
    (["rollout.top_k=50"], ["rollout.top_k=50", "refused", "at -1"]),
    (["rollout.min_p=0.1"], ["rollout.min_p=0.1", "refused", "at 0"]),
    (["rollout.stop=['']"], ["rollout.stop", "empty", "remove it"]),
    # values that would only be found wrong after the start
    (["trainer.seed=-1"], ["trainer.seed=-1", ">= 0"]),
    (["trainer.seed=4294967296"], ["trainer.seed=4294967296", "< 4.29497e+09"]),
    (["reward.timeout_s=1e300"], ["reward.timeout_s=1.0e+300", "<= 86400"]),
    (["rollout.temperature=1e-300"], ["rollout.temperature=1.0e-300", ">= 0.01"]),
    (["rollout.kv_cache_gib=0.5"], ["rollout.kv_cache_gib=0.5", "an integer"]),
    (["reward.function=regex_match", "reward.kwargs={pattern: '('}"], ["reward.kwargs.pattern='('", "unterminated"]),
    (["data.max_prompt_length=1"], ["prompts.jsonl:1", "4 tokens", "data.max_prompt_length=1"]),
    (["data.apply_chat_template=true"], ["prompts.jsonl:1", "chat template", "of model lacks"]),
    # text
    (["model.path=''"], ["model.path", "is empty"]),
    (["trainer.run_dir=''"], ["trainer.run_dir", "is empty"]),
    (["data.train_files=''"], ["data.train_files", "is empty"]),
    (['data.prompt_key="\\ud800"'], ["data.prompt_key", "lone surrogate"]),
    (['reward.kwargs={"\\ud800": 1}'], ["reward.kwargs", "lone surrogate"]),
    (['trainer.run_dir="a\\0b"'], ["trainer.run_dir", "NUL character"]),
    (['model.path="a\\nb"'], ["a\\nb/config.json", "no such file"]),
    ([f"model.path={'x' * 300}"], ["model.path", "File name too long"]),
    ([f"data.train_files={'x' * 300}"], ["data.train_files", "File name too long"]),
    ([f"reward.function={'x' * 300}.py:f"], ["reward.function", "File name too long"]),
    (["trainer.nproc_per_node=0"], ["trainer.nproc_per_node=0", "> 0"]),
    # files
    (["data.train_files=model"], ["prompt file model", "not a regular file"]),
    (["reward.function=model:f"], ["reward file 'model'", "not a regular file"]),
    (["reward.function=prompts.jsonl:f"], ["prompts.jsonl", "ends in .py"]),
    (["reward.function='prompts.jsonl:'"], ["prompts.jsonl:", "must end in a function name"]),
    (["model.path=nowhere"], ["nowhere/config.json", "model.path"]),
    (["model.init=pretrained"], ["model.path: model", "safetensors", "model.init=random"]),
    (["critic.path=nowhere"], ["nowhere/config.json", "no such file"]),
    (["data.train_files=nowhere.jsonl"], ["nowhere.jsonl", "does not exist", "data.train_files"]),
    (["data.train_files=[]"], ["data.train_files", "empty"]),
    (["reward.function=nowhere.py:f"], ["nowhere.py", "does not exist", "reward.function"]),
    (["reward.function=exact"], ["reward.function 'exact'", "exact_match"]),
]


@pytest.mark.parametrize(("overrides", "names"), ONE_FAULT, ids=lambda value: " ".join(value)[:60])
def test_one_fault_one_line(config: Path, overrides: list[str], names: list[str]) -> None:
    lines = violations(config, overrides)
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    for name in names:
        assert name in lines[0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model: {path: a}\nmodel: {path: b}\n", ["bad.yaml:2", "duplicate key model", "line 1", "remove one"]),
        ("actor:\n  optim: {lr: 1}\n  optim: {lr: 2}\n", ["bad.yaml:3", "duplicate key actor.optim", "line 2"]),
        ("model: [\n", ["bad.yaml:2", "not valid YAML"]),
        ("model: {path: a\n---\nb: c", ["bad.yaml", "not valid YAML"]),
        ("- a\n- b\n", ["bad.yaml", "not sections"]),
        ("1: 2\n", ["bad.yaml:1", "the key 1 is not text"]),
        ("a: &x [*x]\n", ["bad.yaml:1", "alias"]),
        ("model: {path: !!python/name:os.system x}\n", ["bad.yaml:1", "tag", "refused"]),
        ("actor.optim.lr: 1\n", ["bad.yaml:1", "actor.optim.lr", "nest it"]),
        ("model: {path: a}\nrollot:\n  n: 2\n", ["bad.yaml:2", "unknown section rollot"]),
        ("\x00", ["bad.yaml", "not valid YAML"]),
        ("trainer: {seed: !!int 'abc'}\n", ["bad.yaml:1", "'abc' is no int"]),
        ("trainer: {seed: !!bool 'abc'}\n", ["bad.yaml:1", "'abc' is no bool"]),
        (f"trainer:\n  seed: {'9' * 5000}\n", ["bad.yaml:2", "is no int"]),
        ("a: &b {c: 1}\ntrainer:\n  <<: *b\n", ["bad.yaml:3", "merge keys"]),
        ('model: {path: "a\\ud800"}\n', ["bad.yaml:1", "lone surrogate"]),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)),
            ["bad.yaml", "aliases expand to more than"],
        ),
    ],
)
def test_bad_yaml(config: Path, text: str, names: list[str]) -> None:
    Path("bad.yaml").write_text(text)
    lines = violations(Path("bad.yaml"), [])
    assert all("\n" not in line for line in lines)
    assert any(all(name in line for name in names) for line in lines), lines


def test_an_unknown_key_hides_nothing(config: Path) -> None:
    """`n` and `a` stand in many words; only a key whose value is unknown silences a rule."""
    lines = violations(config, ["n=4", "a=1", "rollout.top_p=0.5", f"{PP}=3"])
    assert len(lines) == 4, lines


def test_files_that_cannot_be_read(config: Path) -> None:
    os.mkfifo("fifo.yaml")
    assert "not a regular file" in violations(Path("fifo.yaml"), [])[0]
    Path("latin.yaml").write_bytes(b"\xff\xfe\xfa")
    assert violations(Path("none.yaml"), []) == ["config file none.yaml does not exist; correct its path"]
    assert "not UTF-8" in violations(Path("latin.yaml"), [])[0]
    assert "cannot be read" in violations(Path("model"), [])[0]


def test_empty_file_names_every_required_key(config: Path) -> None:
    Path("empty.yaml").write_text("# nothing yet\n")
    required = {line.split(" is required")[0] for line in violations(Path("empty.yaml"), [])}
    assert required == {"model", "reward", "data", "trainer"}


def test_everything_is_reported_at_once(config: Path) -> None:
    """Syntax of overrides, schema, rules, model, data and reward in one go, and no consequence of a broken key."""
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    overrides = [
        "rollout.n",
        "rollot.n=2",
        "actor.optim.lr=fast",
        "actor.ppo_mini_batch_size=x",  # its default 64 would not divide the batch of 8: not to be said
        "rollout.top_p=0.5",
        f"{PP}=3",
        "reward.function=nowhere.py:f",
    ]
    lines = violations(config, overrides)
    assert len(lines) == 8, lines
    for name in ("'rollout.n'", "rollot", "lr=fast", "size=x", "top_p", PP, "nowhere.py", "prompts.jsonl:2"):
        assert any(name in line for line in lines), name


def test_the_critics_own_model_is_checked_too(config: Path) -> None:
    """Its layout, its positions and its vocabulary: the model's rules hold for both."""
    shutil.copytree("model", "critic")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 32, "max_position_embeddings": 16}
    Path("critic/config.json").write_text(json.dumps(HF | odd))
    lines = violations(config, ["critic.path=critic"])
    for text in ("critic.path's num_attention_heads=3", "critic.path's 16 positions", "critic.path's vocab_size=32",
                 "critic.path: critic"):  # the last: it has no weights  # fmt: skip
        assert any(text in line for line in lines), (text, lines)
    assert len(lines) == 4, lines


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(solution_str, data_source, ground_truth, extra_info):\n    return 1\nreturn 2\n",
            "reward.py:3: 'return'",
        ),
        ("def f(a, a):\n    return 1\n", "reward.py:1: duplicate argument"),
        ("async def f(data_source, solution_str, ground_truth, extra_info):\n    return 1\n", "async functions"),
        ("f = " + "-" * 100_000 + "1\n", "reward.py"),
    ],
)
def test_reward_files_that_cannot_work(config: Path, source: str, message: str) -> None:
    Path("reward.py").write_text(source)
    (line,) = violations(config, ["reward.function=reward.py:f"])
    assert message in line
    assert "correct" in line or "make it plain" in line


def test_prompts_that_json_cannot_hold(config: Path) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "a", "answer": ' + "1" * 5000 + "}\n")
    (line,) = violations(config, [])
    assert "prompts.jsonl:1: holds a number of thousands of digits" in line


def test_a_run_directory_that_cannot_be_made(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "trainer.run_dir=prompts.jsonl/run"]) == 2
    assert "run directory prompts.jsonl/run cannot be written (Not a directory)" in capsys.readouterr().err


def test_model_family_that_is_not_supported(config: Path) -> None:
    Path("model/config.json").write_text(json.dumps(HF | {"architectures": ["GPT2LMHeadModel"]}))
    (line,) = violations(config, [])
    assert "GPT2LMHeadModel" in line
    assert "LlamaForCausalLM" in line


def test_the_good_configuration_passes(config: Path) -> None:
    ready = preflight(config, ["actor.optim.lr=1e-5", "actor.dual_clip=null", "actor.optim.betas=[0.8, 0.9]"])
    assert ready.config.actor.optim.lr == 1e-5
    assert ready.config.actor.dual_clip is None
    assert ready.config.actor.optim.betas == (0.8, 0.9)
    assert ready.run_dir == Path("runs/run")
    assert ready.warnings == []


def test_yaml_scalars_follow_the_core_schema(config: Path) -> None:
    Path("kwargs.yaml").write_text(
        config.read_text()
        + "rollout: {temperature: 1e+0}\n"
        + "actor_kwargs: &k {a: 1e-6, b: yes, c: 012, d: 0x1F, e: 12:30, f: 2024-01-01, g: ~, h: '1', i: .5}\n"
    )
    text = Path("kwargs.yaml").read_text().replace("function: exact_match", "function: exact_match\n  kwargs: 0")
    Path("kwargs.yaml").write_text(text.replace("actor_kwargs: &k", "x: &k"))
    (line,) = [v for v in violations(Path("kwargs.yaml"), []) if "unknown section x" in v]
    assert "kwargs.yaml" in line
    override = "reward.kwargs={a: 1e-6, b: yes, c: 012, d: 0x1F, e: 12:30, f: 2024-01-01, g: ~, h: '1', i: .5}"
    assert load_config(config, [override]).reward.kwargs == {
        "a": 1e-6,
        "b": "yes",
        "c": 12,
        "d": 31,
        "e": "12:30",
        "f": "2024-01-01",
        "g": None,
        "h": "1",
        "i": 0.5,
    }


@settings(max_examples=60, deadline=None)
@example(text="\u2028", number=1.0, kwargs={"a": "x\x85", "b": "\r\n\u2029"})
@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
    | st.sampled_from(["1e5", "yes", "null", "012", "0x1", "~", "a: b", "#", "- x", ".5"]),
    number=st.floats(min_value=1e-30, max_value=1e30),
    kwargs=st.dictionaries(
        st.from_regex(r"[a-z]{1,4}", fullmatch=True),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
    ),
)
def test_resolved_yaml_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, kwargs: dict[str, Any]
) -> None:
    values = {
        "model": {"path": text},
        "reward": {"function": "exact_match", "kwargs": kwargs},
        "data": {"train_files": [text, text]},
        "actor": {"optim": {"lr": number}},
        "trainer": {"total_steps": 1},
    }
    config = RunConfig.model_validate_json(json.dumps(values))
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_warnings_name_settings_without_effect(config: Path) -> None:
    found = rules.warnings(load_config(config, ["algorithm.name=grpo", "rollout.n=2", "algorithm.gamma=0.9"]))
    assert found == ["algorithm.gamma has no effect with algorithm.adv_estimator=grpo"]
    found = rules.warnings(load_config(config, ["actor.kl_loss_coef=0.5", "actor.optim.lr_warmup_steps=6"]))
    assert [line.split()[0] for line in found] == ["actor.kl_loss_coef", "actor.optim.lr_warmup_steps=6"]
    # a resolved file sets every key: that alone is no reason to warn
    Path("resolved.yaml").write_text(dump_config(load_config(config, ["algorithm.name=grpo", "rollout.n=2"])))
    assert rules.warnings(load_config("resolved.yaml")) == []


def test_batch_arithmetic(config: Path) -> None:
    """Computed by hand: 4 ranks, TP2 -> DP2; 8 prompts x 3 in mini-batches of 4 prompts, 2 epochs, 3 steps."""
    rows = dict(rules.batch_arithmetic(load_config(config, ["rollout.n=3", "actor.ppo_epochs=2"]), 4))
    assert rows["training"] == "TP 2 x PP 1 x DP 2"
    assert rows["rollout"] == "TP 1 x 4 replicas"
    assert rows["samples per step"] == "8 prompts x 3 = 24"
    assert rows["samples per DP rank"] == "12"
    assert rows["actor optimizer steps per step"] == "2 mini-batches x 2 epochs = 4"
    assert rows["critic optimizer steps in all"] == "12"
    assert rows["tokens per step"] == "at most 768 (384 of them responses)"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "run.yaml", "rollot.n=2"],
        ["train", "run.yaml", "--overwrite", "rollout.top_p=0.5"],  # an override after an option
        ["train", "run.yaml", "--nproc", "3"],
        ["train", "none.yaml"],
        ["check", "run.yaml", "model.path=nowhere"],
    ],
)
def test_the_command_exits_2_with_one_line_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mrl: error: ")
    assert err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("arguments", [["trian", "run.yaml"], ["train"], ["train", "run.yaml", "--nprocs", "x"]])
def test_command_line_mistakes(config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_check_prints_resolved_yaml_arithmetic_and_layout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "--nproc", "8", f"{PP}=2", "rollout.tensor_model_parallel_size=4"]) == 0
    out = capsys.readouterr().out
    resolved, _, rest = out.partition("\n\n")
    assert yaml.safe_load(resolved)["critic"]["path"] == "model"
    rows = [line.split() for line in rest.splitlines()]
    assert ["training", "TP", "2", "x", "PP", "2", "x", "DP", "2"] in rows
    # rank, dp, pp, tp, rollout replica, rollout tp: tensor parallelism fastest, then data, then pipeline
    assert [list(map(int, row)) for row in rows[-8:]] == [
        [0, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 1],
        [2, 1, 0, 0, 0, 2],
        [3, 1, 0, 1, 0, 3],
        [4, 0, 1, 0, 1, 0],
        [5, 0, 1, 1, 1, 1],
        [6, 1, 1, 0, 1, 2],
        [7, 1, 1, 1, 1, 3],
    ]


def test_run_directory_is_never_taken_from_another(config: Path) -> None:
    ready = preflight(config, [], overwrite=False)
    prepare_run_dir(ready.run_dir, ready.config, False, ready.inputs)
    assert load_config(ready.run_dir / "config.yaml") == ready.config
    (ready.run_dir / "metrics.jsonl").write_text("{}\n")
    (line,) = violations(config, [])
    assert "runs/run" in line
    assert "--overwrite" in line
    prepare_run_dir(ready.run_dir, ready.config, True, ready.inputs)
    assert sorted(p.name for p in ready.run_dir.iterdir()) == ["config.yaml", "logs"]


def test_overwriting_deletes_only_runs(config: Path) -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("model: {}\n")
    Path("mine/thesis.tex").write_text("years of work\n")
    with pytest.raises(ConfigError, match=r"mine holds files that are not an mrl run's"):
        preflight(config, ["trainer.run_dir=mine"], overwrite=True)
    # a run directory into which the user has put what the next run reads
    ready = preflight(config, ["trainer.run_dir=old"], overwrite=True)
    prepare_run_dir(ready.run_dir, ready.config, True, ready.inputs)
    Path("prompts.jsonl").rename("old/prompts.jsonl")
    with pytest.raises(ConfigError, match=r"old contains old/prompts.jsonl"):
        preflight(config, ["trainer.run_dir=old", "data.train_files=old/prompts.jsonl"], overwrite=True)
    assert Path("old/prompts.jsonl").exists()
    with pytest.raises(ConfigError, match=r"not a directory"):
        preflight(config, ["trainer.run_dir=run.yaml"], overwrite=True)


def test_configuration_and_checks_need_no_torch() -> None:
    code = "import sys, mrl.cli, mrl.config.load, mrl.config.rules, mrl.rundir, mrl.preflight, mrl.launch; "
    code += "print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mrl", "--help"], capture_output=True, text=True, check=True
    )
    assert not {"pydantic", "yaml", "numpy"} & {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}


def test_every_key_can_be_overridden_by_its_own_default(config: Path) -> None:
    resolved = load_config(config).model_dump(mode="json")
    overrides = []
    for key in leaf_keys():
        value: Any = resolved
        for part in key.split("."):
            value = value[part]
        overrides.append(f"{key}={json.dumps(value)}")
    assert load_config(config, overrides) == load_config(config)
