"""The `mrl` command. Imports lazily: `mrl --help` needs neither pydantic nor torch."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mrl.config.schema import RunConfig
    from mrl.preflight import Preflight

SPEAK_DELAY_S = 2.0
"""Under torchrun all ranks find the same mistake; rank 0 speaks first, and torchrun then ends the others."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"mrl: error: {message}; see {self.prog} --help\n")


@dataclass(frozen=True)
class Torchrun:
    """What torchrun told this process."""

    rank: int
    world_size: int


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C, 1 otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a path's characters
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positionals in one piece; overrides may also stand after an option.
    arguments.overrides = [*arguments.overrides, *(item for item in rest if not item.startswith("-"))]
    if unknown := [item for item in rest if item.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}")
    try:
        return {"train": _train, "check": _check, "plan": _plan}[arguments.command](arguments)
    except ValueError as error:
        torchrun = _torchrun()
        if torchrun is not None and torchrun.rank > 0:
            time.sleep(SPEAK_DELAY_S)
        if arguments.traceback:
            traceback.print_exception(error)
        for line in str(error).splitlines():
            print(f"mrl: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mrl check ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mrl", description="RL post-training of LLMs on Megatron-Core and vLLM.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    train = commands.add_parser("train", help="train; starts its own processes unless torchrun started this one")
    check = commands.add_parser("check", help="check a configuration and print what it resolves to")
    plan = commands.add_parser("plan", help="say what a weight sync would move; needs neither GPUs nor weights")
    for command in (train, check, plan):
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "overrides", metavar="SECTION.KEY=VALUE", nargs="*", default=[], help="values that win over the file"
        )
        command.add_argument("--nproc", type=int, metavar="N", help="processes on a machine")
        command.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    train.add_argument("--overwrite", action="store_true", help="replace an earlier run in the run directory")
    train.add_argument("--prepared-run-dir", metavar="DIR", help=argparse.SUPPRESS)
    check.add_argument("--graph", action="store_true", help="print the stages of a step and what they read and write")
    plan.add_argument("--world", type=_positive_int, metavar="N", help="ranks in all; changes data parallelism only")
    plan.add_argument("--json", action="store_true", help="print one line of JSON instead")
    for name, default, what in (
        ("gpu", 2000.0, "a GPU's own memory when copying, GB/s"),
        ("node", 300.0, "GPUs of a machine, GB/s each way"),
        ("network", 40.0, "machines, GB/s each way and GPU"),
    ):
        help_text = (
            f"bandwidth between {what} (default {default:g})" if name != "gpu" else f"{what} (default {default:g})"
        )
        plan.add_argument(f"--{name}-bandwidth", type=_positive_float, default=default, metavar="X", help=help_text)
    plan.add_argument(
        "--latency-us", type=_positive_float, default=20.0, metavar="X", help="of one message (default 20)"
    )
    return parser


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


_positive_int.__name__, _positive_float.__name__ = "positive integer", "positive number"  # argparse shows them


def _train(arguments: argparse.Namespace) -> int:
    torchrun = _torchrun()
    if torchrun is None:
        return _start(arguments)
    if arguments.prepared_run_dir is not None:
        return _work_for_launcher(arguments, torchrun)
    return _work_under_torchrun(arguments, torchrun)


def _start(arguments: argparse.Namespace) -> int:
    """Check everything, prepare the run directory and start the ranks."""
    from mrl.preflight import preflight
    from mrl.rundir import prepare_run_dir

    ready = preflight(arguments.config, _overrides(arguments), overwrite=arguments.overwrite)
    _print_warnings(ready)
    config, run_dir = ready.config, ready.run_dir
    if config.trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={config.trainer.nnodes}: mrl train by itself starts one machine; start it under torchrun "
            "on each of them"
        )
    prepare_run_dir(run_dir, config, arguments.overwrite or config.trainer.overwrite, ready.inputs)
    nproc = config.trainer.nproc_per_node
    print(f"mrl: {nproc} processes, writing to {run_dir} (logs in {run_dir / 'logs'})", file=sys.stderr, flush=True)

    from mrl.launch import launch, report

    worker = ["-m", "mrl", "train", arguments.config, "--prepared-run-dir", str(run_dir)]
    status = launch([*worker, *(["--traceback"] if arguments.traceback else [])], nproc, run_dir)
    report(status, sys.stderr)
    return status.exit_code


def _work_for_launcher(arguments: argparse.Namespace, torchrun: Torchrun) -> int:
    """A rank that `mrl train` started, which has checked everything and written down what it resolved to."""
    from mrl.launch import end_with_parent, run_rank

    end_with_parent()
    run_dir = Path(arguments.prepared_run_dir)

    def body() -> int:
        from mrl.config.load import load_config
        from mrl.rundir import RESOLVED

        return _run_worker(load_config(run_dir / RESOLVED), Path(arguments.config), run_dir, torchrun.rank)

    return run_rank(run_dir, torchrun.rank, body, show_traceback=arguments.traceback, speak=False)


