"""The reward for sums: right if the answer's last number is the sum, and a little for answering with a number alone."""

import re

NUMBER = re.compile(r"-?\d+")
FORMAT_SHARE = 0.1


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, float]:
    """0.9 for the right last number and 0.1 for nothing but a number; `accuracy` and `format` are logged apart."""
    numbers = NUMBER.findall(solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth
    bare = NUMBER.fullmatch(solution_str.strip()) is not None
    score = (1.0 - FORMAT_SHARE) * right + FORMAT_SHARE * bare
    return {"score": score, "accuracy": float(right), "format": float(bare)}
