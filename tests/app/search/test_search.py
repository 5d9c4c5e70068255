"""`sweep=search`: Optuna chooses the points, a pass merges each batch of them, and a kill costs nothing."""

import json
import os
from pathlib import Path

import pytest
from programs import printed
from sweep_folders import overrides, records, rows, sweep_of
from two_experts import INPUTS, write_two_experts

from mecha_exp import Context, evaluator
from mecha_exp.app.search.study_file import STUDY_FILE

optuna = pytest.importorskip("optuna", minversion="4")


@pytest.fixture
def models(folder: Path) -> list[str]:
    """A base of zeros, experts along two axes, whose merge is the pair of their weights, and an evaluator."""
    return write_two_experts(folder)


@pytest.fixture
def search(models: list[str], app):
    """Runs a search of the weights of two experts."""

    def run(*words: str, space=("weights.0=interval(0,1)", "weights.1=interval(0,1)")):
        given = {word.partition("=")[0].partition(".")[0] for word in (*space, *words)}
        fixed = ("recipe=task_arithmetic", "alpha=1", "evaluator.name=test_distance", "output=none")
        fixed = tuple(w for w in fixed if w.partition("=")[0].partition(".")[0] not in given)
        return app("sweep=search", *models, *fixed, *space, *words)

    return run


def measured(folder: Path) -> list[tuple[float, ...]]:
    """The pairs that were measured, without those of the inputs."""
    file = folder / "measured.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        pair for pair in (tuple(map(float, line.split())) for line in lines) if pair not in INPUTS.values()
    ]


def trials(folder: Path) -> list[dict]:
    return json.loads((sweep_of(folder) / "trials.json").read_text())["trials"]


def study_of(folder: Path):
    backend = optuna.storages.journal.JournalFileBackend(str(sweep_of(folder) / STUDY_FILE))
    storage = optuna.storages.JournalStorage(backend)
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


def test_a_search_comes_closer_than_where_it_began_one_pass_a_batch(search, folder, passes_run):
    outcome = search("sweep.trials=24", "sweep.batch=8", "name=pairs")

    assert outcome.status == 0, outcome.err
    assert passes_run == [8, 8, 8]
    assert "[24/24] weights.0=" in outcome.out
    table = rows(sweep_of(folder))
    distances = [float(row["distance"]) for row in sorted(table, key=lambda row: int(row["point"]))]
    assert len(distances) == 24 and min(distances[8:]) < min(distances[:8])
    study = study_of(folder)
    assert study.study_name == "pairs" and study.best_value == pytest.approx(min(distances))
    assert [t.user_attrs["point"] for t in study.trials] == list(range(24))
    assert json.loads((sweep_of(folder) / "sweep.json").read_text())["points"] == 24


def test_the_same_command_measures_nothing_and_one_of_more_trials_goes_on(search, folder):
    search("sweep.trials=8", "sweep.batch=8")
    again = search("sweep.trials=8", "sweep.batch=8")

    assert len(measured(folder)) == 8
    assert "8 of 8 points are there already" in again.out and "nothing to do" in again.out

    more = search("sweep.trials=12", "sweep.batch=8")

    assert "8 of 8 points are there already" in more.out and "[12/12]" in more.out
    assert len(measured(folder)) == len(set(measured(folder))) == 12
    assert len(list((folder / "outputs" / "multiruns").iterdir())) == 1
    assert len(study_of(folder).trials) == 12

    fewer = search("sweep.trials=5", "sweep.batch=8")

    assert fewer.status == 0 and len(rows(sweep_of(folder))) == 5


def test_a_failed_trial_does_not_end_the_search_and_is_tried_again(search, folder):
    (folder / "limit.txt").write_text("0.5")

    outcome = search("sweep.trials=12", "sweep.batch=8")

    failed = [r for r in records(sweep_of(folder)) if r["status"] == "FAILED"]
    assert outcome.status == 1 and 0 < len(failed) < 12
    assert f"{len(failed)} of 12 points failed" in outcome.out and len(trials(folder)) == 12
    states = [t.state.name for t in study_of(folder).trials]
    assert states.count("FAIL") == len(failed)

    before = overrides(sweep_of(folder))
    (folder / "limit.txt").unlink()
    assert search("sweep.trials=12", "sweep.batch=8").status == 0
    assert overrides(sweep_of(folder)) == before
    assert len(measured(folder)) == 12 + len(failed)


