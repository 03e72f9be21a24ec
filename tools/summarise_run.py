"""Keep the result of a run: the metrics that tell its story, and its picture.

    python tools/summarise_run.py runs/NAME docs/results

Writes NAME.jsonl (a row a step, the metrics below) and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from mrl.metrics.writers import read_metrics

KEPT = (
    "step", "critic/score/mean", "reward/accuracy/mean", "reward/format/mean", "actor/reward_kl_penalty",
    "actor/kl_loss",    "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "critic/vf_loss", "critic/vf_explained_var",
    "response_length/mean", "mismatch/exp_abs_diff", "sync/bytes_received", "sync/lower_bound_bytes",
    "timing_s/rollout", "timing_s/ref_log_prob", "timing_s/old_log_prob", "timing_s/values", "timing_s/update_critic",
    "timing_s/update_actor", "timing_s/sync", "timing_s/step", "perf/throughput", "memory/rss_gib",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    try:
        rows = read_metrics(arguments.run_dir)
    except ValueError as error:
        print(f"summarise_run: error: {error}", file=sys.stderr)
        return 2
    name = arguments.run_dir.resolve().name
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({key: _short(row[key]) for key in KEPT if key in row}) for row in rows]
    (arguments.output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shutil.copyfile(arguments.run_dir / "curves.png", arguments.output / f"{name}.png")
    return 0


def _short(value: float | None) -> float | None:
    """Five significant digits are enough to read."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
