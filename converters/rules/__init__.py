"""Per-family rules: pure functions from a HF config and a rank to Segments. No torch, no communication."""
