"""Tokenizer facts and prompt encoding, against the tokenizer itself and hand-made files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.data.prompts import Prompt, encode_prompts
from mrl.data.tokenizer import decode_response, load_tokenizer, read_tokenizer_facts

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "model"
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)
MakeModel = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> MakeModel:
    """model(file={key: value or None to remove}) -> a copy of the demo's model with changed JSON files."""

    def make(template: str | None = None, **changes: dict[str, Any]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(DEMO, path, dirs_exist_ok=True)
        for name, values in changes.items():
            file = path / f"{name}.json"
            content = json.loads(file.read_text()) | values
            file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
        return path

    return make


def prompt(content: Any) -> Prompt:
    return Prompt(0, content, "d", None, {}, {}, "file.jsonl:1")


def test_end_tokens_are_the_union_in_order(model: MakeModel) -> None:
    path = model(generation_config={"eos_token_id": [259, 10]}, config={"eos_token_id": [10, 257]})
    facts = read_tokenizer_facts(path, load_tokenizer(path))
    assert facts.eos_token_ids == (259, 10, 257)


def test_no_end_token_anywhere(model: MakeModel) -> None:
    """transformers' LlamaConfig would claim 2, an ordinary byte here."""
    none = {"eos_token_id": None, "pad_token_id": None}
    path = model(generation_config=none, config=none, tokenizer_config={"eos_token": None, "pad_token": None})
    facts = read_tokenizer_facts(path, load_tokenizer(path))
    assert (facts.eos_token_ids, facts.pad_token_id) == ((), 0)


def test_pad_may_be_an_end_token(model: MakeModel) -> None:
    path = model(config={"pad_token_id": None}, tokenizer_config={"pad_token": None})
    facts = read_tokenizer_facts(path, load_tokenizer(path))
    assert facts.pad_token_id == 257
    path = model(tokenizer_config={"pad_token": "<|eos|>"})
    assert read_tokenizer_facts(path, load_tokenizer(path)).pad_token_id == 257


def test_without_generation_config(model: MakeModel) -> None:
    path = model()
    (path / "generation_config.json").unlink()
    assert read_tokenizer_facts(path, load_tokenizer(path)).eos_token_ids == (257,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"vocab_size": 259}}, r"ids reach 259 but config.json's vocab_size is 259"),
        ({"config": {"vocab_size": None}}, r"vocab_size is None"),
        ({"config": {"eos_token_id": 260}}, r"eos_token_id of config.json is 260, not a token id below 260"),
        ({"generation_config": {"eos_token_id": [257, -1]}}, r"eos_token_id of generation_config.json is -1"),
        ({"generation_config": {"eos_token_id": "257"}}, r"is '257', not a token id"),
    ],
)
def test_what_does_not_fit_is_refused(model: MakeModel, changes: dict[str, Any], message: str) -> None:
    path = model(**changes)
    with pytest.raises(ValueError, match=message):
        read_tokenizer_facts(path, load_tokenizer(path))


def test_embedding_may_be_larger(model: MakeModel) -> None:
    path = model(config={"vocab_size": 320})
    tokenizer = load_tokenizer(path)
    facts = read_tokenizer_facts(path, tokenizer)
    assert (facts.vocab_size, facts.num_tokens) == (320, 260)
    assert decode_response(tokenizer, [65, 300, 66]) == "AB"


def test_missing_and_broken_files(model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; give the path of a HuggingFace directory"):
        load_tokenizer(tmp_path / "nothing")
    path = model()
    tokenizer = load_tokenizer(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        read_tokenizer_facts(path, tokenizer)
    (path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        read_tokenizer_facts(path, tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer could be loaded from") as caught:
        load_tokenizer(tmp_path / "empty")
    assert "\n" not in str(caught.value)


def test_decoding_responses() -> None:
    tokenizer = load_tokenizer(DEMO)
    whole = list("日本 é".encode())
    assert decode_response(tokenizer, [*whole, 257, 258]) == "日本 é"
    assert decode_response(tokenizer, whole[:5]) == "日\ufffd"  # a character cut at the end
    assert decode_response(tokenizer, []) == ""
    assert decode_response(tokenizer, list(b" it 's , fine ")) == " it 's , fine "


def test_chat_prompts_use_the_template_once(model: MakeModel) -> None:
    tokenizer = load_tokenizer(model(TEMPLATE))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "日"}]
    one = encode_prompts([prompt(messages)], tokenizer, 64).prompts[0]
    assert one.text == "<|bos|>system: s<|eos|><|bos|>user: 日<|eos|><|bos|>assistant: "
    expected = [256, *b"system: s", 257, 256, *b"user: ", *"日".encode(), 257, 256, *b"assistant: "]
    assert list(one.token_ids) == expected
    reference = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(one.token_ids) == reference


def test_plain_text_and_the_template_switch(model: MakeModel) -> None:
    tokenizer = load_tokenizer(model(TEMPLATE))
    plain = encode_prompts([prompt("hi")], tokenizer, 64).prompts[0]
    assert plain.token_ids == (104, 105)
    wrapped = encode_prompts([prompt("hi")], tokenizer, 64, apply_chat_template=True).prompts[0]
    assert wrapped.text == "<|bos|>user: hi<|eos|><|bos|>assistant: "
    with pytest.raises(ValueError, match=r"file.jsonl:1: the prompt is a list of messages but data.apply_chat_temp"):
        encode_prompts([prompt([{"role": "user", "content": "x"}])], tokenizer, 64, apply_chat_template=False)


def test_templates_that_are_missing_or_refuse(model: MakeModel) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"file.jsonl:1: the prompt needs a chat template, which .* lacks"):
        encode_prompts([prompt(messages)], load_tokenizer(model()), 64)
    tokenizer = load_tokenizer(model("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match=r"file.jsonl:1: the chat template refuses .*roles must alternate"):
        encode_prompts([prompt(messages)], tokenizer, 64)


def test_prompt_lengths() -> None:
    tokenizer = load_tokenizer(DEMO)
    prompts = [prompt("x"), prompt("x" * 8), prompt("x" * 9)]
    with pytest.raises(ValueError, match=r"has 9 tokens, more than data.max_prompt_length=8; raise it"):
        encode_prompts(prompts, tokenizer, 8)
    kept = encode_prompts(prompts, tokenizer, 8, filter_overlong=True)
    assert [len(p.token_ids) for p in kept.prompts] == [1, 8]
    assert kept.num_filtered == 1
    with pytest.raises(ValueError, match=r"all 1 prompts are longer than data.max_prompt_length=8"):
        encode_prompts(prompts[2:], tokenizer, 8, filter_overlong=True)
    with pytest.raises(ValueError, match=r"file.jsonl:1: the prompt has no tokens"):
        encode_prompts([prompt("")], tokenizer, 8)
