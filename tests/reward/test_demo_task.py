"""The demo task cannot be won by a constant response, starts low, and can be won."""

from __future__ import annotations

import importlib.util
import itertools
import random
import string
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.data.prompts import EncodedPrompt, encode_prompts, read_prompts
from mrl.data.tokenizer import decode_response, load_tokenizer, read_tokenizer_facts

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_reward", DEMO / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prompts() -> list[EncodedPrompt]:
    return encode_prompts(read_prompts([DEMO / "prompts.jsonl"]), load_tokenizer(DEMO / "model"), 16).prompts


def mean_score(reward: ModuleType, prompts: list[EncodedPrompt], response: str) -> float:
    scores = [reward.compute_score(p.prompt.data_source, response, p.prompt.ground_truth, {}) for p in prompts]
    return sum(scores) / len(scores)


def test_the_argument(reward: ModuleType, prompts: list[EncodedPrompt]) -> None:
    """Disjoint kinds, equally often: a character is right for at most a quarter of the prompts, so any text is."""
    kinds = [set(characters) for characters in reward.KINDS.values()]
    assert all(not a & b for a, b in itertools.combinations(kinds, 2))
    counts = Counter(p.prompt.ground_truth for p in prompts)
    assert counts == dict.fromkeys(reward.KINDS, len(prompts) // len(kinds))
    assert len({p.text for p in prompts}) == len(prompts) == 256


def test_no_constant_response_wins(reward: ModuleType, prompts: list[EncodedPrompt]) -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    rng = random.Random(0)
    alphabets = [string.printable, *reward.KINDS.values(), "".join(reward.KINDS.values())]
    random_texts = ["".join(rng.choices(a, k=rng.randint(1, 24))) for a in alphabets for _ in range(60)]
    repeated = [character * length for character in string.printable for length in (1, 12, 16)]
    every_token = [decode_response(tokenizer, [token] * 12) for token in range(260)]
    copied = [p.text for p in prompts[:64]] + ["".join(p.text for p in prompts[:4])]
    best = max(mean_score(reward, prompts, text) for text in [*random_texts, *repeated, *every_token, *copied])
    assert 0.24 < best < 0.25 + 1e-9


def test_cheap_answers_score_nothing(reward: ModuleType) -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    special_only = decode_response(tokenizer, [256, 257, 258, 259] * 3)
    for junk in ("", special_only, "\ufffd" * 12, " " * 12, "é" * 12):
        assert reward.compute_score("demo", junk, "digits", {}) == 0.0
    # One right character and an early end is worth one twelfth, padded with special tokens or not.
    one = decode_response(tokenizer, [ord("7"), 258, 259, 257])
    assert reward.compute_score("demo", one, "digits", {}) == pytest.approx(1 / 12)
    assert reward.compute_score("demo", "7" * 12, "digits", {}) == 1.0
    assert reward.compute_score("demo", "7" * 12 + "x" * 12, "digits", {}) == 0.5


def test_a_random_model_starts_low(reward: ModuleType, prompts: list[EncodedPrompt]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO / "model"))
    assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 1.5e6
    tokenizer = load_tokenizer(DEMO / "model")
    scores = []
    for length in range(4, 9):
        group = [p for p in prompts if len(p.token_ids) == length]
        inputs = torch.tensor([p.token_ids for p in group])
        outputs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, max_new_tokens=12, pad_token_id=258
        )
        for p, row in zip(group, outputs[:, length:].tolist(), strict=True):
            scores.append(reward.compute_score("demo", decode_response(tokenizer, row), p.prompt.ground_truth, {}))
    assert len(scores) == len(prompts)
    # Uniform bytes: (10 + 26 + 26 + 32) / 4 / 260 = 0.09.
    assert sum(scores) / len(scores) < 0.15


def test_tokenizer_ids_are_bytes() -> None:
    tokenizer = load_tokenizer(DEMO / "model")
    everything = "".join(map(chr, range(128))) + "é日本\U0001f600"
    assert tokenizer(everything)["input_ids"] == list(everything.encode())
    assert decode_response(tokenizer, list(everything.encode())) == everything
    facts = read_tokenizer_facts(DEMO / "model", tokenizer)
    assert (facts.eos_token_ids, facts.pad_token_id, facts.vocab_size, facts.num_tokens) == ((257,), 258, 260, 260)


def test_files_are_what_make_task_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DEMO / "make_task.py", tmp_path], check=True)
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 5
    for name in written:
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name
