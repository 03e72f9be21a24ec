"""A table of named functions that users extend with a decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

F = TypeVar("F")


class Registry(Mapping[str, F], Generic[F]):
    """Name -> function. `kind` is what an error calls the entries, e.g. "advantage estimator"."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that adds a function under `name`; a name that is taken raises ValueError."""

        def add(function: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is already registered; choose another name")
            self._entries[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        if name not in self._entries:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
