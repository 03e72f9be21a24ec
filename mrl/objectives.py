"""What actor and critic minimise: the pure losses of mrl.rl, applied to the engine's outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config.schema import ActorSection, CriticSection
from mrl.data.micro_batch import MicroBatch
from mrl.engine.engine import HeadOutput, Loss
from mrl.rl.losses import POLICY_LOSSES, PolicyLossOptions, PolicyTokens, entropy_bonus, kl_loss, value_loss
from mrl.rl.metrics import TokenMetrics, merge_metrics


def actor_loss(section: ActorSection) -> Loss:
    """Policy loss, entropy bonus and (where asked for) KL to the reference.

    Reads the fields old_log_probs, advantages, weights (aggregation), is_weights (rollout correction) and, with
    use_kl_loss, ref_log_probs.
    """
    policy_loss = POLICY_LOSSES[section.policy_loss]
    options = PolicyLossOptions(section.clip_low, section.clip_high, section.dual_clip)

    def loss(output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, TokenMetrics]:
        assert output.log_probs is not None
        assert output.entropy is not None
        fields = micro.fields
        tokens = PolicyTokens(
            output.log_probs, fields["old_log_probs"], fields["advantages"], fields["weights"], fields["is_weights"]
        )
        parts = [
            policy_loss(tokens, options),
            entropy_bonus(output.entropy, fields["weights"], section.entropy_coeff),
        ]
        if section.use_kl_loss:
            parts.append(
                kl_loss(
                    output.log_probs,
                    fields["ref_log_probs"],
                    fields["weights"],
                    section.kl_loss_coef,
                    section.kl_loss_type,
                )
            )
        drift = (output.log_probs.detach() - fields["old_log_probs"]).abs()
        largest = drift.max().double() if drift.numel() else torch.tensor(0.0, dtype=torch.float64, device=drift.device)
        extra = TokenMetrics(max={"log_ratio_abs_max": largest})
        return torch.stack([p.loss_sum for p in parts]).sum(), merge_metrics(extra, *(p.metrics for p in parts))

    return loss


def critic_loss(section: CriticSection) -> Loss:
    """Clipped value loss; reads the fields old_values, returns and weights."""

    def loss(output: HeadOutput, micro: MicroBatch) -> tuple[Tensor, TokenMetrics]:
        assert output.values is not None
        fields = micro.fields
        result = value_loss(
            output.values, fields["old_values"], fields["returns"], fields["weights"], section.value_clip
        )
        return result.loss_sum, result.metrics

    return loss
