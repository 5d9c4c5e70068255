"""The sentences below the table of a sweep."""

from __future__ import annotations

from mecha_exp.report.results import Results
from mecha_exp.report.search.notes import search_notes
from mecha_exp.report.why.factors import factor_notes
from mecha_exp.report.why.shapley import shapley_notes


def notes_of(results: Results) -> list[str]:
    """What the experts, the blocks and the trials of a sweep show, then the remarks on it and its points."""
    return [*factor_notes(results), *shapley_notes(results), *search_notes(results), *results.notes]
