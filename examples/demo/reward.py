"""The demo's reward: answer in kind. A prompt of digits wants digits, one of lower-case letters wants those, and so on.

The kinds share no character and each is asked for equally often, so no constant response scores above a quarter.
"""

import string

KINDS = {
    "digits": string.digits,
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "punctuation": string.punctuation,
}
FULL_LENGTH = 12
"""Characters of a full answer. A shorter one is measured against this, so ending early never pays."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """The share of the answer's characters that are of the prompt's kind (`ground_truth`)."""
    right = sum(character in KINDS[ground_truth] for character in solution_str)
    return right / max(len(solution_str), FULL_LENGTH)
