"""The layers of a pipeline stage are Megatron-Core's own, for every split that it accepts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from converters.rules.pipeline import PipelineSplit

SPLITS = [
    PipelineSplit(num_layers, pp, vpp, first, last)
    for num_layers, pp, vpp, first, last in [
        (6, 1, 1, None, None),
        (6, 2, 1, None, None),
        (12, 3, 2, None, None),
        (8, 2, 4, None, None),
        (5, 2, 1, 2, None),
        (5, 2, 1, None, 1),
        (7, 3, 1, 1, 2),
        (18, 4, 2, 2, 4),
        (14, 4, 2, None, 2),
        (3, 2, 1, 1, 2),
    ]
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_layers_are_megatron_cores(split: PipelineSplit) -> None:
    config = SimpleNamespace(
        num_layers=split.num_layers,
        pipeline_model_parallel_size=split.pp,
        virtual_pipeline_model_parallel_size=split.vpp if split.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    held: list[int] = []
    for pp_rank in range(split.pp):
        for chunk in range(split.vpp):
            stage = chunk if split.vpp > 1 else None
            first = get_transformer_layer_offset(config, stage, pp_rank)
            count = get_num_layers_to_build(config, stage, pp_rank)
            assert split.layers(pp_rank, chunk) == range(first, first + count)
            held += split.layers(pp_rank, chunk)
    assert sorted(held) == list(range(split.num_layers))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4), "6 layers do not divide over 4 pipeline stages"),
        ((6, 3, 1, 3, None), r"over 3 pipeline stages \(first 3\); 3 are left for 2 stages"),
        ((6, 2, 1, 3, 2), r"first 3, last 2\); 1 are left for 0 stages"),
        ((6, 2, 2), "a stage of 3 layers does not divide into 2 virtual stages"),
        ((6, 1, 2), "a pipeline of one stage"),
        ((6, 8), "6 layers do not divide over 8"),
    ],
)
def test_splits_that_do_not_fit(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineSplit(*arguments)
