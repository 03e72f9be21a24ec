"""The weight bridge: Megatron-Core's shards straight into vLLM's parameters, moving each byte at most once."""
