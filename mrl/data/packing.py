"""Packed micro-batches: which samples go together, how they are laid end to end, and where their states are.

Shapes: T tokens of a packed micro-batch, S sequences in it (a padding sequence included), N response tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAD_TOKEN_ID = 0
"""Fills padding sequences. Any valid id would do: nothing attends to them and nothing counts them."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end.

    tokens, position_ids: [T] int64; positions restart at 0 in each sequence. cu_seqlens: [S + 1] int32, from 0 to T.
    max_seqlen: tokens of the longest sequence. num_sequences: sequences without the padding one, which comes last.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_sequences: int


def plan_micro_batches(lengths: Sequence[int], dp_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Split samples into micro-batches of at most `max_tokens` tokens, the same number of them on every DP rank.

    lengths: tokens of each sample (prompt plus response). Returns, per DP rank, its micro-batches as lists of sample
    indices; an empty list is a dummy micro-batch, which keeps the ranks' counts equal. Every sample is in exactly one.
    Longest first, each to the least loaded micro-batch (Graham's LPT rule, 1969), with the smallest count of
    micro-batches that fits; never more than first-fit-decreasing needs. A pure function of its arguments, so all ranks
    agree without talking. Raises ValueError for a sample longer than `max_tokens`.
    """
    assert dp_size > 0
    assert max_tokens > 0
    assert all(length > 0 for length in lengths)
    longest = max(lengths, default=0)
    if longest > max_tokens:
        index = lengths.index(longest)
        raise ValueError(
            f"sample {index} has {longest} tokens, more than the {max_tokens} of a micro-batch; "
            f"raise ppo_max_token_len_per_gpu to at least {longest}"
        )
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _balanced_bins(lengths, by_length, dp_size, max_tokens)
    return _deal_to_ranks(lengths, bins, dp_size)


def _balanced_bins(lengths: Sequence[int], by_length: list[int], dp_size: int, max_tokens: int) -> list[list[int]]:
    """A multiple of dp_size bins of at most max_tokens each, as few as found, evenly filled where that fits."""
    # No two samples longer than half a micro-batch share one.
    large = sum(2 * length > max_tokens for length in lengths)
    per_rank = max(1, _ceil_div(sum(lengths), dp_size * max_tokens), _ceil_div(large, dp_size))
    first_fit: list[list[int]] | None = None
    while True:
        num_bins = per_rank * dp_size
        bins = _longest_first(lengths, by_length, num_bins)
        if max(sum(lengths[i] for i in members) for members in bins) <= max_tokens:
            return bins
        if first_fit is None:  # only now, because it is the slow one
            first_fit = _first_fit_decreasing(lengths, by_length, max_tokens)
        if len(first_fit) <= num_bins:
            return first_fit + [[] for _ in range(num_bins - len(first_fit))]
        per_rank += 1


def _first_fit_decreasing(lengths: Sequence[int], by_length: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for i in by_length:
        slot = next((b for b, room in enumerate(free) if room >= lengths[i]), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[slot].append(i)
        free[slot] -= lengths[i]
    return bins


def _longest_first(lengths: Sequence[int], by_length: list[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for i in by_length:
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + lengths[i], b))
    return bins


def _deal_to_ranks(lengths: Sequence[int], bins: list[list[int]], dp_size: int) -> list[list[list[int]]]:
    """Deal bins to ranks in rounds of similar size; in a round the largest goes to the rank with the least so far."""
    loads = [sum(lengths[i] for i in members) for members in bins]
    by_load = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for start in range(0, len(by_load), dp_size):
        receivers = sorted(range(dp_size), key=lambda r: (totals[r], r))
        for b, rank in zip(by_load[start : start + dp_size], receivers, strict=True):
            ranks[rank].append(sorted(bins[b]))
            totals[rank] += loads[b]
    return ranks


def pack(sequences: Sequence[Tensor], pad_multiple: int) -> PackedBatch:
    """Lay token sequences ([length] int64 each, length >= 1) end to end.

    The total is padded to a multiple of `pad_multiple` by one sequence of PAD_TOKEN_ID, listed in cu_seqlens. No
    sequences at all give a dummy micro-batch of one padding sequence.
    """
    assert pad_multiple > 0
    lengths = [sequence.numel() for sequence in sequences]
    assert all(length > 0 for length in lengths), "an empty sequence has no state to predict from"
    total = max(1, sum(lengths))
    padding = _ceil_div(total, pad_multiple) * pad_multiple - sum(lengths)
    parts = list(sequences)
    if padding:
        parts.append(torch.full((padding,), PAD_TOKEN_ID, dtype=torch.int64))
    all_lengths = torch.tensor([part.numel() for part in parts])
    return PackedBatch(
        tokens=torch.cat(parts),
        position_ids=_ranges(all_lengths),
        cu_seqlens=torch.nn.functional.pad(all_lengths.cumsum(0), (1, 0)).to(torch.int32),
        max_seqlen=int(all_lengths.max()),
        num_sequences=len(lengths),
    )


def response_state_index(cu_seqlens: Tensor, prompt_lengths: Sequence[int], response_lengths: Sequence[int]) -> Tensor:
    """Where the state before each response token stands in the packed stream: [N] int64, sample by sample.

    Log-prob and value of response token t both come from the state at the token before it (the prompt's last token for
    t = 0). cu_seqlens: [S + 1]; a padding sequence at its end is passed over.
    """
    prompts = torch.tensor(prompt_lengths, dtype=torch.int64)
    responses = torch.tensor(response_lengths, dtype=torch.int64)
    starts = cu_seqlens[: len(prompts)].to(torch.int64)
    assert bool((prompts > 0).all()), "the first response token needs a prompt token before it"
    assert torch.equal(cu_seqlens[: len(prompts) + 1].diff(), (prompts + responses).to(cu_seqlens.dtype))
    return (starts + prompts - 1).repeat_interleave(responses) + _ranges(responses)


def _ranges(lengths: Tensor) -> Tensor:
    """0 .. length-1 of each length, one after the other."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
