"""From a YAML file and dotted overrides to a RunConfig, with everything that is wrong reported at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mrl.config import yaml12
from mrl.config.schema import RunConfig, Section

STAND_INS: Mapping[str, Any] = {
    "model.path": "?",
    "reward.function": "?",
    "data.train_files": "?",
    "trainer.total_steps": 1,
}
"""Values for required keys that are missing or wrong, only so that the other rules can still be checked."""


class ConfigError(ValueError):
    """A configuration that cannot run. violations: every one of them, each a line naming key, value and way out."""

    def __init__(self, violations: Sequence[str]) -> None:
        # A value in them may hold a line break; a violation is one line.
        self.violations = [violation.replace("\n", "\\n") for violation in violations]
        super().__init__("\n".join(self.violations))


@dataclass(frozen=True)
class ParsedConfig:
    """What was read. config: with defaults in place of broken keys; None where not even that could be built.

    violations: empty exactly where config is what the user wrote. broken: dotted keys that were replaced by defaults.
    """

    config: RunConfig | None
    violations: list[str]
    broken: frozenset[str]

    def concerns_broken_key(self, violation: str) -> bool:
        """Whether a rule's finding names a key whose real value is unknown: then it may be a mere consequence."""
        return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", violation) for key in self.broken)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated configuration; raises ConfigError holding every violation of file and overrides.

    overrides: `section.key=value`, the value in YAML (`null`, `[a, b]`, `1e-6`); a later one wins.
    """
    parsed = parse_config(path, overrides)
    if parsed.violations:
        raise ConfigError(parsed.violations)
    assert parsed.config is not None
    return parsed.config


def parse_config(path: str | Path, overrides: Sequence[str] = ()) -> ParsedConfig:
    """As load_config, but returns the violations, so that the rules of mrl.config.rules can add theirs."""
    document = _read(Path(path))
    violations = list(document.faults)
    if document.value is None and not violations:
        document.value = {}
    if not isinstance(document.value, dict):
        if document.complete and not violations:
            violations.append(f"{path}: holds {_show(document.value)}, not sections of keys; see configs/ for examples")
        return ParsedConfig(None, violations, frozenset())
    if not document.complete:
        return ParsedConfig(None, violations, frozenset())
    raw: dict[str, Any] = document.value
    sources = {key: f"{path}:{line}: " for key, line in document.lines.items()}
    for override in overrides:
        violations += _override(raw, override, sources)
    return _validate(raw, sources, violations)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; load_config reads an equal one back."""
    return yaml12.dump(config.model_dump(mode="json"))


def leaf_keys() -> list[str]:
    """Every valid dotted key, in schema order."""
    return list(_leaves(RunConfig, ""))


def _read(path: Path) -> yaml12.Document:
    try:
        if path.exists() and not path.is_file():
            return yaml12.Document(faults=[f"config file {path} cannot be read (not a regular file); give a YAML file"])
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return yaml12.Document(faults=[f"config file {path} does not exist; correct its path"])
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        return yaml12.Document(faults=[f"config file {path} cannot be read ({reason}); give a YAML file"])
    return yaml12.parse(text, str(path))


def _override(raw: dict[str, Any], override: str, sources: dict[str, str]) -> list[str]:
    """Apply one `a.b=c` to raw in place; returns what is wrong with it."""
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        return [f"override {override!r} is not of the form section.key=value; for example trainer.total_steps=10"]
    if fault := yaml12.text_fault(key):
        return [f"override: {fault}"]
    if not text.strip():
        return [f"override {override!r} has no value; write {key}=null for none or {key}='\"\"' for empty text"]
    document = yaml12.parse(text, f"override {key}")
    if document.faults:
        return document.faults
    target = raw
    for depth, part in enumerate(parts[:-1], start=1):
        if target.get(part) is None:
            target[part] = {}
        if not isinstance(target[part], dict):
            upper = ".".join(parts[:depth])
            return [f"override {override!r}: {upper} is the value {_show(target[part])}, not a section; set {upper}"]
        target = target[part]
    target[parts[-1]] = document.value
    for known in [k for k in sources if k == key or k.startswith(f"{key}.")]:
        del sources[known]
    return []


def _validate(raw: dict[str, Any], sources: Mapping[str, str], violations: list[str]) -> ParsedConfig:
    broken: set[str] = set()
    unknown: set[str] = set()
    for _ in range(8):  # a repaired section may show the faults inside it
        try:
            # JSON mode: lists stand for tuples, integers for floats, and nothing else is converted.
            config = RunConfig.model_validate_json(json.dumps(raw))
        except ValidationError as error:
            found: dict[str, list[ErrorDetails]] = {}
            for details in error.errors(include_url=False, include_context=True):
                found.setdefault(_key_of(details), []).append(details)
            for key, faults in found.items():
                if key not in broken:
                    violations.append(sources.get(key, "") + _describe(key, faults))
                if faults[0]["type"] == "extra_forbidden":
                    unknown.add(key)
                _repair(raw, key)
            if broken >= set(found):
                break
            broken |= set(found)
        else:
            return ParsedConfig(config, violations, frozenset(broken - unknown))
    return ParsedConfig(None, violations, frozenset(broken))


def _repair(raw: dict[str, Any], key: str) -> None:
    """Drop the key, so that its default holds, or put a stand-in where there is none."""
    *above, last = key.split(".")
    target = raw
    for part in above:
        target = target.setdefault(part, {})
    target.pop(last, None)
    for required, value in STAND_INS.items():
        if required == key or required.startswith(f"{key}."):
            section, name = required.split(".")
            raw.setdefault(section, {}).setdefault(name, value)


