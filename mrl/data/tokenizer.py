"""The tokenizer and the facts about it that training depends on: end tokens, padding token, vocabulary size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizerFacts:
    """What the run needs to know.

    eos_token_ids: every id that ends a response, the union of generation_config.json, config.json and the tokenizer (in
    that order); empty where the model has none, and then every response runs to its length limit. pad_token_id: fills
    the space right of a response and carries no meaning (it may equal an end token). vocab_size: rows of the embedding
    (config.json). num_tokens: one more than the tokenizer's largest id; ids from here to vocab_size have no text.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int
    num_tokens: int


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a HuggingFace directory; ValueError naming the directory where it does not load."""
    if not Path(path).is_dir():
        raise ValueError(f"model directory {path} does not exist; give the path of a HuggingFace directory")
    try:
        # Never the hub: the path is a directory, and what is missing there is an error.
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"no tokenizer could be loaded from {path}: {reason}; put the model's tokenizer files there"
        ) from error


def read_tokenizer_facts(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> TokenizerFacts:
    """Gather and check the facts. ValueError for ids outside the vocabulary or a tokenizer larger than the embedding.

    The JSON files are read as they are: transformers' config classes fill a missing `eos_token_id` with a family's
    default, which is some ordinary token of a model that has another vocabulary.
    """
    config = _read_json(Path(path) / "config.json", required=True)
    generation = _read_json(Path(path) / "generation_config.json", required=False)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"{path}/config.json: vocab_size is {vocab_size!r}; it must be a positive number")
    num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if num_tokens > vocab_size:
        raise ValueError(
            f"{path}: the tokenizer's ids reach {num_tokens - 1} but config.json's vocab_size is {vocab_size}; "
            "tokenizer and model do not belong together"
        )
    sources = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "the tokenizer": tokenizer.eos_token_id,
    }
    eos: list[int] = []
    for source, value in sources.items():
        eos += [i for i in _id_list(value, f"{path}: eos_token_id of {source}", vocab_size) if i not in eos]
    pad = [
        *_id_list(tokenizer.pad_token_id, f"{path}: pad_token_id of the tokenizer", vocab_size),
        *_id_list(config.get("pad_token_id"), f"{path}: pad_token_id of config.json", vocab_size),
        *eos,
        0,
    ]
    return TokenizerFacts(tuple(eos), pad[0], vocab_size, num_tokens)


def decode_response(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a response as rewards and logs see it.

    Special tokens (end, padding, chat marks) are left out (`skip_special_tokens=True`), spaces are kept as generated.
    A character whose bytes were cut by the response's end reads as U+FFFD; an id that the tokenizer has no text for (a
    padding row of the embedding) reads as nothing.
    """
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    if not path.exists():
        if required:
            raise ValueError(f"{path} does not exist; give the path of a HuggingFace directory")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; restore the model's own file") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not an object; restore the model's own file")
    return content


def _id_list(value: Any, what: str, vocab_size: int) -> list[int]:
    """An id, a list of ids or null, as a list of ids inside the vocabulary."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise ValueError(f"{what} is {i!r}, not a token id below {vocab_size}; correct it")
    return ids
