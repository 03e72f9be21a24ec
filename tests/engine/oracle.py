"""The right answers, from transformers in float64: one sequence at a time, plain autograd."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.engine.cases import LENGTHS, sequences, token_weights, value_head_weight
from tests.tiny import load_hf


def hf_log_probs(path: str) -> Tensor:
    """[B * R, V] log softmax of the logits before each response token; 0 rows where the mask is off."""
    model = load_hf(Path(path))
    vocab = model.config.vocab_size
    prompts, responses, lengths, mask = sequences(vocab)
    out = torch.zeros(*mask.shape, vocab, dtype=torch.float64)
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            tokens = torch.cat([prompt, responses[i, : lengths[i]]])
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
            out[i, : lengths[i]] = log_probs[len(prompt) - 1 : -1]
    return torch.where(mask[..., None], out, 0.0).view(-1, vocab)


def hf_gradients(path: str, head: str, temperature: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """(loss sum, gradient of the mean) of the test losses in cases.py."""
    model = load_hf(Path(path))
    prompts, responses, lengths, mask = sequences(model.config.vocab_size)
    weights = token_weights((len(LENGTHS), responses.shape[1])).double()
    value_weight = value_head_weight(model.config.hidden_size).double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i, prompt in enumerate(prompts):
        response = responses[i, : lengths[i]]
        tokens = torch.cat([prompt, response])
        states = slice(len(prompt) - 1, len(tokens) - 1)
        kept = mask[i, : lengths[i]]
        if head == "lm":
            log_p = (model(tokens[None]).logits[0, states] / temperature).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            per_token = weights[i, : lengths[i]] * (log_p.gather(1, response[:, None])[:, 0] + 0.3 * entropy)
        else:
            hidden = model.model(tokens[None]).last_hidden_state[0, states]
            per_token = ((hidden @ value_weight.t())[:, 0] - weights[i, : lengths[i]]).square()
        total = total + per_token[kept].sum()
    (total / mask.sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if head == "value":
        assert value_weight.grad is not None
        grads["score.weight"] = value_weight.grad
    return float(total), grads
