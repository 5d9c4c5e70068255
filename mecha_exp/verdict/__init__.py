"""The verdict of a sweep: which point is chosen, how good it is, and what the data can tell apart.

`conclude` makes a `Verdict` of `Candidate`s, which are measured models with their outcomes by example.
`sentence` puts it into words, `as_json` into `verdict.json`.
docs/verdict.md says what each number means and on which assumptions it rests.
"""

from mecha_exp.verdict.candidates import Candidate
from mecha_exp.verdict.choice import pareto_front
from mecha_exp.verdict.conclusion import conclude
from mecha_exp.verdict.intervals import Estimate
from mecha_exp.verdict.normalisation import Normalised
from mecha_exp.verdict.result import Column, Comparison, Cost, Score, Verdict, as_json
from mecha_exp.verdict.sentences import sentence

__all__ = [
    "Candidate",
    "Column",
    "Comparison",
    "Cost",
    "Estimate",
    "Normalised",
    "Score",
    "Verdict",
    "as_json",
    "conclude",
    "pareto_front",
    "sentence",
]
