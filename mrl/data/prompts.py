"""Prompts: read from jsonl or parquet, tokenised, and dealt out in a seeded order.

verl's columns are read unchanged: `prompt` (chat messages or plain text), `data_source`, `reward_model.ground_truth`,
`extra_info`. Flat files work too: without `reward_model.ground_truth`, a column `ground_truth` or else `answer` is it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from jinja2 import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from mrl.config.schema import RunConfig

Message = dict[str, str]
"""A chat message: role and content."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data.

    index: its position over all files. content: plain text, or chat messages. data_source: the column, or the file's
    stem. ground_truth: None where the row has none. columns: the row as it was read, without the prompt. origin:
    `file:line` (jsonl) or `file:row N` (parquet, from 0), for error texts.
    """

    index: int
    content: str | list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it. token_ids: never empty. text: what was tokenised (after the chat template)."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EncodedPrompts:
    """prompts: those within the length limit, in file order. num_filtered: those left out for their length."""

    prompts: list[EncodedPrompt]
    num_filtered: int


def read_prompts(files: Sequence[Path], prompt_key: str = "prompt") -> list[Prompt]:
    """All rows of the files in the given order; ValueError naming file and line for the first bad one."""
    prompts: list[Prompt] = []
    for path in files:
        before = len(prompts)
        for origin, row in _read_rows(path):
            prompts.append(_to_prompt(len(prompts), origin, path, row, prompt_key))
        if len(prompts) == before:
            raise ValueError(f"{path} holds no prompts; fill it or leave it out of data.train_files")
    if not prompts:
        raise ValueError("data.train_files is empty; name at least one jsonl or parquet file")
    return prompts


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    *,
    filter_overlong: bool = False,
    apply_chat_template: bool | None = None,
) -> EncodedPrompts:
    """Tokenise prompts; the template's generation prompt is added, special tokens of plain text as the tokenizer does.

    apply_chat_template: None applies it to message lists and not to plain text; True makes plain text one user message.
    A prompt of more than max_prompt_length tokens is a ValueError, or left out and counted with filter_overlong.
    """
    encoded: list[EncodedPrompt] = []
    num_filtered = 0
    for prompt in prompts:
        is_chat = not isinstance(prompt.content, str)
        if is_chat and apply_chat_template is False:
            raise ValueError(
                f"{prompt.origin}: the prompt is a list of messages but data.apply_chat_template is false; "
                "leave that key out, or give plain text"
            )
        use_template = is_chat or apply_chat_template is True
        text = _render(prompt, tokenizer) if use_template else prompt.content
        assert isinstance(text, str)
        # A template writes its own special tokens: adding the tokenizer's would double the BOS.
        token_ids = tuple(tokenizer(text, add_special_tokens=not use_template, verbose=False)["input_ids"])
        if not token_ids:
            raise ValueError(f"{prompt.origin}: the prompt has no tokens; give it some text or leave the row out")
        if len(token_ids) <= max_prompt_length:
            encoded.append(EncodedPrompt(prompt, text, token_ids))
        elif filter_overlong:
            num_filtered += 1
        else:
            raise ValueError(
                f"{prompt.origin}: the prompt has {len(token_ids)} tokens, more than data.max_prompt_length="
                f"{max_prompt_length}; raise it, or set data.filter_overlong_prompts=true to leave such prompts out"
            )
    if not encoded:
        raise ValueError(
            f"all {num_filtered} prompts are longer than data.max_prompt_length={max_prompt_length}; raise it"
        )
    return EncodedPrompts(encoded, num_filtered)


def encode_configured_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> EncodedPrompts:
    """Read and tokenise what the configuration's data section names; ValueError naming file and line."""
    data = config.data
    return encode_prompts(
        read_prompts(config.prompt_files(), data.prompt_key),
        tokenizer,
        data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
        apply_chat_template=data.apply_chat_template,
    )


