"""Who may import whom: a room imports only what stands below it, and the light rooms stay light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROOMS: list[tuple[str, ...]] = [
    ("mrl.__main__",),
    ("mrl.cli",),
    ("mrl.preflight", "mrl.rundir", "mrl.launch"),
    ("mrl.trainer",),
    ("mrl.setup",),
    ("mrl.stages",),
    ("mrl.learner",),
    ("mrl.objectives", "mrl.random_init"),
    ("mrl.algorithms",),
    ("mrl.dataflow",),
    ("converters.export",),
    ("mrl.metrics",),
    ("mrl.rl",),
    ("mrl.rollout",),
    ("mrl.bridge",),
    ("mrl.rewards",),
    ("mrl.engine",),
    ("mrl.models",),
    ("mrl.data",),
    ("converters.load",),
    ("converters.hf_checkpoint",),
    ("mrl.parallel",),
    ("mrl.platform",),
    ("mrl.config",),
    ("converters.rules",),
    ("mrl.seeding",),
]
"""From the top down; rooms of one line may import each other."""


def level(module: str) -> int:
    for index, rooms in enumerate(ROOMS):
        if any(module == room or module.startswith(room + ".") for room in rooms):
            return index
    raise AssertionError(f"{module} stands in no room; add it to ROOMS")


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for package in ("mrl", "converters"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if name not in ("mrl", "converters"):
                found[name] = path
    return found


def imports(path: Path) -> list[str]:
    """Own modules that a file imports, wherever in it: `from a import b` is a.b where that is a module."""
    known = modules()
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in known else node.module for name in inner]
    return [name for name in found if name in known]


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_what_stands_below_it(module: str) -> None:
    for imported in imports(modules()[module]):
        assert level(imported) >= level(module), f"{module} imports {imported}, which stands above it"


def test_losses_and_advantages_know_no_world() -> None:
    for module, path in modules().items():
        if module.startswith(("mrl.rl.", "converters.rules.", "mrl.config.")):
            assert "distributed" not in path.read_text().replace("use_distributed", ""), module


def test_the_trainer_leaves_vllm_and_matplotlib_to_those_who_need_them() -> None:
    """What the command and the configuration must not import is in tests/badinput."""
    code = "import sys, mrl.trainer; print(*({'vllm', 'matplotlib'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
