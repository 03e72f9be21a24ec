"""The CPU platform: its AdamW, its stand-ins for torch.cuda and where they end, and the choice of a platform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrl.platform import select_platform
from mrl.platform.adamw import AdamW
from tests.gang import Gang


def adamw_in_float64(grads: list[np.ndarray], start: np.ndarray, lr: float, wd: float) -> np.ndarray:
    """Loshchilov & Hutter 2019, algorithm 2, step by step. betas (0.8, 0.95), eps 1e-8."""
    theta = start.astype(np.float64)
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, g in enumerate(grads, start=1):
        g = g.astype(np.float64)
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.95**t)
        theta = theta - lr * (m_hat / (np.sqrt(v_hat) + 1e-8)) - lr * wd * theta
    return theta


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_the_papers_and_torchs(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(5, 7, generator=generator)
    grads = [torch.randn(5, 7, generator=generator) for _ in range(6)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    settings = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimizers = [AdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)]  # type: ignore[arg-type]
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    expected = adamw_in_float64([g.numpy() for g in grads], start.numpy(), 0.05, weight_decay)
    np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=2e-6, atol=2e-7)


def test_a_parameter_without_gradient_keeps_its_value_and_no_state() -> None:
    idle = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([idle], lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(idle, torch.ones(3))
    assert not optimizer.state[idle]


def test_state_can_be_saved_and_loaded_back() -> None:
    def trained(
        steps: int, optimizer_state: dict[str, object] | None, value: torch.Tensor
    ) -> tuple[AdamW, torch.Tensor]:
        parameter = torch.nn.Parameter(value.clone())
        optimizer = AdamW([parameter], lr=0.1, weight_decay=0.1)
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        for _ in range(steps):
            parameter.grad = parameter.detach() ** 2
            optimizer.step()
        return optimizer, parameter.detach()

    start = torch.linspace(-1, 1, 8)
    _, through = trained(5, None, start)
    optimizer, half = trained(2, None, start)
    _, resumed = trained(3, optimizer.state_dict(), half)
    assert torch.equal(resumed, through)


def stand_ins() -> list[object]:
    """Run in a gang of one, whose process has installed the platform."""
    platform = select_platform("cpu")
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.is_available())
    with platform.megatron():
        made = [
            torch.zeros(2, device="cuda").device.type,
            torch.zeros(2, device=torch.device("cuda", 3)).device.type,
            torch.ones(1).to("cuda").device.type,
            torch.ones(1).cuda().device.type,
            torch.ones(1).pin_memory().is_pinned(),
            str(torch.cuda.current_device()),
        ]
    after = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.is_available())
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):
        made.append("refused outside")
    return [*made, before == after]


def test_cuda_means_cpu_only_around_megatron() -> None:
    gang = Gang(1)
    try:
        assert gang.run(stand_ins)[0] == ["cpu", "cpu", "cpu", "cpu", False, "cpu", "refused outside", True]
    finally:
        gang.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_choice_of_a_platform() -> None:
    with pytest.raises(ValueError, match=r"trainer\.platform=cuda: torch sees no CUDA device; use .*=cpu or auto"):
        select_platform("cuda")
    with pytest.raises(ValueError, match="'tpu' is not one of auto, cpu, cuda"):
        select_platform("tpu")
    assert select_platform("auto").name == "cpu"
