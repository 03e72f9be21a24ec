"""MegatronEngine: one role-neutral class that builds, runs and trains a sharded model."""
