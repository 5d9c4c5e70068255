"""Tables as comma-separated values, with the same line ends on every system."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as the text of a CSV file, whose first row has the names of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
