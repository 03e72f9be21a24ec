"""A reward worker process: `python -m mrl.rewards.worker CONNECTION_FD LIFE_FD`, started by the scorer.

It loads the function once and answers requests until its connection closes. It dies with its parent, also in the middle
of a call that never returns.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from mrl.rewards.loading import LoadedReward, RewardError, accepted_parameters, describe, load_reward
from mrl.rewards.protocol import LoadRequest, Outcome, Reply, RewardSample

FLOAT32_MAX = 3.4028234663852886e38
"""Scores travel as fp32: what is larger would arrive as infinity."""


def main(arguments: Sequence[str]) -> None:
    connection_fd, life_fd = map(int, arguments)
    die_with_parent(life_fd)
    for fd in (connection_fd, life_fd):
        os.set_inheritable(fd, False)  # not for what the user's function starts
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the run's own: a user's print belongs in the log
    with Connection(connection_fd) as connection:
        try:
            request: LoadRequest = connection.recv()
            try:
                reward = load_reward(request.function, request.style, request.kwargs)
            except RewardError as error:
                connection.send(Reply([], str(error), error.traceback_text, fatal=True))
                return
            connection.send(Reply([]))
            while True:
                connection.send(answer(reward, request, connection.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the scorer closed its end


def die_with_parent(life_fd: int) -> None:
    """Have the kernel end this process once the parent's end of the pipe is gone.

    A signal rather than a thread: a regular expression that backtracks forever holds Python's lock. SIGIO's default
    action ends the process.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life_fd], [], [], 0)[0]:  # gone before the signal was set up
        sys.exit(1)


def answer(reward: LoadedReward, request: LoadRequest, samples: list[RewardSample]) -> Reply:
    """Call the user's function for the samples of one request (one sample, or a whole group in batch style)."""
    try:
        if request.style == "sample":
            values = [_call_sample(reward, request, sample) for sample in samples]
        else:
            values = _call_batch(reward, request, samples)
        return Reply([read_value(value, reward.where) for value in values])
    except RewardError as error:
        return Reply([], str(error), fatal=True)
    except BaseException as error:  # sys.exit() too: whatever the user's function raises is the answer
        where = reward.where_raised(error.__traceback__)
        return Reply([], f"{where}: {describe(error)}", traceback.format_exc())


def _call_sample(reward: LoadedReward, request: LoadRequest, sample: RewardSample) -> Any:
    return reward.call(
        data_source=sample.data_source,
        solution_str=sample.solution_str,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
        **request.kwargs,
    )


def _call_batch(reward: LoadedReward, request: LoadRequest, samples: list[RewardSample]) -> list[Any]:
    """TRL's convention: lists by name, chat completions as message lists where the prompts are."""
    completions = [
        s.solution_str if isinstance(s.prompt, str) else [{"role": "assistant", "content": s.solution_str}]
        for s in samples
    ]
    columns: dict[str, list[Any]] = {
        "data_source": [s.data_source for s in samples],
        "ground_truth": [s.ground_truth for s in samples],
        "extra_info": [s.extra_info for s in samples],
    }
    names = {name for s in samples for name in s.columns} - columns.keys() - {"prompts", "completions"}
    columns |= {name: [s.columns.get(name) for s in samples] for name in sorted(names - request.kwargs.keys())}
    accepted = accepted_parameters(reward)
    if accepted is not None:
        columns = {name: values for name, values in columns.items() if name in accepted}
    returned = reward.call(prompts=[s.prompt for s in samples], completions=completions, **(columns | request.kwargs))
    try:
        values = list(returned)
    except TypeError:
        raise RewardError(
            f"{reward.where} returned {_show(returned)}; reward.style=batch needs a list with one score per completion"
        ) from None
    if len(values) != len(samples):
        counts = f"{len(values)} scores for {len(samples)} completions"
        raise RewardError(f"{reward.where} returned {counts}; return one each")
    return values


def read_value(value: Any, where: str) -> Outcome:
    """A number, or a dict whose "score" is one and whose other numbers are components; finite in fp32.

    Entries of the dict that are no numbers (verl's functions put texts there, such as the parsed answer) are left out.
    """
    components: dict[str, float] = {}
    score = value
    if isinstance(value, dict):
        if "score" not in value:
            keys = ", ".join(map(repr, value)) or "none"
            return _refused(f'{where} returned a dict without "score" (keys: {keys})')
        score = value["score"]
        others = {str(key): entry for key, entry in value.items() if key != "score"}
        components = {key: float(entry) for key, entry in others.items() if _is_number(entry)}
    if not _is_number(score):
        return _refused(f"{where} returned {_show(score)}; return a number")
    for name, number in {"score": float(score), **components}.items():
        if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
            return _refused(f"{where} returned {name} {number}; return a finite number")
    return Outcome(float(score), components)


def _refused(error: str) -> Outcome:
    return Outcome(math.nan, {}, error)


def _is_number(value: Any) -> bool:
    """Whatever float() takes, texts excepted: int, bool, Decimal, NumPy scalars, one-element tensors."""
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except OverflowError:  # an int beyond float64
        return False
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of many elements
        return False
    return True


def _show(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return f"{type(value).__name__} {text[:60]}" if value is not None else "None"


if __name__ == "__main__":
    main(sys.argv[1:])
