"""From `reward.function` to a callable: checked without running it (for `mrl check`), or loaded (in a worker)."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mrl.rewards.protocol import Style
from mrl.rewards.rules import BUILT_INS

SAMPLE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_PARAMETERS = ("prompts", "completions")


class RewardError(ValueError):
    """A reward that cannot be used or that failed: one line, and the traceback (for the log) in `traceback_text`."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text


@dataclass(frozen=True)
class LoadedReward:
    """A callable and how to speak of it. path: the user's file, None for a built-in. line: where it is defined."""

    call: Callable[..., Any]
    name: str
    path: Path | None
    line: int

    @property
    def where(self) -> str:
        """`file:line in name`, or the built-in's name."""
        return f"built-in reward {self.name}" if self.path is None else f"{self.path}:{self.line} in {self.name}"

    def where_raised(self, tb: TracebackType | None) -> str:
        """As `where`, at the innermost frame inside the user's file."""
        frames = [f for f in traceback.extract_tb(tb) if self.path is not None and f.filename == str(self.path)]
        return f"{self.path}:{frames[-1].lineno} in {frames[-1].name}" if frames else self.where


def check_reward(function: str, style: Style, kwargs: Mapping[str, Any]) -> None:
    """Check `reward.function` without running anything of it; RewardError saying what is wrong.

    Finds a missing file, a syntax error, a missing function and, where the function is written out in the file,
    parameters that do not fit the calling style.
    """
    path, name = _split(function, style)
    if path is None:
        _check_signature(inspect.signature(BUILT_INS[name]), f"built-in reward {name}", style, kwargs)
        _check_pattern(name, kwargs)
        return
    tree = _parse(path)
    definitions = {node.name: node for node in _top_level(tree) if isinstance(node, ast.FunctionDef)}
    coroutines = [node for node in _top_level(tree) if isinstance(node, ast.AsyncFunctionDef) and node.name == name]
    if coroutines:
        raise RewardError(f"{path}:{coroutines[-1].lineno} in {name}: async functions are not supported; make it plain")
    if name in definitions:
        node = definitions[name]
        if not node.decorator_list:  # a decorator may change the signature: the worker checks the real one
            _check_signature(_signature_of(node.args), f"{path}:{node.lineno} in {name}", style, kwargs)
    elif name not in _other_names(tree):
        raise _missing_function(path, name, list(definitions))


def load_reward(function: str, style: Style, kwargs: Mapping[str, Any]) -> LoadedReward:
    """Import the user's file and return the function; RewardError saying what is wrong."""
    path, name = _split(function, style)
    if path is None:
        reward = LoadedReward(BUILT_INS[name], name, None, 0)
    else:
        tree = _parse(path)
        module = _import(path)
        call = vars(module).get(name)
        if not callable(call):
            raise _missing_function(path, name, [n.name for n in _top_level(tree) if isinstance(n, ast.FunctionDef)])
        lines = [node.lineno for node in _top_level(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        reward = LoadedReward(call, name, path, lines[-1] if lines else 1)
    try:
        signature = inspect.signature(reward.call)
    except (TypeError, ValueError):
        return reward  # a callable written in C may not say
    _check_signature(signature, reward.where, style, kwargs)
    return reward


def accepted_parameters(reward: LoadedReward) -> frozenset[str] | None:
    """Names that the function takes by keyword; None where it takes any (`**kwargs`)."""
    try:
        parameters = inspect.signature(reward.call).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _split(function: str, style: Style) -> tuple[Path | None, str]:
    """(file, name), or (None, name) for a built-in."""
    file, colon, name = function.rpartition(":")
    if not colon:
        if function not in BUILT_INS:
            raise RewardError(
                f"reward.function {function!r} is neither path/to/file.py:function nor a built-in "
                f"({', '.join(BUILT_INS)}); correct it"
            )
        if style != "sample":
            raise RewardError(f"built-in reward {function} scores samples one by one; set reward.style=sample")
        return None, function
    if not name.isidentifier():
        raise RewardError(f"reward.function {function!r} must end in a function name: path/to/file.py:function")
    path = Path(file).resolve()
    if not path.exists():
        raise RewardError(f"reward file {file!r} does not exist; correct reward.function={function}")
    if not path.is_file() or path.suffix != ".py":
        raise RewardError(f"reward file {file!r} is not a regular file that ends in .py; correct reward.function")
    return path, name


def _check_pattern(name: str, kwargs: Mapping[str, Any]) -> None:
    pattern = kwargs.get("pattern")
    if name != "regex_match" or pattern is None:
        return
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RewardError(f"reward.kwargs.pattern={pattern!r} is no regular expression ({error}); correct it") from None


def _parse(path: Path) -> ast.Module:
    try:
        source = path.read_bytes()
        compile(source, str(path), "exec", dont_inherit=True)  # finds what parsing does not: a stray return
        return ast.parse(source, filename=str(path))
    except SyntaxError as error:
        raise RewardError(f"{path}:{error.lineno or 1}: {error.msg}; correct the reward file") from error
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "nested too deeply"
        raise RewardError(f"{path}: {reason}; correct the reward file") from error
    except OSError as error:
        raise RewardError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from error


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("mrl_user_reward", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is the message
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        at = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise RewardError(f"{at}: {describe(error)}; the reward file fails on import", traceback.format_exc()) from None
    return module


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that run at module level, those inside if, try and with included."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level(node)


def _other_names(tree: ast.Module) -> set[str]:
    """Names that module-level code binds other than by `def`; every name at all where it imports `*`."""
    names: set[str] = set()
    for node in _top_level(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
    return _Everything() if "*" in names else names


class _Everything(set[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _missing_function(path: Path, name: str, functions: list[str]) -> RewardError:
    known = ", ".join(functions) or "none"
    return RewardError(f"{path} has no function {name!r} (functions there: {known}); correct reward.function")


def _signature_of(args: ast.arguments) -> inspect.Signature:
    """The signature of a `def`, with every default shown as ... ."""
    kind = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    with_default = len(positional) - len(args.defaults)
    parameters = []
    for i, a in enumerate(positional):
        how = kind.POSITIONAL_ONLY if i < len(args.posonlyargs) else kind.POSITIONAL_OR_KEYWORD
        parameters.append(kind(a.arg, how, default=kind.empty if i < with_default else ...))
    if args.vararg:
        parameters.append(kind(args.vararg.arg, kind.VAR_POSITIONAL))
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(kind(a.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...))
    if args.kwarg:
        parameters.append(kind(args.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _check_signature(signature: inspect.Signature, where: str, style: Style, kwargs: Mapping[str, Any]) -> None:
    """The function must take what mrl passes by keyword, and need nothing else.

    Batch style passes the data's columns too, which only the rows know: what else it needs is checked at the call.
    """
    passed = SAMPLE_PARAMETERS if style == "sample" else BATCH_PARAMETERS
    clash = sorted(set(kwargs) & set(passed))
    if clash:
        raise RewardError(f"reward.kwargs sets {', '.join(clash)}, which mrl itself passes; remove it there")
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        lacking = [name for name in (*passed, *kwargs) if name not in by_keyword]
        if lacking:
            raise RewardError(
                f"{where} does not take {', '.join(lacking)}; reward.style={style} passes {', '.join(passed)} "
                "and reward.kwargs by name"
            )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    unknown = [name for name in needed if name not in passed and name not in kwargs]
    if style == "sample" and unknown:
        raise RewardError(f"{where} needs {', '.join(unknown)}, which mrl does not pass; give it in reward.kwargs")


def describe(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
