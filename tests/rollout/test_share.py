"""Sharing rollouts over the world: every rank gets every sample, in (prompt, sample) order, unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.rollout.share import replica_slice
from tests.gang import Gang
from tests.rollout import share_case


@given(st.integers(0, 500), st.integers(1, 40))
def test_replicas_share_the_prompts_evenly(num_prompts: int, replicas: int) -> None:
    slices = [replica_slice(num_prompts, replicas, r) for r in range(replicas)]
    assert [i for part in slices for i in part] == list(range(num_prompts))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize(
    ("num_prompts", "n", "tp"),
    [(5, 3, 1), (1, 2, 1), (4, 2, 2)],
    ids=["uneven", "a replica without prompts", "one replica of two"],
)
def test_round_trip(gang: Callable[[int], Gang], num_prompts: int, n: int, tp: int) -> None:
    expected = [share_case.made_up(p, s) for p in range(num_prompts) for s in range(n)]
    longest = max(len(c.token_ids) for c in expected)
    for batch, rows in gang(2).run(share_case.shared, num_prompts, n, tp):
        assert batch.responses.shape == batch.mask.shape == batch.log_probs.shape == (num_prompts * n, longest)
        for row, completion in enumerate(expected):
            length = len(completion.token_ids)
            assert batch.lengths[row] == length
            assert batch.truncated[row] == (completion.finish_reason == "length")
            assert batch.mask[row].tolist() == [i < length for i in range(longest)]
            assert batch.responses[row].tolist() == [*completion.token_ids, *[0] * (longest - length)]
            log_probs = np.zeros(longest, np.float32)
            log_probs[:length] = np.asarray(completion.log_probs)
            assert np.array_equal(batch.log_probs[row].numpy(), log_probs)
        made = np.array([[p, s, np.nan if s % 2 else 1e300] for p in range(num_prompts) for s in range(n)])
        assert np.array_equal(rows.numpy(), made, equal_nan=True)


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        ([[5, 6], [7]], [[5, 6], [7]], False),
        ([[5, 6], [7]], [[5, 6], [8]], True),
        ([[5, 6], [7]], [[5], [6, 7]], True),
        ([[5, 6], [7]], [[5, 6]], True),
    ],
    ids=["equal", "another token", "another boundary", "a sample less"],
)
def test_ranks_that_sampled_apart_are_named(
    gang: Callable[[int], Gang], first: list[list[int]], second: list[list[int]], differ: bool
) -> None:
    message = "rollout: ranks [1] sampled other tokens than rank 0 of the same replica" if differ else "no error"
    assert gang(2).run(share_case.disagreement, [first, second]) == [message] * 2
