"""The sentences on a search that stand below its table."""

from __future__ import annotations

from mecha_exp.report.results import Results
from mecha_exp.report.search.gain import gain_note
from mecha_exp.report.search.importance import importance_note

MODE = "search"
"""The mode of a sweep that searches."""


def search_notes(results: Results) -> list[str]:
    """What a search gained over its trials at random, and which keys decided; none for other sweeps."""
    if results.mode != MODE or results.objectives or results.by or results.chosen:
        return []
    return [note for note in (gain_note(results), importance_note(results)) if note]
