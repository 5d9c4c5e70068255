"""What an evaluator may know of the model that it measures; measurements in parts, with progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mecha_exp.documents import DocumentError, parse_json, typed
from mecha_exp.errors import EvaluationError

Report = Callable[[str, int, int], None]
"""Called with what is counted, how many of them are measured, and how many there are."""
Part = TypeVar("Part")


@dataclass(frozen=True)
class Context:
    """The point that is measured, for an evaluator with a parameter named `context`.

    Numbers are stored by the point's signature: they may depend on the inputs, the hyperparameters and the
    seed, which the signature covers, and not on the name or the folder.

    Attributes:
        name: of the point's folder, or of an input.
        hyperparameters: of the recipe, by name; empty for an input.
        seed: of the recipe's random numbers; None if it draws none, and for an input.
        folder: where files about the point may be written; None for an input.
        inputs: the files or folders of the models that were merged, by their names in tables, in the order
            of the recipe: a saved model has the configuration and the tokenizer of the first. Of an input its
            own comes first, then the others.
        offline: whether nothing may be downloaded.
        devices: for the check of an evaluator, the device of each worker that measures at the same time: an
            empty name is the evaluator's own. Empty without workers.
        kept: the file in which `in_parts` keeps what is measured until all of it is; None keeps nothing.
        among: which examples are measured; empty for all. What is kept of some is recalled for these alone.
        report: shows progress.
    """

    name: str = ""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    folder: Path | None = None
    inputs: Mapping[str, Path] = field(default_factory=dict)
    offline: bool = True
    devices: tuple[str, ...] = ()
    kept: Path | None = None
    among: str = ""
    report: Report | None = field(default=None, compare=False, repr=False)
    _whole: set[tuple[str, int]] = field(default_factory=set, init=False, compare=False, repr=False)

    def in_parts(
        self,
        work: str,
        parts: Sequence[Part],
        measure: Callable[[Part], Sequence[float]],
        count: Callable[[Part], int] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[list[float]]:
        """Measure parts one after another, with progress; what an interrupted start has measured is recalled.

        The results of a part must depend on that part, the model and the parameters alone: a start that
        goes on measures the parts that are left, and they must be what they would have been.

        Args:
            work: what the parts consist of, such as `documents`; another word for each kind of parts.
            parts: the batches of examples, in an order that is the same in each start.
            measure: returns the numbers of a part, which are kept as float64.
            count: the examples in a part; by default its length.
            names: of the parts, where what is measured of one is the same whichever others there are, bit for
                bit: what a race has measured of some examples is then recalled when all are measured.

        Returns:
            the numbers of each part.

        Raises:
            EvaluationError: parts of the same name and number were measured before: their numbers would be
                taken for those of these.
        """
        if self.kept is not None and (work, len(parts)) in self._whole:
            raise EvaluationError(
                f"context.in_parts('{work}', ...) is called twice for one model: name each kind of parts by "
                f"a word of its own, such as '{work} of TASK'."
            )
        marks = [self._mark(number, len(parts), names) for number in range(len(parts))]
        earlier = _read(self.kept, work)
        kept = {number: earlier[_key(mark)] for number, mark in enumerate(marks) if _key(mark) in earlier}
        counts = [count(part) if count else len(part) for part in parts]  # type: ignore[arg-type]
        done, total = sum(counts[number] for number in kept), sum(counts)
        self.show(work, done, total)
        for number, part in enumerate(parts):
            if number not in kept:
                kept[number] = [float(value) for value in measure(part)]
                _append(self.kept, {"work": work, **marks[number], "values": kept[number]})
                done += counts[number]
                self.show(work, done, total)
        self._whole.add((work, len(parts)))
        return [kept[number] for number in range(len(parts))]

    def _mark(self, number: int, parts: int, names: Sequence[str] | None) -> dict[str, Any]:
        """What tells a part from others of the same work."""
        if names is not None:
            return {"name": names[number]}
        return {"of": parts, "part": number, **({"among": self.among} if self.among else {})}

    def show(self, work: str, done: int, total: int) -> None:
        """Show how many of all examples are measured; `in_parts` does it by itself."""
        if self.report:
            self.report(work, done, total)

    def without_report(self) -> Context:
        """The context for another process."""
        return replace(self, report=None)


def _key(mark: Mapping[str, Any]) -> str:
    return json.dumps(mark, sort_keys=True)


def _read(file: Path | None, work: str) -> dict[str, list[float]]:
    """The numbers of each part that is kept, by what tells it; lines that a kill has cut are left out."""
    kept: dict[str, list[float]] = {}
    if file is None or not file.is_file():
        return kept
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(DocumentError, KeyError):
            entry = typed(parse_json(line), dict[str, Any])
            values = typed(entry.pop("values"), list[float])
            if entry.pop("work") == work:
                kept[_key(entry)] = values
    return kept


def _append(file: Path | None, entry: Mapping[str, Any]) -> None:
    """Keep the numbers of a part. Where that fails, they are measured again after an interrupt."""
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(entry) + "\n")
