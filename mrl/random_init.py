"""A model with random weights from a HF directory that has none: `model.init: random`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch


def write_random_model(source: Path, target: Path, seed: int) -> None:
    """Write `target`: the weights transformers draws for source/config.json under `seed`, and source's other files.

    The global random state is left as it was.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.pth", "*.gguf"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    model.save_pretrained(partial)
    # save_pretrained rewrites config.json and generation_config.json with its own defaults: the user's stay.
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy2(source / name, partial / name)
    os.rename(partial, target)
