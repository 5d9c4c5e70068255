"""What was measured of a model, in its model card."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from mecha_exp.checkpoint.sidecars import CARD, is_own_card
from mecha_exp.publishing.card import with_results
from mecha_exp.report.protocol import MERGE_PREFIXES
from mecha_exp.runs.record import RACE, Record
from mecha_exp.system.atomic_write import replace_text

log = logging.getLogger(__name__)


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
        text = with_results(card.read_text(encoding="utf-8"), list(_lines(record, verdict)))
        replace_text(card, text, newline="\n")
    except OSError as error:
        log.warning("%s: the results cannot be written into it: %s.", card, error.strerror)


def _lines(record: Record, verdict: Sequence[str]) -> Iterator[str]:
    measured = {
        name: value for name, value in record.metrics.items() if not name.startswith((*MERGE_PREFIXES, RACE))
    }
    if measured:
        yield "| metric | value | unit |\n| --- | --- | --- |"
        for name, value in measured.items():
            marked = f"**{name}**" if name == record.metric else name
            yield f"| {marked} | {value:.6g} | {record.units.get(name, '')} |"
    if verdict:
        yield f"\nThe point `{record.name}` of a sweep, whose verdict is:\n"
        yield from (f"- {sentence}" for sentence in verdict)
