"""A paper's table of several sweeps: rows, names, marks by the verdict, LaTeX that compiles."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.report import Results
from mecha_exp.report.paper.table import Part, title_of, verdict_on
from mecha_exp.report.paper.text import Numbers, latex, latex_text, markdown
from mecha_exp.runs.outcomes import INPUT, POINT, ModelOutcomes
from mecha_exp.runs.record import Record

TASKS = ("cars", "sun")


def outcomes(seed: int, **shares: float) -> Outcomes:
    random = np.random.default_rng(seed)
    return Outcomes({task: (random.random(200) < share).astype(float) for task, share in shares.items()})


def part(name: str, shares: dict[str, float], titles: dict[str, str], base: int = 0) -> Part:
    """A sweep over recipes; the share of hits of each, on every task."""
    inputs = {
        "base": outcomes(base, cars=0.3, sun=0.3),
        "cars": outcomes(90, cars=0.95, sun=0.1),
        "sun": outcomes(91, cars=0.1, sun=0.97),
    }
    records, models = [], []
    for number, (recipe, share) in enumerate(shares.items()):
        measured = outcomes(10, cars=share, sun=share)
        record = Record(recipe, overrides=[f"recipe={recipe}"], metric="accuracy", base="base")
        record.metrics, record.parameters = measured.means("accuracy"), {"recipe": recipe}
        record.expert_of = {task: task for task in TASKS}
        record.tags = {"fingerprint/base": str(base)}
        record.evaluations = {"": "accuracy-1"}
        records.append(record)
        models.append(ModelOutcomes(POINT, number, recipe, {"accuracy": {"all": measured}}))
    models += [ModelOutcomes(INPUT, None, n, {"accuracy": {"all": of}}) for n, of in inputs.items()]
    return Part(name, Results(name, ["recipe"], records), models, titles)


SPECTRAL = part("spectral", {"tsv_m": 0.80, "iso_c": 0.79}, {"tsv_m": "TSV-M", "iso_c": "Iso-C"})
SIGNS = part("signs", {"dare_ties": 0.5, "ties": 0.6}, {"dare_ties": "DARE-TIES", "ties": "TIES"})


def rows(text: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in lines}


def test_the_methods_of_all_sweeps_are_rows_below_the_pretrained_and_the_individual_models():
    table = rows(markdown(verdict_on([SPECTRAL, SIGNS])))

    assert list(table) == [
        "Method",
        "---",
        "Pretrained",
        "Individual",
        "TSV-M",
        "Iso-C",
        "TIES",
        "DARE-TIES",
    ]
    assert table["Method"] == ["cars", "sun", "accuracy"]
    individual = [outcomes(90, cars=0.95, sun=0.1).values["cars"].mean()]
    individual += [outcomes(91, cars=0.1, sun=0.97).values["sun"].mean()]
    assert [float(cell) for cell in table["Individual"]] == pytest.approx(
        [*individual, np.mean(individual)], abs=5e-4
    )


def test_the_marks_are_those_of_the_verdict_and_not_of_the_third_digit():
    table = rows(markdown(verdict_on([SPECTRAL, SIGNS])))

    assert all(cell.startswith("**") for cell in table["TSV-M"])
    assert all(cell.startswith("<u>") for cell in table["Iso-C"])  # as good as the data can tell
    assert not any("<" in cell or "*" in cell for name in ("TIES", "Individual") for cell in table[name])


def test_percentages_and_intervals_are_by_choice():
    table = rows(markdown(verdict_on([SPECTRAL]), Numbers(percent=True, intervals=True)))

    number = re.compile(r"(?:\*\*|<u>)?([\d.]+)(?:\*\*|</u>)? \[([\d.]+), ([\d.]+)\]")
    for cell in (*table["TSV-M"], *table["Individual"]):
        value, low, high = map(float, number.fullmatch(cell).groups())
        assert low <= value <= high and value > 50


def test_percentages_of_what_is_not_a_share_are_refused():
    losses = replace(SPECTRAL, models=[twice(model) for model in SPECTRAL.models])

    with pytest.raises(ConfigError, match="expected shares from 0 to 1, and there is"):
        markdown(verdict_on([losses]), Numbers(percent=True))


def twice(model: ModelOutcomes) -> ModelOutcomes:
    of = model.by_metric["accuracy"]["all"]
    doubled = Outcomes({task: 2 * values for task, values in of.values.items()})
    return replace(model, by_metric={"accuracy": {"all": doubled}})


def test_a_method_of_other_inputs_is_told_apart_by_its_sweep():
    other = part("larger", {"tsv_m": 0.9}, {"tsv_m": "TSV-M"}, base=7)

    table = rows(markdown(verdict_on([SPECTRAL, other])))

    assert {"TSV-M (spectral)", "TSV-M (larger)", "Pretrained (spectral)", "Pretrained (larger)"} <= set(
        table
    )
    assert "Iso-C" in table and "Individual" in table  # the experts are the same


def test_sweeps_that_cannot_be_compared_are_refused():
    others = [replace(record, metric="loss") for record in SIGNS.results.records]
    with pytest.raises(ConfigError, match="Name one of both with --metric"):
        verdict_on([SPECTRAL, replace(SIGNS, results=replace(SIGNS.results, records=others))])

    fewer = [
        replace(m, by_metric={"accuracy": {"all": outcomes(1, cars=0.5)}}) if m.role == POINT else m
        for m in SIGNS.models
    ]
    with pytest.raises(ConfigError, match="needs outcomes of the same examples for all of them; it lacks"):
        verdict_on([SPECTRAL, replace(SIGNS, models=fewer)])


def test_recipes_without_a_title_have_their_names_as_words():
    assert title_of("task_arithmetic", {}) == "Task arithmetic"
    assert title_of("ties, entropy/key", {"ties": "TIES"}) == "TIES, entropy/key"


ODD = r"50% & a_b^#{}~\ <x>|`y' --α ΔΩ ↑é"


def test_latex_takes_any_name_and_compiles(tmp_path: Path):
    odd = replace(SPECTRAL, titles={"tsv_m": ODD, "iso_c": "Iso-C"})
    source = latex(verdict_on([odd]), Numbers(percent=True, intervals=True))

    assert r"50\% \& a\_b\textasciicircum{}\#\{\}\textasciitilde{}\textbackslash{}" in source
    assert r"\ensuremath{\alpha}" in source and latex_text("a--b\n") == "a-{}-b "
    assert source.count(r"\textbf{") == 3 and source.count(r"\underline{") == 3
    assert source.count("{") == source.count("}") + 2 * source.count(r"\{") - 2 * source.count(r"\}")
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed: the source was checked, and not compiled")
    page = "\n".join(
        [r"\documentclass{article}", r"\usepackage{booktabs}", r"\begin{document}", source, r"\end{document}"]
    )
    (tmp_path / "table.tex").write_text(page, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "table.pdf").is_file()


def test_two_sweeps_of_the_demo_are_one_table(app: Callable, folder: Path):
    app("recipe=ties,tsv_m", "output=none", "name=first", "-m")
    app("recipe=dare_ties", "density=0.5,0.9", "output=none", "name=second", "-m")

    outcome = app("table", "first", "second", "--latex", "--metric", "accuracy", "--percent")

    assert outcome.status == 0, outcome.err
    names = [line.partition(" & ")[0] for line in outcome.out.splitlines() if " & " in line]
    assert names == ["Method", "Pretrained", "Individual", "TSV-M", "TIES", "DARE-TIES"]
    assert app("table", "--percent").err.strip().endswith("--percent is for --latex and --markdown.")