def _work_under_torchrun(arguments: argparse.Namespace, torchrun: Torchrun) -> int:
    """A rank that torchrun started: every rank checks, rank 0 prepares the run directory."""
    from mrl.launch import run_rank
    from mrl.preflight import preflight

    ready = preflight(arguments.config, _overrides(arguments), world_size=torchrun.world_size, read_data=False)
    if torchrun.rank == 0:
        _print_warnings(ready)
    store = _prepare_together(ready, arguments.overwrite, torchrun.rank)

    def body() -> int:
        return _run_worker(ready.config, Path(arguments.config), ready.run_dir, torchrun.rank)

    code = run_rank(ready.run_dir, torchrun.rank, body, show_traceback=arguments.traceback, speak=True)
    del store  # rank 0 may be its server, so it lives as long as the job
    return code


def _run_worker(config: RunConfig, config_path: Path, run_dir: Path, rank: int) -> int:
    """Send the libraries' chatter to the rank's log before the first of them is imported, then train."""
    from mrl.launch import rank_log, redirect_output

    terminal = redirect_output(rank_log(run_dir, rank))
    from mrl.trainer import run_worker

    run_worker(config, config_path, run_dir, terminal)
    return 0


def _prepare_together(ready: Preflight, overwrite: bool, rank: int) -> object:
    """Rank 0 prepares the run directory, the others wait for it; ValueError on all ranks where it may not.

    Returns torchrun's store.
    """
    from torch.distributed.rendezvous import rendezvous

    from mrl.rundir import prepare_run_dir

    store, _, _ = next(iter(rendezvous("env://")))
    key = "mrl/run_dir"
    if rank == 0:
        try:
            prepare_run_dir(ready.run_dir, ready.config, overwrite or ready.config.trainer.overwrite, ready.inputs)
        except ValueError as error:
            store.set(key, str(error))
            raise
        store.set(key, "")
    elif message := store.get(key).decode():
        raise ValueError(message)
    (ready.run_dir / "logs").mkdir(parents=True, exist_ok=True)  # on another node the file system may be another
    return store


def _check(arguments: argparse.Namespace) -> int:
    from mrl.config.load import dump_config
    from mrl.config.rules import batch_arithmetic
    from mrl.preflight import preflight

    ready = preflight(arguments.config, _overrides(arguments))
    _print_warnings(ready)
    config = ready.config
    if arguments.graph:
        from mrl.algorithms import graph_lines

        print("\n".join(graph_lines(config)))
        return 0
    world = config.trainer.nnodes * config.trainer.nproc_per_node
    print(dump_config(config))
    rows = [*batch_arithmetic(config, world), ("run directory", str(ready.run_dir))]
    width = max(len(label) for label, _ in rows)
    print("\n".join(f"{label:<{width}}  {value}" for label, value in rows))
    print()
    print("\n".join(_layout_lines(config, world)))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from converters.rules.families import facts_of
    from mrl.config.load import load_config
    from mrl.config.rules import layout_violations

    config = load_config(arguments.config, _overrides(arguments))
    world = arguments.world or config.trainer.nnodes * config.trainer.nproc_per_node
    facts = facts_of(config.model.path)
    if found := layout_violations(config, world, {"model.path": facts}):
        raise ValueError("\n".join(found))
    from mrl.bridge.report import Setting, plan_report, report_lines
    from mrl.bridge.traffic import Links

    links = Links(arguments.gpu_bandwidth, arguments.node_bandwidth, arguments.network_bandwidth, arguments.latency_us)
    report = plan_report(Setting.of(config, facts, world), links)
    print(json.dumps(report) if arguments.json else "\n".join(report_lines(report)))
    return 0


def _layout_lines(config: RunConfig, world: int) -> list[str]:
    """A row for each rank: where it stands in training and in the rollout."""
    from mrl.parallel import parallel_layout

    layout = parallel_layout(config.parallel, world)
    rollout_tp = config.rollout.tensor_model_parallel_size
    lines = ["rank   dp  pp  tp   rollout replica  rollout tp"]
    for rank in range(world):
        at = layout.coordinates(rank)
        replica, tp = divmod(rank, rollout_tp)
        lines.append(f"{rank:>4}  {at.dp:>3} {at.pp:>3} {at.tp:>3}  {replica:>16}  {tp:>10}")
    return lines


def _overrides(arguments: argparse.Namespace) -> list[str]:
    nproc = [] if arguments.nproc is None else [f"trainer.nproc_per_node={arguments.nproc}"]
    return [*arguments.overrides, *nproc]


def _torchrun() -> Torchrun | None:
    """torchrun's word to this process, None where it did not start it."""
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return Torchrun(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return None


def _print_warnings(ready: Preflight) -> None:
    for line in ready.warnings:
        print(f"mrl: warning: {line}", file=sys.stderr)