@pytest.mark.heavy
def test_a_search_that_lost_its_last_batches_goes_on_as_if_it_had_not(search, folder):
    words = ("sweep.trials=16", "sweep.batch=8", "sweep.sampler=cmaes", "hydra.sweep.dir=s")
    search(*words)
    file, whole = Path("s/trials.json"), json.loads(Path("s/trials.json").read_text())

    file.write_text(json.dumps({**whole, "trials": whole["trials"][:8]}))
    Path("s", STUDY_FILE).write_text('{"op_code": 0, "wor')  # as a kill in the middle of a line leaves it
    search(*words)

    assert json.loads(file.read_text()) == whole
    assert len(set(measured(folder))) == len(measured(folder)) == 16


def test_a_searched_recipe_gets_only_the_keys_that_it_has(search, folder):
    space = ("recipe=task_arithmetic,weighted_sum", "alpha=interval(0,1)", "weights=1,2")

    outcome = search("sweep.trials=10", "sweep.batch=5", space=space)

    assert outcome.status == 0, outcome.err
    assert "weights: not of weighted_sum, which run without it" in outcome.out
    asked = [trial["parameters"] for trial in trials(folder)]
    assert {p["recipe"] for p in asked} == {"task_arithmetic", "weighted_sum"}
    assert all(("weights" in p) == (p["recipe"] == "task_arithmetic") for p in asked)
    assert all(
        ("weights" in "".join(words)) == ("recipe=task" in "".join(words))
        for words in overrides(sweep_of(folder))
    )


def test_choices_and_integers_are_searched_to_the_last_point(search, folder):
    space = ("weights.0=range(0,3)", "weights.1=0.5,1", "alpha=1,2")

    outcome = search("sweep.trials=12", "sweep.batch=6", space=space)

    assert outcome.status == 0, outcome.err
    settings = {tuple(sorted(trial["parameters"].items())) for trial in trials(folder)}
    assert len(settings) == 12


def test_the_knots_of_a_curve_over_the_depth_are_searched_by_cmaes(app, folder):
    @evaluator("test_curve", metric="distance", direction="minimize")
    def distance(state_dict, *, context: Context):
        knots = context.hyperparameters.get("alpha") or [0, 0, 0, 0]
        return {"distance": sum((a - b) ** 2 for a, b in zip(knots, (0.2, 0.9, 0.4, 0.7), strict=True))}

    curve = ("alpha=[0.5,0.5,0.5,0.5]", "alpha.*=interval(0,1)", "alpha.3=0.7")
    how = ("sweep=search", "sweep.sampler=cmaes", "sweep.trials=40", "sweep.batch=10")
    outcome = app(
        *how, "recipe=task_arithmetic", *curve, "evaluator.name=test_curve", "output=none", "tracking=none"
    )

    assert outcome.status == 0, outcome.err
    values = [record["metrics"]["distance"] for record in records(sweep_of(folder))]
    assert sum(values[-10:]) < sum(values[:10]) / 3  # draws at random would be as far as before
    assert {tuple(trial["parameters"]) for trial in trials(folder)} == {("alpha.0", "alpha.1", "alpha.2")}
    by_block = (sweep_of(folder) / "0" / "block_values.csv").read_text()
    assert len({line.rpartition(",")[2] for line in by_block.splitlines()[1:]}) == 4, "a value by depth"


def test_a_search_begins_with_the_points_that_are_given(search, folder):
    enqueue = "sweep.enqueue=[{weights.0:0.25,weights.1:0.75},{weights.1:0.125}]"

    outcome = search("sweep.trials=4", "sweep.batch=2", enqueue)

    assert outcome.status == 0, outcome.err
    assert json.loads((sweep_of(folder) / "sweep.json").read_text())["given"] == [0, 1]
    first, second, *_ = (trial["parameters"] for trial in trials(folder))
    assert first == {"weights.0": 0.25, "weights.1": 0.75} and second["weights.1"] == 0.125


