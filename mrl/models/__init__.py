"""From a HF config to a Megatron-Core GPTModel."""
