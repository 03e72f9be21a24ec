"""The mathematics of PPO-family training: pure functions on tensors, without torch.distributed and without config.

Shapes and conventions shared by this package:

- B samples (prompts x n), R padded response length, N packed response tokens of a micro-batch. Any tensor of shape
  [B, R] is right-padded and comes with `mask[B, R]` bool, True where a token counts. Masked slots (padding, tool
  output) may hold NaN: they are selected away with `torch.where`, never multiplied by zero, and outputs are 0 there.
- A sample without a single valid token is *dropped*: it takes part in no statistic and in no loss.
- Losses return sums and metrics return (sum, count): the caller adds them up over micro-batches and ranks and divides
  once.
"""
