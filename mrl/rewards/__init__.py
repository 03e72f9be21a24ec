"""Rewards: a user's function or a built-in rule, run in a pool of worker processes. Nothing here imports torch."""