class PromptStream:
    """The order of prompts: the batch of a step is a pure function of (seed, step), so a resumed run needs no state.

    Each data epoch is a permutation seeded by (seed, epoch), or file order without shuffle. Batches run on into the
    next epoch, so none is short; a batch larger than the data set repeats prompts.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool) -> None:
        assert num_prompts > 0
        assert batch_size > 0
        self._num_prompts, self._batch_size = num_prompts, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int) -> list[int]:
        """Positions (0 .. num_prompts - 1) of the prompts of this step; step counts from 0."""
        start = step * self._batch_size
        return [self._at(position) for position in range(start, start + self._batch_size)]

    def epoch(self, step: int) -> float:
        """How many times the data has been gone through before this step."""
        return step * self._batch_size / self._num_prompts

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_prompts)
        if self._order[0] != epoch:
            order = list(range(self._num_prompts))
            if self._shuffle:
                # Seeding by text hashes it with SHA-512: neighbouring seeds and epochs share nothing.
                random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][offset]


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(origin, row) of each row of a file."""
    if not path.exists():
        raise ValueError(f"prompt file {path} does not exist; correct data.train_files")
    if not path.is_file():
        raise ValueError(f"prompt file {path} is not a regular file; name jsonl or parquet files in data.train_files")
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ValueError(f"prompt file {path} is neither .jsonl (an object a line) nor .parquet; convert or rename it")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{origin}: not UTF-8 ({error.reason} at byte {error.start}); re-encode it") from error
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{origin}: not JSON ({error.msg}, column {error.colno}); correct the line") from error
            except RecursionError as error:
                raise ValueError(f"{origin}: JSON nested too deeply; correct the line") from error
            except ValueError as error:
                raise ValueError(f"{origin}: holds a number of thousands of digits; write it as text") from error
            yield origin, row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path}:row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: not a readable parquet file ({reason}); write it anew") from error


def _to_prompt(index: int, origin: str, path: Path, row: Any, prompt_key: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{origin}: a row must be a JSON object, this is {_kind(row)}")
    if prompt_key not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{origin}: no key {prompt_key!r} (keys here: {keys}); set data.prompt_key to the right one")
    columns = {key: value for key, value in row.items() if key != prompt_key}
    extra_info = columns.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(f"{origin}: extra_info must be an object, this is {_kind(extra_info)}")
    data_source = columns.get("data_source")
    if data_source is not None and not isinstance(data_source, str):
        raise ValueError(f"{origin}: data_source must be text, this is {_kind(data_source)}")
    return Prompt(
        index=index,
        content=_content(row[prompt_key], f"{origin}: {prompt_key}"),
        data_source=path.stem if data_source is None else data_source,
        ground_truth=_ground_truth(columns, origin),
        extra_info=extra_info or {},
        columns=columns,
        origin=origin,
    )


def _content(value: Any, what: str) -> str | list[Message]:
    if isinstance(value, str):
        return _encodable(value, what)
    if not isinstance(value, list):
        raise ValueError(f"{what} must be text or a list of messages, this is {_kind(value)}")
    if not value:
        raise ValueError(f"{what} is an empty list of messages; give at least one")
    for position, message in enumerate(value):
        here = f"{what}[{position}]"
        if not isinstance(message, dict):
            raise ValueError(f"{here} must be a message with role and content, this is {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{here} needs text under {key!r}, this is {_kind(message.get(key))}")
            _encodable(message[key], f"{here}.{key}")
    return value


def _encodable(text: str, what: str) -> str:
    """The text, or a ValueError: a lone surrogate (JSON can spell one) is no character and has no tokens."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate \\u{ord(text[error.start]):04x}; remove it") from error
    return text


def _ground_truth(columns: dict[str, Any], origin: str) -> Any:
    reward_model = columns.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, dict):
        raise ValueError(f"{origin}: reward_model must be an object, this is {_kind(reward_model)}")
    if reward_model is not None and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return columns["ground_truth"] if "ground_truth" in columns else columns.get("answer")


def _render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{prompt.origin}: the prompt needs a chat template, which the tokenizer of "
            f"{tokenizer.name_or_path} lacks; add chat_template.jinja to that directory, or give plain text"
        )
    is_text = isinstance(prompt.content, str)
    messages = [{"role": "user", "content": prompt.content}] if is_text else prompt.content
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{prompt.origin}: the chat template refuses this prompt ({reason}); correct it") from error
    assert isinstance(text, str)
    return text


def _kind(value: Any) -> str:
    """How an error calls a JSON value."""
    names = {
        type(None): "missing or null",
        str: "text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)
