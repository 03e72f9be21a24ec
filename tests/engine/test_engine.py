"""The engine against transformers: log-probs, entropies, values, gradients and training, over all layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine import cases, oracle
from tests.gang import Gang
from tests.tiny import load_hf

ALL_IN_ONE, SMALL, UNPACKED = 512, 20, cases.UNPACKED
"""Token budgets: one micro-batch for everything; several; one for each sequence."""

SPLITS = [
    (1, 1, 1, ALL_IN_ONE),
    (1, 1, 1, SMALL),
    (1, 1, 1, UNPACKED),
    (2, 2, 1, ALL_IN_ONE),
    (2, 2, 1, SMALL),
    (2, 1, 2, SMALL),
    (2, 1, 1, SMALL),
    (4, 2, 2, UNPACKED),
    (4, 2, 1, ALL_IN_ONE),
    (4, 1, 2, SMALL),
    (4, 1, 1, SMALL),
]
"""(world, tp, pp, token budget); the rest of the world is data parallel."""
SPLITS_OF_TIED = [SPLITS[0], (2, 2, 1, SMALL), (2, 1, 2, SMALL), (4, 2, 2, UNPACKED)]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("max_tokens", [ALL_IN_ONE, UNPACKED])
def test_logits_equal_transformers(
    gang: Callable[[int], Gang], tiny: Callable[..., str], family: str, world: int, tp: int, pp: int, max_tokens: int
) -> None:
    path = tiny(family, tie_word_embeddings=family == "qwen2")
    ours = gang(world).run(cases.full_log_probs, path, tp, pp, max_tokens)[0]
    assert (ours - oracle.hf_log_probs(path)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "world", "tp", "pp", "first_stage"),
    [
        ("qwen2", 4, 1, 2, 2, 1, None),  # one KV group cut over both ranks
        ("qwen3", 4, 2, 4, 4, 1, None),
        ("llama", 4, 2, 2, 1, 2, 4),  # 4 + 2 layers
        ("llama", 4, 2, 4, 2, 2, 1),
    ],
)
def test_logits_of_kv_groups_fewer_than_ranks_and_uneven_stages(
    gang: Callable[[int], Gang], tiny: Callable[..., str],
    family: str, heads: int, kv_heads: int, world: int, tp: int, pp: int, first_stage: int | None,
) -> None:  # fmt: skip
    path = tiny(family, num_attention_heads=heads, num_key_value_heads=kv_heads)
    ours = gang(world).run(cases.full_log_probs, path, tp, pp, SMALL, first_stage=first_stage)[0]
    assert (ours - oracle.hf_log_probs(path)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("world", "tp", "pp", "kv_heads", "first_stage"), [(4, 4, 1, 2, None), (2, 2, 1, 1, None), (2, 1, 2, 2, 4)]
)
def test_gradients_of_kv_groups_fewer_than_ranks_and_uneven_stages(
    gang: Callable[[int], Gang], tiny: Callable[..., str],
    world: int, tp: int, pp: int, kv_heads: int, first_stage: int | None,
) -> None:  # fmt: skip
    path = tiny("qwen3", num_key_value_heads=kv_heads)
    loss, expected = oracle.hf_gradients(path, "lm")
    ours_loss, ours = gang(world).run(cases.gradients, path, tp, pp, "lm", SMALL, first_stage=first_stage)[0]
    assert ours_loss == pytest.approx(loss, rel=1e-5)
    assert max(relative(ours[name], expected[name]) for name in expected) <= 1e-5


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_do_not_depend_on_the_split(
    gang: Callable[[int], Gang], tiny: Callable[..., str], head: str, tied: bool
) -> None:
    """Qwen3 with KV groups, q/k norms and an odd vocabulary. fp64 autograd of transformers is the right value."""
    path = tiny("qwen3", tie_word_embeddings=tied)
    loss, expected = oracle.hf_gradients(path, head)
    base: dict[str, Tensor] = {}
    for world, tp, pp, max_tokens in SPLITS_OF_TIED if tied else SPLITS:
        ours_loss, ours = gang(world).run(cases.gradients, path, tp, pp, head, max_tokens)[0]
        case = f"world {world} tp {tp} pp {pp} budget {max_tokens}"
        assert ours_loss == pytest.approx(loss, rel=1e-5), case
        assert ours.keys() == expected.keys(), case
        base = base or ours
        for name, gradient in ours.items():
            assert relative(gradient, expected[name]) <= 5e-6, (case, name)
            # TP splits the sums inside every matrix product. The q/k gradients of a random model cancel to a small
            # rest, so that alone moves them by up to 2.3e-6 (as far as TP1 itself is from float64).
            assert relative(gradient, base[name]) <= (1e-6 if tp == 1 else 3e-6), (case, name)
        whole = torch.cat([g.flatten() for g in ours.values()])
        assert relative(whole, torch.cat([base[name].flatten() for name in ours])) <= 1e-6, case


@pytest.mark.parametrize(
    ("world", "tp", "pp", "options"),
    [
        (2, 2, 1, {"sequence_parallel": False}),
        (2, 2, 1, {"recompute": "full"}),
        (2, 1, 2, {"recompute": "full"}),
        (2, 1, 1, {"overlap_grad_reduce": True}),
        (4, 2, 2, {"overlap_grad_reduce": True}),
        (1, 1, 1, {"temperature": 0.7}),
        (2, 2, 1, {"temperature": 0.7}),
    ],
)
def test_options_keep_loss_and_gradient(
    gang: Callable[[int], Gang], tiny: Callable[..., str], world: int, tp: int, pp: int, options: dict[str, object]
) -> None:
    path = tiny("qwen3")
    loss, expected = oracle.hf_gradients(path, "lm", float(options.get("temperature", 1.0)))  # type: ignore[arg-type]
    ours_loss, ours = gang(world).run(cases.gradients, path, tp, pp, "lm", SMALL, **options)[0]
    assert ours_loss == pytest.approx(loss, rel=1e-5)
    assert max(relative(ours[name], expected[name]) for name in expected) <= 5e-6


def test_tied_embeddings_over_three_stages(gang: Callable[[int], Gang], tiny: Callable[..., str]) -> None:
    """The middle stage holds no embedding; first and last hold one box twice and must get one summed gradient."""
    path = tiny("llama", tie_word_embeddings=True)
    for head in ("lm", "value"):
        _, expected = oracle.hf_gradients(path, head)
        _, ours = gang(3).run(cases.gradients, path, 1, 3, head, SMALL)[0]
        assert ours.keys() == expected.keys()
        assert max(relative(ours[name], expected[name]) for name in expected) <= 5e-6


def test_entropy_and_log_probs_of_padded_vocabulary(gang: Callable[[int], Gang], tiny: Callable[..., str]) -> None:
    """Vocabulary 151 over TP2 is padded to 160: pad columns are outside softmax and entropy, their gradient is 0."""
    path = tiny("llama")
    reference = oracle.hf_log_probs(path)
    entropy = -(reference.exp() * reference).sum(-1)
    mask = cases.sequences(151)[3].flatten()
    got = gang(2).run(cases.scored, path, 2, 1, "lm", SMALL)[1]
    given = gang(2).run(cases.entropies, path, 2)[1]
    assert torch.allclose(given.flatten()[mask].double(), entropy[mask], atol=1e-5)
    targets = cases.sequences(151)[1].flatten()[mask]
    chosen = reference[mask].gather(1, targets[:, None])[:, 0]
    assert torch.allclose(got.flatten()[mask].double(), chosen, atol=1e-5)
    assert gang(2).run(cases.padded_rows_gradient, path, 2) == [0.0, 0.0]


def test_three_optimizer_steps_equal_adamw(gang: Callable[[int], Gang], tiny: Callable[..., str]) -> None:
    """The distributed optimizer against torch's AdamW in float64 on transformers' model, with clipping and decay."""
    path = tiny("llama", tie_word_embeddings=True)
    model = load_hf(Path(path))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    norms = []
    prompts, responses, lengths, mask = cases.sequences(151)
    weights = cases.token_weights((len(prompts), responses.shape[1])).double()
    for _ in range(3):
        adamw.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for i, prompt in enumerate(prompts):
            response, kept = responses[i, : lengths[i]], mask[i, : lengths[i]]
            log_p = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            per_token = weights[i, : lengths[i]] * (log_p.gather(1, response[:, None])[:, 0] + 0.3 * entropy)
            total = total + per_token[kept].sum()
        (total / mask.sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adamw.step()
    expected = dict(model.named_parameters())
    for world, tp, pp in [(1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 2, 2)]:
        ours = gang(world).run(cases.train, path, tp, pp, 3)[0]
        assert [o.grad_norm for o in ours["outcomes"]] == pytest.approx(norms, rel=1e-4)
        for name, weight in ours["weights"].items():
            # Adam divides by the gradient's own size, so fp32 noise of tiny gradients is amplified up to lr.
            error = (weight.double() - expected[name]).abs()
            assert error.max() <= 3e-3, name
            assert error.mean() <= 1e-5, name


@pytest.mark.parametrize(("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 1, 1), (4, 2, 2)])
def test_nan_on_one_rank_skips_the_step_everywhere(
    gang: Callable[[int], Gang], tiny: Callable[..., str], world: int, tp: int, pp: int
) -> None:
    """The last rank's loss is NaN (it is on the last stage): no rank may change a weight."""
    for result in gang(world).run(cases.train, tiny("llama"), tp, pp, 2, world - 1):
        assert result["unchanged"]
        assert len(result["outcomes"]) == 2
        assert all(not o.applied and not math.isfinite(o.grad_norm) for o in result["outcomes"])
