"""Sinks of merged models: a file, a dictionary in memory, or a function."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch

from mecha_exp.checkpoint import Note, torch_dtype
from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.positional import FileRegion, parts_of

Receiver: TypeAlias = Callable[[str, torch.Tensor], object]
"""A function that is given a key and its whole tensor."""


class Sink(Protocol):
    """Takes tiles of flattened tensors in any order, from any thread."""

    @property
    def finished(self) -> Mapping[str, Note]:
        """The keys that an interrupted run has left here complete, with its notes."""

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of a key, in the key's dtype."""

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        """Bytes from `start` on of a key."""

    def write_together(self, counts: Mapping[str, int], values: torch.Tensor) -> None:
        """All elements of several keys, one after another; `counts` has how many each has."""
        for key, part in parts_of(values, counts):
            self.write(key, 0, part)

    def writing_at(self, key: str) -> AbstractContextManager[FileRegion | None]:
        """The region of a key in a file, which machine code writes to meanwhile; None where it cannot."""

    def advance(self, key: str, nbytes: int) -> None:
        """Count bytes of a key that machine code has written to its region."""

    def finish(self, key: str, note: Note) -> None:
        """Record that a key is complete; `note` is kept with it."""

    def finish_together(self, notes: Mapping[str, Note]) -> None:
        """Record that several keys are complete, each with its note."""
        for key, note in notes.items():
            self.finish(key, note)

    def commit(self) -> object:
        """All has been written: make the result appear."""

    def abort(self) -> None:
        """Leave no trace."""

    def suspend(self) -> None:
        """Leave what a later run can go on with."""


class _Placeless(Sink):
    """A sink without a file: machine code cannot write into it, and nothing is left to resume."""

    finished: Mapping[str, Note] = MappingProxyType({})

    def writing_at(self, key: str) -> AbstractContextManager[None]:
        return nullcontext()

    def advance(self, key: str, nbytes: int) -> None:
        pass

    def finish(self, key: str, note: Note) -> None:
        pass


class NoSink(_Placeless):
    """The sink of a job that only asks for numbers about its model."""

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        pass

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        pass

    def commit(self) -> None:
        pass

    abort = suspend = commit


class _TensorSink(_Placeless):
    """A sink whose keys are filled in tensors."""

    @abstractmethod
    def _tensor(self, key: str) -> torch.Tensor:
        """The tensor of a key, which tiles are written into."""

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        self._tensor(key).view(-1)[start : start + values.numel()] = values

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        raw = self._tensor(key).view(-1).view(torch.uint8)
        raw[start : start + len(data)] = torch.frombuffer(data, dtype=torch.uint8)


class MemorySink(_TensorSink):
    """Fills a dictionary that the caller owns; the tensors are there when all has been written."""

    def __init__(self, target: dict[str, torch.Tensor], layout: Layout) -> None:
        self._target = target
        self._tensors = {
            key: torch.empty(shape, dtype=torch_dtype(dtype)) for key, (dtype, shape) in layout.items()
        }

    def commit(self) -> None:
        self._target.update(self._tensors)

    def abort(self) -> None:
        self._tensors.clear()

    suspend = abort

    def _tensor(self, key: str) -> torch.Tensor:
        return self._tensors[key]


class ReceiverSink(_TensorSink):
    """Gives each tensor to a function when it is complete, and keeps none: the model is never held entire.

    What the function raises ends the merge.
    """

    def __init__(self, receiver: Receiver, layout: Layout) -> None:
        self._receiver = receiver
        self._layout = layout
        self._begun: dict[str, torch.Tensor] = {}
        self._delivered: set[str] = set()
        self._lock = threading.Lock()
        self._receiving = threading.Lock()

    def finish(self, key: str, note: Note) -> None:
        with self._receiving:
            self._delivered.add(key)
            self._receiver(key, self._tensor(key))
            del self._begun[key]

    def commit(self) -> None:
        for key in self._layout:
            if key not in self._delivered:  # there was nothing to write
                self.finish(key, {})

    def abort(self) -> None:
        self._begun.clear()

    suspend = abort

    def _tensor(self, key: str) -> torch.Tensor:
        with self._lock:
            if key not in self._begun:
                dtype, shape = self._layout[key]
                with torch.inference_mode(False):  # the caller may change it
                    self._begun[key] = torch.empty(shape, dtype=torch_dtype(dtype))
            return self._begun[key]
