"""vLLM in the rank's own process: sampling, and sharing what was sampled."""
