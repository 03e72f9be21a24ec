"""Run in a process of its own on a GPU: the engine (TE layers or the local spec) against transformers in float32.

usage: engine_case.py MODEL_DIR te|local float32|bfloat16   -> prints one JSON line
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mrl.platform import select_platform


def main(path: str, layers: str, dtype_name: str) -> None:
    platform = select_platform("cuda")
    if layers == "local":
        platform.transformer_engine = False
    assert platform.transformer_engine == (layers == "te")
    platform.set_device(0)
    from mrl.parallel import initialise_distributed

    initialise_distributed(platform.distributed_backend)
    from transformers import AutoModelForCausalLM

    from converters.rules.families import facts_of
    from mrl.config.schema import OptimSection
    from mrl.engine.engine import EngineOptions, MegatronEngine
    from mrl.models.rope import read_rope
    from mrl.parallel import ParallelLayout, initialise_megatron
    from tests.engine.cases import LENGTHS, micro_batches, sequences, token_weights, weighted_log_prob_loss

    layout = ParallelLayout(1)
    initialise_megatron(layout, seed=1)
    dtype = getattr(torch, dtype_name)
    options = EngineOptions("lm", dtype, optim=OptimSection(lr=1e-3))
    engine = MegatronEngine(facts_of(path), layout, 0, read_rope(path, 64), options, platform)
    engine.load_hf(path)
    shape = (len(LENGTHS), max(r for _, r in LENGTHS))
    micro = micro_batches(engine.facts.vocab_size, layout, 0, max_tokens=64)
    ours = engine.score(micro, shape)

    model = AutoModelForCausalLM.from_pretrained(Path(path), dtype=torch.float32).cuda()
    prompts, responses, lengths, mask = sequences(model.config.vocab_size)
    weights = token_weights(shape)
    expected = torch.zeros(shape)
    total = torch.zeros((), device="cuda")
    for i, prompt in enumerate(prompts):
        response, kept = responses[i, : lengths[i]], mask[i, : lengths[i]]
        tokens = torch.cat([prompt, response]).cuda()
        log_p = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(1, response.cuda()[:, None])[:, 0]
        expected[i, : lengths[i]] = chosen.detach().cpu()
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = total + (weights[i, : lengths[i]].cuda() * (chosen + 0.3 * entropy))[kept.cuda()].sum()
    (total / mask.sum()).backward()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None))
    step, _ = engine.train_step([m.with_fields(weights=weights) for m in micro], weighted_log_prob_loss)
    after = engine.score(micro, shape)
    print(
        json.dumps(
            {
                "max_diff": float((ours - expected)[mask].abs().max()),
                "mean_diff": float((ours - expected)[mask].abs().mean()),
                "grad_norm": step.grad_norm,
                "hf_grad_norm": float(norm),
                "moved": float((after - ours)[mask].abs().mean()),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
