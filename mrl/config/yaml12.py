"""YAML as mrl reads and writes it: the core schema of YAML 1.2, strict.

Against PyYAML's defaults: `1e-6` is a float, `yes`/`on`/`12:30`/`2024-01-01` are text, keys must be text and unique,
aliases may not contain themselves, and every key's line is kept for error texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map"))
_RESOLVERS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), [*"-+0123456789"]),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        [*"-+.0123456789"],
    ),
)


MAX_NODES = 100_000
"""Values a document may hold once its aliases are expanded; more is an attack or an accident."""


class _TooManyAliasesError(Exception):
    """Raised inside `parse` only."""


class _Loader(yaml.SafeLoader):
    """SafeLoader whose plain scalars follow the core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes exactly what _Loader would read as something else than text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    """PyYAML writes Unicode's other line breaks raw and reads them back changed; double quotes escape them."""
    style = '"' if set(text) & set("\r\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _kind, _pattern, _first)


@dataclass
class Document:
    """A parsed document. lines: 1-based line of each dotted key. faults: what is wrong, one line each.

    complete: False where a value could not be read, so that its key is not known to be wrong. nodes: values read.
    """

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    complete: bool = True
    nodes: int = 0


def parse(text: str, name: str) -> Document:
    """Parse one YAML document; `name` stands before the line number in faults."""
    document = Document()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            document.value = _construct(loader, node, "", (), document, name)
    except _TooManyAliasesError:
        document.faults.append(f"{name}: its aliases expand to more than {MAX_NODES} values; write them out")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        document.faults.append(f"{where}: not valid YAML ({error.problem or error.context}); correct the line")
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        document.faults.append(f"{name}: not valid YAML ({reason}); correct it")
    return document


def dump(value: Any) -> str:
    """Block-style YAML of plain data, in the given key order; `parse` reads the same value back."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000))


def inline(value: Any) -> str:
    """One line of YAML (flow style), for error texts."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000, default_flow_style=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _construct(
    loader: _Loader, node: yaml.Node, prefix: str, above: tuple[int, ...], document: Document, name: str
) -> Any:
    if id(node) in above:
        return _lost(document, f"{name}:{node.start_mark.line + 1}: an alias contains itself; write the value out")
    above = (*above, id(node))
    document.nodes += 1
    if document.nodes > MAX_NODES:
        raise _TooManyAliasesError
    if node.tag not in _TAGS:
        return _lost(document, f"{name}:{node.start_mark.line + 1}: the tag {node.tag} is refused; write plain YAML")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{prefix}[{i}]", above, document, name) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node, document, name)
    value: dict[str, Any] = {}
    first_line: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag != f"{_TAG}str" or not isinstance(key_node, yaml.ScalarNode):
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            _lost(document, f"{name}:{line}: the key {shown} is not text; quote it or rename it")
            continue
        key = key_node.value
        if key == "<<":
            _lost(document, f"{name}:{line}: merge keys (<<) are not supported; write the keys out")
            continue
        if fault := text_fault(key):
            _lost(document, f"{name}:{line}: {fault}")
            continue
        if "." in key:
            document.faults.append(f"{name}:{line}: the key {key} holds a dot; in a file, nest it under its section")
            continue
        dotted = f"{prefix}.{key}" if prefix else key
        if key in value:
            document.faults.append(
                f"{name}:{line}: duplicate key {dotted}, first set on line {first_line[key]}; remove one"
            )
            continue
        first_line[key] = line
        document.lines.setdefault(dotted, line)
        value[key] = _construct(loader, value_node, dotted, above, document, name)
    return value


def _scalar(loader: _Loader, node: yaml.Node, document: Document, name: str) -> Any:
    where = f"{name}:{node.start_mark.line + 1}"
    try:
        if node.tag == f"{_TAG}int":
            return int(node.value, 0) if node.value[:2] in ("0o", "0x") else int(node.value)
        value = loader.construct_object(node)
    except (ValueError, KeyError):  # a tag that its value does not fit, or an integer of thousands of digits
        kind = node.tag.removeprefix(_TAG)
        return _lost(document, f"{where}: {str(node.value)[:40]!r} is no {kind}; correct the value")
    if isinstance(value, str) and (fault := text_fault(value)):
        return _lost(document, f"{where}: {fault}")
    return value


def text_fault(text: str) -> str | None:
    """What makes a text unfit for a configuration: it could be neither written nor shown."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        return f"the text {text!r} has a lone surrogate, which is no character; remove it"
    if "\0" in text:
        return f"the text {text!r} has a NUL character; remove it"
    return None


def _lost(document: Document, fault: str) -> None:
    document.faults.append(fault)
    document.complete = False