@pytest.mark.heavy
def test_the_study_is_written_into_a_database(search, folder):
    words = ("sweep.trials=4", "sweep.batch=2", "sweep.storage=sqlite:///studies.db", "name=one")
    search(*words)
    search("sweep.trials=6", *words[1:])

    study = optuna.load_study(study_name="one", storage="sqlite:///studies.db")
    values = [r["metrics"]["distance"] for r in records(sweep_of(folder))]
    assert [t.values[0] for t in study.trials] == pytest.approx(values) and len(values) == 6

    other = search(
        "sweep.trials=2", "sweep.storage=sqlite:///studies.db", "name=one", space=("weights.0=0,1",)
    )
    assert other.status != 0 and "its study 'one' searches another space" in other.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["weights.0=interval(1,0)"], "weights.0=interval(1,0): the space is empty"),
        (["weights.0=interval(0.5,0.5)"], "the space is empty"),
        (["weights.0=range(3,1)"], "weights.0=range(3,1): the space is empty"),
        (["weights.0=interval(0,inf)"], "the space is infinite. Give two finite bounds"),
        (["weights.0=tag(log,interval(0,1))"], "the bounds of a logarithmic interval are above 0"),
        (["weights.0=tag(log,range(2,9,2))"], "a logarithmic range has step 1"),
        (["alpha=0.5"], "sweep=search has nothing to search: no key has an interval or several values"),
        (["weights.0=0,1", "sweep.trials=3"], "sweep.trials=3, and the space has only 2 points"),
        (["weights.0=interval(0,1)", "sweep.trials=0"], "sweep.trials=0: expected a whole number, 1 or more"),
        (["weights.0=interval(0,1)", "sweep.batch=many"], "sweep.batch=many: expected a whole number"),
        (["weights.0=interval(0,1)", "sweep.seed=x"], "sweep.seed=x: expected a whole number, 0 or more"),
        (
            ["weights.0=interval(0,1)", "sweep.direction=maximize"],
            "sweep.direction=maximize looks for the worst distance, whose evaluator says minimize",
        ),
        (
            ["weights.0=interval(0,1)", "sweep.direction=up"],
            "sweep.direction=up: expected maximize or minimize",
        ),
        (["weights.0=interval(0,1)", "sweep.sampler=tep"], "there is no such sampler. Did you mean 'tpe'?"),
        (["weights.0=interval(0,1)", "sweep.sampler=cmaes"], "sweep.sampler=cmaes searches 2 or more keys"),
        (
            ["weights.0=interval(0,1)", "sweep.options.n_startup_trial=2"],
            "the sampler tpe has no such option. Did you mean 'n_startup_trials'?",
        ),
        (
            ["weights.0=interval(0,1)", "sweep.options.n_startup_trials=ten"],
            "sweep.options.n_startup_trials=ten: expected a whole number, 0 or more.",
        ),
        (
            ["weights.0=interval(0,1)", "sweep.options.n_startup_trials=null"],
            "sweep.options.n_startup_trials=None: expected a whole number, 0 or more.",
        ),
        (
            ["weights.0=interval(0,1)", "sweep.sampler=nsga2", "sweep.options.population_size=1"],
            "population_size",
        ),
        (["weights.0=interval(0,1)", "sweep.enqueue=[{alpah:1}]"], "sweep.enqueue: alpah is not searched"),
        (["weights.0=interval(0,1)", "sweep.enqueue=[{weights.0:2}]"], "weights.0=2 is outside of 0 to 1"),
        (
            ["weights.0=interval(0,1)", "sweep.storage=none/study.log"],
            "cannot be reached: there is no folder",
        ),
        (["weights.0=interval(0,1)", "sweep.storage=sqlite:////none/a.db"], "a.db cannot be reached:"),
        (["weights.0=interval(0,1)", "sweep.storage=what://x"], "sweep.storage=what://x cannot be reached:"),
        (["weights.0=interval(0,1)", "evaluator=none"], "sweep=search needs a metric as its objective"),
        (["weights.0=interval(0,1)", "sweep.replicates=2"], "sweep has no 'replicates'"),
        (
            ["weights.0=interval(0,1)", "hydra.sweep.subdir=x"],
            "hydra.sweep.subdir: a search finds its points",
        ),
        (["weights.0=interval(0,1)", "hydra/sweeper=basic"], "leave hydra/sweeper out"),
    ],
)
def test_bad_input_is_said_before_any_work(search, folder, words, message):
    outcome = search(space=words)

    assert outcome.status != 0
    assert message in outcome.err.replace("\n", " ")
    assert "Traceback" not in outcome.err
    assert not (folder / "outputs" / "multiruns").exists() and not measured(folder)


