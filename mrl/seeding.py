"""Seeds derived from trainer.seed: every use of randomness has its own stream, the same in every process."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts`, e.g. (seed, "rollout", step, prompt, sample)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
