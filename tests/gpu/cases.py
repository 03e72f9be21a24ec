"""Micro-batches of the engine tests' sequences for one rank."""

from __future__ import annotations

from mrl.data.batching import build_micro_batches
from mrl.data.micro_batch import MicroBatch
from tests.engine.cases import sequences


def micro_batches(vocab: int) -> list[MicroBatch]:
    prompts, responses, lengths, mask = sequences(vocab)
    return build_micro_batches(
        prompts, responses, lengths, mask, range(len(prompts)), dp_size=1, dp_rank=0, max_tokens=64, pad_multiple=1
    )