def test_options_that_fail_while_the_sampler_is_asked_are_named(search):
    outcome = search("sweep.sampler=cmaes", "sweep.trials=6", "sweep.batch=2", "sweep.options.popsize=0")

    assert outcome.status != 0
    assert "sweep.options: cmaes does not take them: " in outcome.err and "Traceback" not in outcome.err


def test_a_folder_with_another_space_is_refused(search, folder):
    search("sweep.trials=2", "hydra.sweep.dir=s")
    before = (folder / "s" / "sweep.json").read_text()
    outcome = search("sweep.trials=2", "hydra.sweep.dir=s", space=("weights.0=interval(0,2)",))

    assert outcome.status != 0 and (folder / "s" / "sweep.json").read_text() == before
    assert "s/trials.json has the trials of another space" in outcome.err.replace("\n", " ")
    written = json.loads((folder / "s" / "trials.json").read_text())["space"]["dimensions"]
    assert all(set(of) <= {"high", "low", "step", "choices", "is_integer"} for of in written.values())


@pytest.mark.parametrize(
    "other", ["sweep.seed=1", "sweep.sampler=random", "sweep.options.n_startup_trials=3"]
)
def test_a_folder_with_the_trials_of_another_sampler_is_refused(search, folder, other):
    search("sweep.trials=2", "hydra.sweep.dir=s")
    before = (folder / "s" / "sweep.json").read_text()
    outcome = search("sweep.trials=2", "hydra.sweep.dir=s", other)

    assert outcome.status != 0 and (folder / "s" / "sweep.json").read_text() == before
    said = " ".join(outcome.err.split())
    assert "s/trials.json has the trials of tpe with seed 0, and this search is by " in said
    assert said.endswith("Choose another folder with hydra.sweep.dir=..., or delete that file.")
    assert json.loads(before)["logarithmic"] == []


def test_a_search_of_an_earlier_version_goes_on(search, folder):
    words = ("sweep.batch=2", "hydra.sweep.dir=s")
    search("sweep.trials=2", *words)
    file, first = Path("s/trials.json"), json.loads(Path("s/trials.json").read_text())
    file.write_text(json.dumps({name: value for name, value in first.items() if name != "sampler"}))

    outcome = search("sweep.trials=4", *words)

    assert outcome.status == 0, outcome.err
    later = json.loads(file.read_text())
    assert later["sampler"] == first["sampler"] and later["trials"][:2] == first["trials"]
    assert len(later["trials"]) == len(measured(folder)) == 4


def test_without_optuna_it_says_what_to_install(search, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)

    outcome = search("sweep.trials=2")

    assert outcome.status != 0
    assert "needs Optuna, which is not installed: pip install 'mecha_exp[search]'" in outcome.err.replace(
        "\n", " "
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.heavy
def test_a_search_that_is_killed_again_and_again_ends_with_the_undisturbed_trials(models, folder):
    what = ["recipe=task_arithmetic", "weights.0=interval(0,1)", "weights.1=interval(0,1)"]
    how = ["evaluator.name=test_distance", "sweep=search", "sweep.trials=20", "sweep.batch=4"]
    quiet = ["output=none", "tracking=none"]

    printed("sweep_killing", folder, 0, 8, *models, *what, *how, *quiet)

    def ended(folder: Path) -> list[tuple]:
        return [(r["name"], r["metrics"]["distance"]) for r in records(sweep_of(folder))]

    assert ended(folder / "disturbed") == ended(folder / "undisturbed")
    assert len(ended(folder / "disturbed")) == len(trials(folder / "disturbed")) == 20
    assert len(set(measured(folder / "disturbed"))) == 20