def _leaves(section: type[Section], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = _section(info.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from _leaves(inner, f"{prefix}{name}.")


def _section(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _field(key: str) -> Any:
    """Annotation of a dotted key."""
    section: type[Section] = RunConfig
    annotation: Any = RunConfig
    for part in key.split("."):
        annotation = section.model_fields[part].annotation
        section = _section(annotation) or section
    return annotation


def _key_of(details: ErrorDetails) -> str:
    """Dotted key of an error: its location up to the schema's leaf (the rest is the inside of the value)."""
    section: type[Section] | None = RunConfig
    parts: list[str] = []
    for part in details["loc"]:
        if section is None:
            break
        parts.append(str(part))
        info = section.model_fields.get(str(part))
        section = _section(info.annotation) if info is not None else None
    return ".".join(parts)


def _describe(key: str, faults: Sequence[ErrorDetails]) -> str:
    first = faults[0]
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown(key, first["input"])
    depth = key.count(".") + 1
    if kind == "missing" and len(first["loc"]) == depth:
        return f"{key} is required; set it in the config file or on the command line"
    shown = f"{key}={_show(first['input'])}"
    if _section(_field(key)) is not None:
        return f"{shown} must be a section of keys ({_keys_of(key)}); give keys or leave it out"
    if first["input"] == "" and any(fault["type"] == "string_too_short" for fault in faults):
        return f"{key} is empty; give a value or leave it out"
    wanted = [_wanted(fault) for fault in faults]
    inside = "".join(f"[{p}]" for p in first["loc"][depth:] if isinstance(p, int))
    if len(faults) > 1 and not all(isinstance(f["loc"][-1], int) for f in faults):
        wanted = [f"must be {_type_text(_field(key))}"]
    elif kind == "missing":
        wanted = [f"must have {len(get_args(_field(key)))} entries"]
    elif inside:
        shown = f"{key}{inside}={_show(first['input'])}"
    none = ", or null" if type(None) in get_args(_field(key)) else ""
    return f"{shown} {' and '.join(dict.fromkeys(wanted))}{none}"


def _wanted(fault: ErrorDetails) -> str:
    """What a value has to be, for a pydantic error type."""
    bounds = fault.get("ctx", {})
    match fault["type"]:
        case "greater_than":
            return f"must be > {bounds['gt']:g}"
        case "greater_than_equal":
            return f"must be >= {bounds['ge']:g}"
        case "less_than":
            return f"must be < {bounds['lt']:g}"
        case "less_than_equal":
            return f"must be <= {bounds['le']:g}"
        case "literal_error":
            return f"is not one of {bounds['expected'].replace(chr(39), '')}"
        case "int_type" | "int_from_float" | "int_parsing":
            return "must be an integer"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "finite_number":
            return "must be a finite number"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
        case "string_too_short":
            return "is empty; give text"
        case "string_type":
            return "must be text"
        case "list_type" | "tuple_type":
            return "must be a list"
        case "dict_type":
            return "must be a mapping"
        case "too_short" | "too_long":
            return f"has {bounds['actual_length']} entries; give {bounds.get('min_length', bounds.get('max_length'))}"
        case _:
            return f"is refused: {fault['msg']}"


def _type_text(annotation: Any) -> str:
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
    if get_origin(annotation) is Annotated:
        return _type_text(get_args(annotation)[0])
    if get_origin(annotation) in (UnionType, Union):
        return " or ".join(_type_text(a) for a in get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        return f"a list of {_type_text(get_args(annotation)[0])}"
    return names.get(annotation, str(annotation))


def _unknown(key: str, value: Any) -> str:
    """An unknown key's line, with the nearest valid names: the same name elsewhere first, then similar spellings."""
    valid = leaf_keys()
    *above, last = key.split(".")
    section = ".".join(above)
    if not above and isinstance(value, dict):
        near = difflib.get_close_matches(key, list(RunConfig.model_fields), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"sections: {', '.join(RunConfig.model_fields)}"
        return f"unknown section {key}; {hint}"
    elsewhere = [k for k in valid if k.rsplit(".", 1)[-1] == last]
    related = [k for k in elsewhere if set(k.split(".")[:-1]) & set(above)]
    siblings = [k for k in valid if k.rpartition(".")[0] == section]
    near = (
        related
        or elsewhere
        or [f"{section}.{n}" if section else n for n in _similar(last, [k.rsplit(".", 1)[-1] for k in siblings])]
        or difflib.get_close_matches(key, valid, n=1, cutoff=0.7)
        or [k for n in _similar(last, [k.rsplit(".", 1)[-1] for k in valid]) for k in valid if k.endswith(f".{n}")]
    )
    hint = f"did you mean {' or '.join(near[:3])}?" if near else f"valid there: {_keys_of(section)}"
    return f"unknown key {key}={_show(value)}; {hint}"


def _similar(name: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, list(dict.fromkeys(names)), n=1, cutoff=0.7)


def _keys_of(section: str) -> str:
    found: type[Section] = RunConfig
    for part in section.split(".") if section else []:
        info = found.model_fields.get(part)
        found = (_section(info.annotation) if info is not None else None) or found
    return ", ".join(found.model_fields)


def _show(value: Any) -> str:
    text = yaml12.inline(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
