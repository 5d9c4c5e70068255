"""What was measured of a model, in its model card."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from mecha_exp.checkpoint.sidecars import CARD, is_own_card
from mecha_exp.evaluation.declaration import MERGE_PREFIXES
from mecha_exp.runs.record import RACE, Record
from mecha_exp.system.atomic_write import replace_text
from mecha_exp.system.texts import markdown_code, markdown_table, markdown_text

log = logging.getLogger(__name__)

_RESULTS = "\n## Results\n"
"""The heading of the last section, which is filled when the model has been measured."""


def note_results(record: Record, verdict: Sequence[str] = ()) -> None:
    """Write the numbers of a point into the card of its model, and the verdict of its sweep.

    A model without a card, or with one of another program, is left as it is.

    Args:
        record: of the point, with the path of its model.
        verdict: sentences about the sweep that the point is part of.
    """
    card = Path(record.model or "") / CARD
    if not record.model or not is_own_card(card):
        return
    try:
        text = _with_results(card.read_text(encoding="utf-8"), list(_lines(record, verdict)))
        replace_text(card, text, newline="\n")
    except OSError as error:
        log.warning("%s: the results cannot be written into it: %s.", card, error.strerror)


def _lines(record: Record, verdict: Sequence[str]) -> Iterator[str]:
    measured = {
        name: value for name, value in record.metrics.items() if not name.startswith((*MERGE_PREFIXES, RACE))
    }
    if measured:
        rows = [["metric", "value", "unit"]]
        for name, value in measured.items():
            marked = f"**{markdown_text(name)}**" if name == record.metric else markdown_text(name)
            rows.append([marked, f"{value:.6g}", markdown_text(record.units.get(name, ""))])
        yield markdown_table(rows)
    if verdict:
        yield f"\nThe point {markdown_code(record.name)} of a sweep, whose verdict is:\n"
        yield from (f"- {markdown_text(sentence)}" for sentence in verdict)


def _with_results(card: str, lines: Sequence[str]) -> str:
    """A card with these lines as its last section; none leave it without one."""
    text = card.partition(_RESULTS)[0]
    return text + _RESULTS + "\n" + "\n".join(lines) + "\n" if lines else text
