"""One rank of a run: build the parts, sync the weights, then run the algorithm's stages once a step."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TextIO

from mrl import algorithms
from mrl.config.schema import RunConfig
from mrl.data.prompts import PromptStream
from mrl.data.tokenizer import decode_response
from mrl.dataflow import order, run
from mrl.metrics.curves import plot_run
from mrl.metrics.live import SilentView, View, closing_lines, open_view
from mrl.metrics.timers import Timers
from mrl.metrics.writers import RunWriter, json_number
from mrl.parallel import initialise_distributed, shut_down_distributed
from mrl.platform import select_platform
from mrl.setup import Parts, build_parts
from mrl.stages import Rollouts, Scores


class Trainer:
    """The loop. Every rank runs it; rank 0 writes and shows."""

    def __init__(self, config: RunConfig, run_dir: Path, parts: Parts, view: View, writer: RunWriter | None) -> None:
        self.config, self.run_dir, self.parts = config, run_dir, parts
        self.history: list[Mapping[str, float]] = []
        self._view, self._writer = view, writer
        self._prompts = PromptStream(
            len(parts.prompts), config.data.train_batch_size, config.trainer.seed, config.data.shuffle
        )
        self._stages = order(algorithms.stages(config, parts.stages), algorithms.INPUTS)

    def fit(self) -> None:
        """All steps, then the final export to <run_dir>/hf."""
        self._view.phase("first weight sync")
        self.parts.stages.sync_weights()
        self.parts.check_behaviour()
        for step in range(self.config.trainer.total_steps):
            metrics = self._one_step(step)
            self.history.append(metrics)
            self._view.step(metrics)
        self._view.phase("writing the trained model")
        self.parts.export(self.run_dir / "hf")

    def _one_step(self, step: int) -> dict[str, float]:
        stages, timers = self.parts.stages, Timers()
        stages.begin_step(step)
        fields: dict[str, Any] = {
            "prompts": [self.parts.prompts[i] for i in self._prompts.batch(step)],
            "rollout_weights": step,
        }
        with timers("step"):
            run(self._stages, fields, timers, self._view.stage)
        metrics: dict[str, float] = {"step": step + 1, "training/epoch": self._prompts.epoch(step)}
        metrics |= stages.metrics.values()
        metrics |= timers.values() | self._performance(timers.values()["timing_s/step"], fields["rollouts"])
        if self._writer is not None:
            self._writer.metrics(metrics)
            self._writer.rollouts(self._rollout_rows(step, fields["rollouts"], fields["scores"]))
        return metrics

    def _performance(self, seconds: float, rollouts: Rollouts) -> dict[str, float]:
        tokens = int(rollouts.batch.lengths.sum()) + sum(len(p.token_ids) for p in rollouts.prompts)
        device_gib = self.parts.platform.peak_memory_gib()
        return {
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds / self.parts.world,
            "memory/rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **({"perf/max_memory_allocated_gb": device_gib} if device_gib is not None else {}),
        }

    def _rollout_rows(self, step: int, rollouts: Rollouts, scores: Scores) -> Iterator[dict[str, Any]]:
        """rollouts.jsonl: the first trainer.log_rollouts samples of the step."""
        batch = rollouts.batch
        for i, prompt in enumerate(rollouts.prompts[: self.config.trainer.log_rollouts]):
            length = int(batch.lengths[i])
            tokens = batch.responses[i, :length].tolist()
            yield {
                "step": step + 1,
                "index": prompt.prompt.index,
                "group": int(rollouts.group[i]),
                "prompt": prompt.text,
                "response": decode_response(self.parts.tokenizer, tokens),
                "token_ids": tokens,
                "logprobs": batch.log_probs[i, :length].tolist(),
                "finish_reason": "length" if batch.truncated[i] else "stop",
                "score": json_number(float(scores.scores[i])),
                "components": {name: json_number(float(x[i])) for name, x in scores.components.items()},
            }


def run_worker(config: RunConfig, config_path: Path, run_dir: Path, terminal: TextIO) -> None:
    """Run this rank to its end, showing progress on `terminal`. Raises ValueError for a user's mistake."""
    start = time.monotonic()
    platform = select_platform(config.trainer.platform)
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world = initialise_distributed(platform.distributed_backend)
    with ExitStack() as stack:
        view: View = SilentView()
        writer: RunWriter | None = None
        if rank == 0:
            view = open_view(terminal, config_path.stem, config.trainer.total_steps)
            stack.callback(lambda: view.close())
            writer = stack.enter_context(closing(RunWriter(run_dir, config.trainer.tensorboard)))
        parts = stack.enter_context(
            closing(build_parts(config, run_dir, platform, rank, world, view.phase, view.message))
        )
        trainer = Trainer(config, run_dir, parts, view, writer)
        trainer.fit()
        if rank == 0:
            plot_run(run_dir)
            view.close()
            for line in closing_lines(run_dir, trainer.history, time.monotonic() - start):
                view.message(line)
    shut_down_distributed()
