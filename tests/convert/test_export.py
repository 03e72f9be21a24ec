"""HF -> Megatron shards -> HF, bit for bit, over layouts, families and file sizes; and what else the folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.hf_checkpoint import INDEX, SINGLE
from tests.convert import export_case
from tests.gang import Gang, GangError
from tests.tiny import make_model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "world", "tp", "pp"),
    [
        ("llama", 1, 1, 1),
        ("qwen2", 2, 2, 1),
        ("qwen3", 2, 1, 2),
        ("llama", 3, 1, 3),
        ("qwen2", 4, 2, 2),
        ("qwen3", 4, 2, 1),
    ],
)
def test_round_trip_is_bit_for_bit(
    gang: Callable[[int], Gang], tiny: Callable[..., str], tmp_path: Path,
    family: str, world: int, tp: int, pp: int, tied: bool,
) -> None:  # fmt: skip
    source = Path(tiny(family, tie_word_embeddings=tied))
    gang(world).run(export_case.round_trip, str(source), str(tmp_path / "out"), tp, pp)
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(source))
    assert ("lm_head.weight" in tensors_of(tmp_path / "out")) is not tied
    assert (tmp_path / "out" / SINGLE).is_file()


def test_many_files_with_an_index_and_what_stands_beside_them(gang: Callable[[int], Gang], tmp_path: Path) -> None:
    """Each file within the limit, the index from what was written, tokenizer and code carried over, loadable."""
    source = make_model(tmp_path / "in", "qwen3", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_mine.py", "merges.txt", "spiece.model"):
        (source / name).write_text(f"content of {name}")
    (source / "notes.md").write_text("not carried")
    out, limit = tmp_path / "out", 20_000
    gang(2).run(export_case.round_trip, str(source), str(out), 2, 1, dtype=torch.bfloat16, max_shard_bytes=limit)

    files = sorted(out.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors_of(out).values())
    assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}
    assert all(sum(t.numel() * 2 for t in load_file(f).values()) <= limit for f in files)
    assert same_bits(tensors_of(out), tensors_of(source))
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_mine.py", "merges.txt", "spiece.model"):
        assert (out / name).read_text() == f"content of {name}"
    assert not (out / "notes.md").exists()

    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(p)(tokens).logits for p in (out, source))
    assert torch.equal(ours, theirs)


def test_a_cast_is_torchs_own_and_config_says_so(
    gang: Callable[[int], Gang], tiny: Callable[..., str], tmp_path: Path
) -> None:
    source = Path(tiny("llama"))
    gang(2).run(export_case.round_trip, str(source), str(tmp_path / "out"), 1, 2, dtype=torch.bfloat16)
    rounded = {name: t.bfloat16() for name, t in tensors_of(source).items()}
    assert same_bits(tensors_of(tmp_path / "out"), rounded)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_that_has_diverged_is_not_written(tiny: Callable[..., str], tmp_path: Path) -> None:
    own = Gang(2)
    with pytest.raises(GangError, match=r"final_layernorm\.weight of rank 1 holds NaN or infinite values"):
        own.run(
            export_case.round_trip, tiny("llama"), str(tmp_path / "out"), 1, 2, poison="decoder.final_layernorm.weight"
        )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_over(tiny: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    own = Gang(1)  # a failure closes its gang
    with pytest.raises(GangError, match="FileExistsError"):
        own.run(export_case.round_trip, tiny("llama"), str(tmp_path / "out"), 1, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
