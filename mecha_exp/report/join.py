"""Join several sweeps, so that their points stand in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mecha_exp.report.results import METHOD_KEYS, Results
from mecha_exp.runs.record import Record
from mecha_exp.runs.values import as_text

SWEEP_KEY, METHOD = "sweep", "method"


def joined(sweeps: Sequence[Results], names: Sequence[str]) -> Results:
    """The points of several sweeps as one, with the sweep and the keys that any of them varied as columns.

    If a sweep did not vary a key, its values are the hyperparameters of its points.

    Args:
        sweeps: two or more.
        names: of the sweeps' folders, used if two sweeps have the same title.
    """
    titles = [sweep.title for sweep in sweeps]
    labels = titles if len(set(titles)) == len(titles) else list(names)
    keys = list(dict.fromkeys(key for sweep in sweeps for key in sweep.swept))
    methods = {
        str(r.parameters[METHOD]) for sweep in sweeps for r in sweep.finished if METHOD in r.parameters
    }
    if len(methods) > 1 and not set(keys) & set(METHOD_KEYS):
        keys.insert(0, METHOD)
    differing = _differing(sweeps)
    records = [
        _placed(sweep, record, name, keys, differing)
        for sweep, name in zip(sweeps, labels, strict=True)
        for record in sweep.records
    ]
    return Results(" + ".join(labels), [SWEEP_KEY, *keys], records)


def _placed(sweep: Results, record: Record, name: str, keys: Sequence[str], differing: set[str]) -> Record:
    """A copy of a point whose overrides are its sweep and its value of each key."""
    values = {key: sweep.text(record, key) or as_text(record.parameters.get(key)) for key in keys}
    settings = [f"{SWEEP_KEY}={name}", *(f"{key}={text}" for key, text in values.items() if text)]
    references = {
        f"{n} ({name})" if n in differing else n: measured for n, measured in record.references.items()
    }
    return replace(record, overrides=settings, references=references)


def _differing(sweeps: Sequence[Results]) -> set[str]:
    """The names of inputs whose metrics differ between sweeps: different inputs with the same name."""
    inputs = [sweep.references for sweep in sweeps]
    names = {name for references in inputs for name in references}
    return {name for name in names if len({str(r[name]) for r in inputs if name in r}) > 1}
