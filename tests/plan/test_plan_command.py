"""`mrl plan`: figures worked out by hand from the shapes, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main

ROOT = Path(__file__).resolve().parents[2]
LLAMA = str(ROOT / "configs" / "llama3_70b_ppo.yaml")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", LLAMA, "--json", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


H, LAYERS = 8192, 80
NORMS = 2 * H


def by_hand(ffn: int, vocab: int, bias: int, tp: int, pp: int) -> dict[str, int]:
    """Elements of the parts of a 70B-class model; a TP rank's share of a layer, and what a rollout TP8 rank wants."""
    qkv = (H + 2 * 1024) * H + bias
    layer = qkv + H * H + 3 * H * ffn
    total = LAYERS * (layer + NORMS) + 2 * vocab * H + H
    middle_stage = LAYERS // pp * (layer // tp + NORMS)
    wanted_tp8 = LAYERS * (layer // 8 + NORMS) + 2 * (vocab // 8) * H + H
    return {"total": total, "middle_stage": middle_stage, "wanted_tp8": wanted_tp8}


def test_llama3_70b_tp8pp8_to_tp8(capsys: pytest.CaptureFixture[str]) -> None:
    """On a middle stage a rank's own ten layers are what it wants of them, so it misses all the rest of its shard."""
    found = report(capsys, "--world", "64")
    hand = by_hand(28672, 128256, 0, 8, 8)
    assert found["bytes_received_max"] == found["lower_bound_max"] == 2 * (hand["wanted_tp8"] - hand["middle_stage"])
    assert found["bytes_received_max"] == 15_501_312_000
    assert found["others_max"]["full_gather"] == 2 * (hand["total"] - hand["middle_stage"])
    assert found["others_max"]["full_gather"] / found["lower_bound_max"] == pytest.approx(8.97, abs=0.01)
    assert found["others_max"]["hybridflow"] == pytest.approx(2 * hand["total"] * 56 / (8 * 64))
    assert found["others_max"]["m2n"] is None  # it knows no pipeline stages
    assert len(found["ranks"]) == 64
    for row in found["ranks"]:
        assert row["bytes_received"] == row["lower_bound"] == row["same_node"] + row["across_nodes"]
        assert row["bytes_received"] + row["same_gpu"] == 2 * hand["wanted_tp8"]
        assert row["bucket_peak"] <= 2 * (256 << 20)
    assert sum(row["bytes_sent"] for row in found["ranks"]) == found["bytes_received"]


def test_qwen_72b_tp8pp1_moves_next_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """TP8 -> TP8: the same cut on both sides, but for vocabulary rows where the two pad differently: 152064 = 8 x 19008
    = 8 x 297 x 64, so not even those."""
    model = "model.path=configs/models/qwen2.5_72b.json"
    found = report(capsys, model, "parallel.pipeline_model_parallel_size=1", "--world", "8")
    assert found["bytes_received"] == found["lower_bound"] == 0
    hand = by_hand(29568, 152064, H + 2 * 1024, 8, 1)
    assert found["model_bytes"] == 2 * hand["total"]
    assert found["others_max"]["m2n"] > 0


def test_qwen_72b_tp4pp4_to_tp4(capsys: pytest.CaptureFixture[str]) -> None:
    """The same TP on both sides: a rank lacks the three quarters of its TP shard that are other stages'."""
    found = report(
        capsys, "model.path=configs/models/qwen2.5_72b.json", "parallel.tensor_model_parallel_size=4",
        "parallel.pipeline_model_parallel_size=4", "rollout.tensor_model_parallel_size=4", "--world", "16",
    )  # fmt: skip
    layer = (H + 2 * 1024) * (H + 1) + H * H + 3 * H * 29568
    middle = 60 * (layer // 4 + NORMS) + 2 * (152064 // 4) * H + H
    assert found["bytes_received_max"] == found["lower_bound_max"] == 2 * middle


def test_replicas_of_a_machine_get_a_byte_from_outside_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Rollout TP4: two replicas on a machine of eight. With the relay half comes from the neighbour."""
    halved = report(capsys, "--world", "64", "rollout.tensor_model_parallel_size=4")
    plain = report(capsys, "--world", "64", "rollout.tensor_model_parallel_size=4", "bridge.relay_within_node=false")
    assert halved["bytes_received"] == plain["bytes_received"] == plain["lower_bound"]
    assert halved["across_nodes"] == pytest.approx(plain["across_nodes"] / 2, rel=0.01)
    assert halved["estimated_seconds"] < plain["estimated_seconds"]


def test_it_says_what_would_move_less(capsys: pytest.CaptureFixture[str]) -> None:
    """Training TP8, rollout TP4: with strided ranks each rank's eighth lies in the quarter it wants."""
    arguments = ("--world", "8", "parallel.pipeline_model_parallel_size=1", "rollout.tensor_model_parallel_size=4")
    found = report(capsys, *arguments)
    rows = {(row["rollout_tp"], row["rank_order"]): row["bytes_received"] for row in found["moves_less"]}
    assert rows[8, "consecutive"] == 0
    assert rows[4, "strided"] < found["bytes_received"]
    assert main(["plan", LLAMA, *arguments]) == 0
    text = capsys.readouterr().out
    assert "rollout.tensor_model_parallel_size=4 with strided ranks would move" in text
    assert "every tensor gathered (verl, slime)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "72"], "does not divide the world of 72"),
        (["--world", "0"], "--world"),
        (["rollout.tensor_model_parallel_size=3"], "rollout.tensor_model_parallel_size=3"),
        (["model.path=gone"], "gone/config.json: no such file"),
        (["--network-bandwidth", "0"], "--network-bandwidth"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    try:
        code = main(["plan", LLAMA, *arguments])
    except SystemExit as exit:  # argparse's own
        code = int(exit.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
