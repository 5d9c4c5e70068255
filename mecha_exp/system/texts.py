"""Values as texts and as hashes that are the same on every system."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable
from typing import Any


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as the text of a CSV file, whose first row has the names of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def json_hash(value: Any, **options: Any) -> str:
    """The SHA-256 of a value in JSON, in hexadecimal; options as for `json.dumps`."""
    return hashlib.sha256(json.dumps(value, **options).encode()).hexdigest()
