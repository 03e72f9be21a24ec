"""What every rank of a gang imports, imported once: a fork server loads this module and forks the ranks from itself."""

# ruff: noqa: F401

import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel
import torch
import transformers
import vllm.v1.engine.llm_engine
