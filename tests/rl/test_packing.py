"""Micro-batch planning and packing, against brute force and hand computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.packing import pack, plan_micro_batches, response_state_index


def loads(lengths: list[int], plan: list[list[list[int]]]) -> list[list[int]]:
    return [[sum(lengths[i] for i in micro) for micro in rank] for rank in plan]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 5), st.integers(64, 200))
def test_every_sample_once_same_count_and_within_budget(lengths: list[int], dp_size: int, max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert max(max(rank) for rank in loads(lengths, plan)) <= max_tokens
    # Any first fit leaves at most one micro-batch half empty, so twice the tokens bound the number of full ones.
    assert len(plan[0]) <= -(-(2 * sum(lengths) // max_tokens + 1) // dp_size)
    assert plan == plan_micro_batches(list(lengths), dp_size, max_tokens)


def test_counts_are_minimal_where_that_is_easy_to_see() -> None:
    # 6+4, 5+5, 3+7 fill three micro-batches of 10 exactly; three ranks need one each.
    plan = plan_micro_batches([6, 4, 5, 5, 3, 7], dp_size=3, max_tokens=10)
    assert loads([6, 4, 5, 5, 3, 7], plan) == [[10], [10], [10]]
    # Longest-first into two gives 3+2+2=7 and 3+2=5, over the budget of 6; 3+3 and 2+2+2 fit.
    assert sorted(map(tuple, loads([3, 3, 2, 2, 2], plan_micro_batches([3, 3, 2, 2, 2], 2, 6)))) == [(6,), (6,)]


def test_ranks_carry_similar_loads() -> None:
    rng = np.random.default_rng(0)
    lengths = [int(x) for x in rng.integers(16, 512, size=256)]
    totals = [sum(rank) for rank in loads(lengths, plan_micro_batches(lengths, 4, 4096))]
    assert max(totals) / min(totals) < 1.02


def test_more_ranks_than_samples_gives_dummies() -> None:
    plan = plan_micro_batches([5], dp_size=3, max_tokens=8)
    assert sorted(plan) == [[[]], [[]], [[0]]]
    assert plan_micro_batches([], dp_size=2, max_tokens=8) == [[[]], [[]]]


def test_sample_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 9 tokens.*raise ppo_max_token_len_per_gpu to at least 9"):
        plan_micro_batches([3, 9], dp_size=1, max_tokens=8)


def test_pack_by_hand() -> None:
    packed = pack([torch.tensor([11, 12, 13]), torch.tensor([21]), torch.tensor([31, 32])], pad_multiple=4)
    assert packed.tokens.tolist() == [11, 12, 13, 21, 31, 32, 0, 0]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6, 8]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.max_seqlen, packed.num_sequences) == (3, 3)


def test_pack_needs_no_padding_sequence_at_a_multiple() -> None:
    packed = pack([torch.tensor([1, 2]), torch.tensor([3, 4])], pad_multiple=2)
    assert packed.cu_seqlens.tolist() == [0, 2, 4]


def test_dummy_micro_batch() -> None:
    packed = pack([], pad_multiple=2)
    assert (packed.tokens.tolist(), packed.cu_seqlens.tolist(), packed.num_sequences) == ([0, 0], [0, 2], 0)
    assert response_state_index(packed.cu_seqlens, [], []).tolist() == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=8), st.integers(1, 8))
def test_states_stand_right_before_their_tokens(shapes: list[tuple[int, int]], pad_multiple: int) -> None:
    """Each token is numbered uniquely, so the token after a state must be the response token asked for."""
    sequences, responses, next_id = [], [], 1
    for prompt, response in shapes:
        ids = list(range(next_id, next_id + prompt + response))
        next_id += prompt + response
        sequences.append(torch.tensor(ids))
        responses += ids[prompt:]
    packed = pack(sequences, pad_multiple)
    states = response_state_index(packed.cu_seqlens, [p for p, _ in shapes], [r for _, r in shapes])
    assert states.dtype == torch.int64
    assert packed.tokens[states + 1].tolist() == responses
    # The state belongs to the same sequence: its position is one less than its token's.
    assert torch.equal(packed.position_ids[states] + 1, packed.position_ids[states + 1])
    assert packed.tokens.numel() % pad_multiple == 0
    assert int(packed.cu_seqlens[-1]) == packed.tokens.numel()
