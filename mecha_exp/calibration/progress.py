"""What a calibration has measured so far, in a folder beside its output: the next one goes on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mecha_exp.calibration.collectors import Collector
from mecha_exp.documents import parse_json, typed
from mecha_exp.sources.statistics.header import ACTIVATIONS, GRAM
from mecha_exp.system.atomic_write import atomic_write, atomic_write_text

_RUNNING = "running.safetensors"
_REQUEST = "request.json"
Place = tuple[Path, tuple[int, ...]]
"""The file of a finished statistic, and its shape."""


class Partial:
    """The finished groups of statistics, and the sums of the running one.

    Leaving the block without an error removes the folder. What another request has left is removed.

    Args:
        output: the file that is made.
        request: all that decides its content, as text.

    Attributes:
        rows: of the Gram matrices and activations of finished groups, for the header.
        places: of the finished statistics, by name.
    """

    def __init__(self, output: Path, request: str) -> None:
        self.folder = output.with_name(f".{output.name}.calibration")
        self.rows: dict[str, int] = {}
        self.places: dict[str, Place] = {}
        self._request = request

    def __enter__(self) -> Partial:
        kept = self.folder / _REQUEST
        if not kept.is_file() or kept.read_text(encoding="utf-8").strip() != self._request:
            shutil.rmtree(self.folder, ignore_errors=True)
            atomic_write_text(kept, self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def has(self, group: int) -> bool:
        """Whether a group is finished; its statistics are in `places` then."""
        path = self._path(group)
        if not path.is_file():
            return False
        with safe_open(path, framework="pt") as file:
            self.rows |= typed(parse_json(file.metadata()["rows"]), dict[str, int])
            self.places |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}
        return True

    def finish(self, group: int, collectors: Sequence[Collector], examples: int) -> None:
        """Keep the statistics of a group."""
        rows = {
            c.key if c.kind == GRAM else c.name: c.rows for c in collectors if c.kind in (GRAM, ACTIVATIONS)
        }
        tensors = {collector.name: collector.result(examples) for collector in collectors}
        with atomic_write(self._path(group)) as temporary:
            save_file(tensors, temporary, {"rows": json.dumps(rows)})
        (self.folder / _RUNNING).unlink(missing_ok=True)
        self.has(group)

    def save(self, group: int, collectors: Sequence[Collector], done: int) -> None:
        """Keep the sums of a group over the first `done` examples."""
        tensors = {collector.name: collector.so_far() for collector in collectors}
        rows = {collector.name: collector.rows for collector in collectors}
        metadata = {"group": str(group), "done": str(done), "rows": json.dumps(rows)}
        with atomic_write(self.folder / _RUNNING) as temporary:
            save_file(tensors, temporary, metadata)

    def resume(self, group: int, collectors: Sequence[Collector]) -> int:
        """Give a group the sums that were kept, or zeros; returns how many examples are in them."""
        for collector in collectors:
            collector.start()
        path = self.folder / _RUNNING
        if not path.is_file():
            return 0
        with safe_open(path, framework="pt") as file:
            kept: Mapping[str, str] = file.metadata()
            if kept["group"] != str(group):
                return 0
            rows = typed(parse_json(kept["rows"]), dict[str, int])
            for collector in collectors:
                collector.total, collector.rows = file.get_tensor(collector.name), rows[collector.name]
            return int(kept["done"])

    def read(self, name: str) -> Tensor:
        """A finished statistic."""
        with safe_open(self.places[name][0], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _path(self, group: int) -> Path:
        return self.folder / f"group-{group}.safetensors"
