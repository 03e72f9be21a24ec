"""The run directory: where a run writes, never over another one without being asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from mrl.config.load import dump_config
from mrl.config.schema import RunConfig

RESOLVED = "config.yaml"
HEADER = "# The resolved configuration of this mrl run.\n"


def run_dir_of(config: RunConfig, config_path: str | Path) -> Path:
    """trainer.run_dir, or runs/<name of the config file without its suffix>; relative to the current directory."""
    if config.trainer.run_dir is not None:
        return Path(config.trainer.run_dir)
    return Path("runs") / Path(config_path).stem


def check_run_dir(run_dir: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raise ValueError where `prepare_run_dir` would touch what it must not; changes nothing.

    inputs: files and directories the run reads; overwriting never deletes one of them.
    """
    if not os.path.lexists(run_dir):
        return
    if not run_dir.is_dir():
        raise ValueError(f"run directory {run_dir} is not a directory; choose another trainer.run_dir")
    if not any(run_dir.iterdir()):
        return
    if not _is_run(run_dir):
        raise ValueError(
            f"run directory {run_dir} holds files that are not an mrl run's, so it is never overwritten; "
            "choose another trainer.run_dir or empty it yourself"
        )
    if not overwrite:
        raise ValueError(
            f"run directory {run_dir} already holds a run; pass --overwrite to replace it, or choose another "
            "trainer.run_dir"
        )
    here = run_dir.resolve()
    for path in (*inputs, Path()):
        if here == path.resolve() or here in path.resolve().parents:
            what = "the current directory" if path == Path() else path
            raise ValueError(
                f"run directory {run_dir} contains {what}, which overwriting would delete; "
                "choose another trainer.run_dir"
            )


def prepare_run_dir(run_dir: Path, config: RunConfig, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Create the directory (emptied first where that is allowed) with logs/ and the resolved config.yaml."""
    check_run_dir(run_dir, overwrite, inputs)
    try:
        _fill(run_dir, config)
    except OSError as error:
        raise ValueError(
            f"run directory {run_dir} cannot be written ({error.strerror}); choose another trainer.run_dir"
        ) from error


def _fill(run_dir: Path, config: RunConfig) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    # config.yaml goes last: an interrupted clean-up still looks like a run, and can be repeated.
    for entry in sorted(run_dir.iterdir(), key=lambda e: e.name == RESOLVED):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    temporary = run_dir / f".{RESOLVED}.tmp"
    temporary.write_text(HEADER + dump_config(config), encoding="utf-8")
    temporary.replace(run_dir / RESOLVED)
    (run_dir / "logs").mkdir()


def _is_run(run_dir: Path) -> bool:
    resolved = run_dir / RESOLVED
    if not resolved.is_file():
        return False
    with resolved.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == HEADER
