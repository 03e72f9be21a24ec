"""Write sums as chat prompts: `chain_sum` of reasoning-gym, seeded, in the columns that verl uses.

python examples/sums/make_prompts.py [--output FILE] [--rows N] [--seed N] [--terms N] [--digits N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import reasoning_gym

INSTRUCTION = "Answer with the number only."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--terms", type=int, default=2, help="at most that many numbers in a sum")
    parser.add_argument("--digits", type=int, default=1, help="at most that many digits in a number")
    arguments = parser.parse_args()
    sums = reasoning_gym.create_dataset(
        "chain_sum",
        size=arguments.rows,
        seed=arguments.seed,
        min_terms=2,
        max_terms=arguments.terms,
        min_digits=1,
        max_digits=arguments.digits,
    )
    rows = [
        {
            "prompt": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": f"{entry['metadata']['expression']} ="},
            ],
            "data_source": "reasoning_gym/chain_sum",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": index, "expression": entry["metadata"]["expression"]},
        }
        for index, entry in enumerate(sums)
    ]
    temporary = arguments.output.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(arguments.output)
    print(f"{len(rows)} prompts written to {arguments.output}")


if __name__ == "__main__":
    main()
