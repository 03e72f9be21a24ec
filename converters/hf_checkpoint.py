"""Reading a HuggingFace safetensors directory, slice by slice and strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from converters.rules.segment import Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers of old checkpoints that are recomputed from config.json."""


class HFCheckpoint:
    """Tensors of a HF directory by name; files are mapped, so only the slices that are read cost memory.

    Raises ValueError naming file and tensor where the directory holds no safetensors, a file is truncated or
    malformed, or index and shards disagree.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._owner: dict[str, str] = {}
        for file_name, listed in self._listed_files().items():
            handle = self._open(file_name)
            held = set(handle.keys())
            for name in sorted(held):
                if name in self._owner:
                    raise ValueError(f"{self.path}: tensor {name} stands in {self._owner[name]} and in {file_name}")
                self._owner[name] = file_name
            if listed is not None and held != listed:
                lost, extra = sorted(listed - held), sorted(held - listed)
                wrong = f"index lists {lost[0]}, which the file lacks" if lost else f"{extra[0]} is not in the index"
                raise ValueError(f"{self.path / file_name}: {wrong}; the checkpoint is incomplete, copy it again")

    def _listed_files(self) -> dict[str, set[str] | None]:
        index_path = self.path / INDEX
        if not index_path.is_file():
            if not (self.path / SINGLE).is_file():
                raise ValueError(
                    f"{self.path}: neither {SINGLE} nor {INDEX}; mrl reads safetensors checkpoints, "
                    "or draws weights itself with model.init=random"
                )
            return {SINGLE: None}
        try:
            weight_map: dict[str, str] = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index_path}: malformed index ({error!r})") from None
        files: dict[str, set[str] | None] = {}
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise ValueError(f"{index_path}: {name} points outside the folder ({file_name!r})")
            names = files.setdefault(file_name, set())
            assert names is not None
            names.add(name)
        return files

    def _open(self, file_name: str) -> Any:
        path = self.path / file_name
        if not path.is_file():
            raise ValueError(f"{path}: listed in {INDEX} but missing; the checkpoint is incomplete, copy it again")
        try:
            handle = safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"{path}: not a valid safetensors file ({error}); copy it again") from None
        self._files[file_name] = handle
        return handle

    @property
    def names(self) -> set[str]:
        return set(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._owner[name]].get_slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        """The given box of a tensor, in the file's dtype."""
        piece = self._files[self._owner[name]].get_slice(name)
        return piece[box.slices]

    def check(self, expected: Mapping[str, tuple[int, ...]], tied_twin: tuple[str, str] | None = None) -> None:
        """Refuse any missing, unexpected or mis-shaped tensor, all of them in one error.

        `tied_twin` (lm_head, embedding): a tied checkpoint may repeat its embedding under the head's name, but only
        with the same bits.
        """
        extra = {n for n in self.names - expected.keys() if not n.endswith(IGNORED_SUFFIXES)}
        if tied_twin and tied_twin[0] in extra:
            head, embedding = (self._whole(n) for n in tied_twin)
            if head.shape != embedding.shape or not head.equal(embedding):
                raise ValueError(
                    f"{self.path}: tie_word_embeddings is true but {tied_twin[0]} differs from {tied_twin[1]}; "
                    "set tie_word_embeddings to false in config.json"
                )
            extra.discard(tied_twin[0])
        problems = [f"missing {n}" for n in expected if n not in self._owner]
        problems += [f"unexpected {n}" for n in sorted(extra)]
        problems += [
            f"{n} has shape {list(self.shape(n))}, config.json implies {list(shape)}"
            for n, shape in expected.items()
            if n in self._owner and self.shape(n) != shape
        ]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"{self.path}: checkpoint does not fit its config.json: {shown}")

    def _whole(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, Box((0,) * len(shape), shape))

    def close(self) -> None:
        for handle in self._files.values():
            handle.__exit__(None, None, None)
        self._files.clear()

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
