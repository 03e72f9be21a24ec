"""Reading HF directories strictly: each fault is one ValueError that names the file or tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.hf_checkpoint import INDEX, SINGLE, HFCheckpoint
from converters.load import check_checkpoint
from converters.rules.families import facts_of
from converters.rules.segment import Box
from tests.tiny import make_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "hf", "llama", num_hidden_layers=2)


def rewrite(model: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(model / SINGLE)
    change(tensors)
    save_file(tensors, model / SINGLE)


def shard(model: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Cut the single file in two with an index; returns the weight map and the tensors."""
    tensors = load_file(model / SINGLE)
    names = sorted(tensors)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file_name, members in files.items():
        save_file({n: tensors[n] for n in members}, model / file_name)
    weight_map = {n: file_name for file_name, members in files.items() for n in members}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / SINGLE).unlink()
    return weight_map, tensors


def check(model: Path) -> None:
    with HFCheckpoint(model) as checkpoint:
        check_checkpoint(checkpoint, facts_of(model))


def test_shards_are_read_by_slices(model: Path) -> None:
    _, tensors = shard(model)
    check(model)
    with HFCheckpoint(model) as checkpoint:
        assert checkpoint.names == tensors.keys()
        assert torch.equal(checkpoint.read(EMBEDDING, Box((3, 1), (40, 17))), tensors[EMBEDDING][3:43, 1:18])


def test_missing_unexpected_and_misshaped_are_named_together(model: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 48)
        tensors["model.norm.weight"] = torch.zeros(47)

    rewrite(model, spoil)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        check(model)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "missing model.layers.1.self_attn.k_proj.weight",
        "unexpected model.layers.2.mlp.up_proj.weight",
        "model.norm.weight has shape [47], config.json implies [48]",
    ):
        assert part in message


def test_old_rotary_buffers_are_no_weights(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    check(model)


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_another_head(tmp_path: Path) -> None:
    model = make_model(tmp_path / "hf", "llama", num_hidden_layers=2, tie_word_embeddings=True)
    check(model)
    rewrite(model, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    check(model)
    rewrite(model, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1e-3}))
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true but lm_head\.weight differs"):
        check(model)


def test_an_untied_checkpoint_without_head_is_missing_it(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        check(model)


def test_index_and_shards_must_agree(model: Path) -> None:
    weight_map, tensors = shard(model)
    name = sorted(n for n, f in weight_map.items() if f == "b.safetensors")[0]

    (model / INDEX).write_text(json.dumps({"weight_map": weight_map | {"ghost": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"b\.safetensors: index lists ghost, which the file lacks"):
        HFCheckpoint(model)

    without = {n: f for n, f in weight_map.items() if n != name}
    (model / INDEX).write_text(json.dumps({"weight_map": without}))
    with pytest.raises(ValueError, match=f"{name} is not in the index"):
        HFCheckpoint(model)

    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    members = {n: tensors[n] for n, f in weight_map.items() if f == "a.safetensors"}
    save_file(members | {name: tensors[name]}, model / "a.safetensors")
    with pytest.raises(ValueError, match=f"not in the index|{name} stands in"):
        HFCheckpoint(model)

    (model / "a.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a\.safetensors: listed in .* but missing"):
        HFCheckpoint(model)


def test_an_index_may_not_lead_out_of_the_folder(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="points outside the folder"):
        HFCheckpoint(model)


@pytest.mark.parametrize("text", ["{not json", "[]", "{}"])
def test_a_malformed_index_is_named(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: malformed index"):
        HFCheckpoint(model)


def test_a_truncated_file_is_named(model: Path) -> None:
    data = (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        HFCheckpoint(model)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*; mrl reads safetensors"):
        HFCheckpoint(tmp_path)
