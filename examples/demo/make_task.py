"""Write the demo task: prompts.jsonl and model/ (a tiny Llama's config and a byte-level tokenizer; no weights).

    python examples/demo/make_task.py [DIRECTORY]

The files are committed; this says where they come from. The same bytes come out each time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from reward import KINDS

PROMPTS_PER_KIND = 64
SPECIAL_TOKENS = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258, "<|unused|>": 259}
CONTEXT = 256


def make_prompts() -> list[dict[str, Any]]:
    """Different prompts of 4 to 8 characters, the kinds in turn, in the columns that verl uses."""
    rng = random.Random(2024)
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < PROMPTS_PER_KIND * len(KINDS):
        kind = list(KINDS)[len(rows) % len(KINDS)]
        text = "".join(rng.choice(KINDS[kind]) for _ in range(rng.randint(4, 8)))
        if text not in seen:
            seen.add(text)
            reward_model = {"style": "rule", "ground_truth": kind}
            rows.append({"prompt": text, "data_source": "demo", "reward_model": reward_model})
    return rows


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte: itself, or one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer() -> dict[str, Any]:
    """tokenizer.json: token id = byte; without merges, so every byte is a token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())} | SPECIAL_TOKENS,
            "merges": [],
        },
    }


def make_model() -> dict[str, dict[str, Any]]:
    """The JSON files of the model directory by name: a Llama of 0.85M parameters."""
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "dtype": "float32",
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    return {
        "config.json": config,
        "generation_config.json": {"do_sample": True, **ids},
        "tokenizer.json": make_tokenizer(),
        "tokenizer_config.json": tokenizer_config,
    }


def main(directory: Path) -> None:
    (directory / "model").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in make_prompts()]
    (directory / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, content in make_model().items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (directory / "model" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
