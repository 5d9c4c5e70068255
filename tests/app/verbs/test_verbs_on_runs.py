"""ls, show, table and diff: what was run is found again, compared, and given to other programs."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from mecha_exp.errors import ConfigError
from mecha_exp.runs.query import Filter, Run, find_run
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal import console


def point(folder: Path, alpha: float, k: float, accuracy: float | None) -> None:
    name = f"alpha={alpha},k={k}"
    failed = accuracy is None
    record = Record(
        name,
        FAILED if failed else "FINISHED",
        error="it broke" if failed else None,
        started=int(1000 * (alpha + k)),
        overrides=name.split(","),
        parameters={"alpha": alpha, "k": k, "method": "ties", "input/base": "/models/base.safetensors"},
        metrics={} if failed else {"accuracy": accuracy, "loss": 1 - accuracy, "time/merge_seconds": alpha},
        tags={"fingerprint/base": "f" * 64, "version/torch": "2.0"},
        metric=None if failed else "accuracy",
    )
    if not failed:
        record.tags["signature"] = f"{int(alpha * 10)}{int(k * 10)}" + "ab" * 31
    record.save(folder)
    (folder / "recipe.mecha").write_text(f'version 0.1.0\nmodel "a"\nmerge "ties" &0 alpha={alpha}\n')


@pytest.fixture
def sweep(folder: Path) -> Path:
    """A sweep over alpha and k in which one point has failed."""
    place = folder / "outputs/multiruns/one"
    grid = [(0.3, 0.1, 0.6), (0.5, 0.1, 0.8), (0.3, 0.2, 0.7), (0.5, 0.2, None)]
    Sweep("ties by alpha, k", ["alpha", "k"], ["python", "-m", "mecha_exp"], 4).save(place)
    for number, (alpha, k, accuracy) in enumerate(grid):
        point(place / str(number), alpha, k, accuracy)
    return place


@pytest.fixture
def verb(sweep, monkeypatch, capsys):
    """Runs a verb on it; returns what it printed, as data where it was asked for as JSON."""
    from mecha_exp.cli import main

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["mecha_exp", *words])
        status = main()
        printed = capsys.readouterr()
        assert (status == 0) == (not printed.err)
        return json.loads(printed.out) if "--json" in words else printed.out + printed.err

    return run


def test_ls_lists_sweeps_and_points(verb):
    data = verb("ls", "--json")

    assert [(s["title"], s["points"], s["failed"]) for s in data["sweeps"]] == [("ties by alpha, k", 4, 1)]
    assert data["sweeps"][0]["best"] == {"name": "alpha=0.5,k=0.1", "value": 0.8}
    assert len(data["points"]) == 4


def test_ls_fits_a_narrow_terminal_and_its_words_name_runs_and_sweeps(verb, monkeypatch):
    monkeypatch.setattr(console.stdout, "_width", 80)

    lines = verb("ls").splitlines()

    (sweep,) = [line for line in lines if "ties by alpha, k" in line]
    (point,) = [line for line in lines if line.startswith(" alpha=0.5,k=0.1")]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert "accuracy 0.8" in point
    signature, folder = point.split()[1], point.split()[-1]
    assert verb("show", folder, "--json")["signature"].startswith(signature)
    assert verb("table", sweep.split()[-1], "--json")["title"] == "ties by alpha, k"


def test_several_sweeps_are_one_table_told_apart_by_what_any_of_them_varied(verb, sweep):
    other = sweep.with_name("two")
    Sweep("dare by alpha", ["alpha"], ["python"], 1).save(other)
    point(other / "0", 0.9, 0.05, 0.95)
    for place, accuracy in ((sweep / "0", 0.4), (other / "0", 0.1)):
        record = Record.load(place)
        record.references = {"base": {"accuracy": accuracy}, "expert": {"accuracy": 0.2}}
        record.overrides = [word for word in record.overrides if word != "k=0.05"]  # the recipe's own k
        record.save(place)

    data = verb("table", "one", "two", "--json")

    assert data["title"] == "ties by alpha, k + dare by alpha"
    assert data["folders"] == ["outputs/multiruns/one", "outputs/multiruns/two"]
    points = [row["settings"] for row in data["rows"] if row["kind"] == "point"]
    assert points[0] == {"sweep": "dare by alpha", "alpha": 0.9, "k": 0.05}
    assert {"sweep": "ties by alpha, k", "alpha": 0.3, "k": 0.1} in points and len(points) == 5
    inputs = [row["name"] for row in data["rows"] if row["kind"] == "reference"]
    assert inputs == ["base (ties by alpha, k)", "expert", "base (dare by alpha)"]
    assert verb("table", "one", "two", "--by", "k").count("the sweep ") == 2


def test_sweeps_with_one_title_are_called_by_their_folders(verb, sweep):
    shutil.copytree(sweep, sweep.with_name("two"))

    data = verb("table", "one", "two", "--json")

    assert {row["settings"]["sweep"] for row in data["rows"] if row["kind"] == "point"} == {"one", "two"}


def test_a_table_says_what_was_made_again(verb, sweep):
    path = sweep / "0" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "note": "made again: the input a has changed"}))

    said = f"{record['name']}: made again: the input a has changed"
    assert said in verb("table")
    assert verb("table", "--json")["notes"] == [said]


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        (["alpha>0.4"], 2),
        (["alpha=0.3", "k<=0.1"], 1),
        (["status=FAILED"], 1),
        (["accuracy>=0.7"], 2),
        (["accuracy!=0.7"], 2),
        (["method=ties"], 4),
        (["alpha>7"], 0),
    ],
)
def test_ls_shows_the_points_that_meet_every_condition(verb, conditions, count):
    assert len(verb("ls", "--json", *conditions)["points"]) == count


def test_ls_says_which_name_of_a_condition_no_run_has(verb):
    said = verb("ls", "alhpa>0.3", "accuracy>0")

    assert "error: alhpa: no run here has it. Did you mean 'alpha'?" in said


@pytest.mark.parametrize("word", ["alpha", "alpha>", "alpha==0.3"])
def test_a_condition_that_is_none(verb, word: str):
    assert f"'{word}' is not a condition. Write it as alpha>0.3" in verb("ls", word)


def test_ls_where_nothing_was_run(app, folder):
    assert "nothing has been run here yet" in app("ls", "--in", "nowhere").err


def test_a_run_is_found_by_folder_name_and_signature(sweep):
    by_folder = find_run(str(sweep / "1"))

    assert by_folder.record == find_run("alpha=0.5,k=0.1").record == find_run("51abab").record


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("alpha=0.5,k=0.3", "Did you mean 'alpha=0.5,k=0.2'"),
        ("zzzz", "there is no run 'zzzz' below outputs. `python -m mecha_exp ls` lists what there is."),
        ("k=0.2", "Did you mean 'alpha=0.3,k=0.2' or 'alpha=0.5,k=0.2'"),
        ("outputs/multiruns/one", "is a sweep. Name one of its points"),
    ],
)
def test_a_word_that_means_no_run(sweep, word, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        find_run(word)


def test_a_beginning_that_several_signatures_have(sweep):
    for number, k in enumerate((0.1, 0.2)):
        point(sweep / f"more{number}", 0.3, k, 0.5)
    record = Record.load(sweep / "more0")
    record.tags["signature"] = "31aba" + "0" * 59
    record.save(sweep / "more0")

    with pytest.raises(ConfigError, match="'31ab' means several runs"):
        find_run("31ab")


def test_show_says_all_that_is_known_of_a_run(verb):
    text = verb("show", "51abab")

    for words in ("alpha=0.5,k=0.1: finished", "/models/base.safetensors", "accuracy", 'merge "ties"', "2.0"):
        assert words in text
    assert verb("show", "51abab", "--json")["metrics"]["accuracy"] == 0.8


def test_table_sorts_again_by_other_keys_and_metrics(verb):
    rows = verb("table", "--json", "--metric", "loss", "--direction", "minimize")["rows"]

    assert [row["settings"] for row in rows if row["best"]] == [{"alpha": 0.5, "k": 0.1}]
    by_k = verb("table", "--by", "k", "--json")["rows"]
    assert [(row["settings"], row["points"], row["failed"]) for row in by_k] == [
        ({"k": 0.1}, 2, 0),
        ({"k": 0.2}, 2, 1),
    ]
    assert by_k[0]["metrics"]["accuracy"]["mean"] == pytest.approx(0.7)


def test_table_gives_every_point_as_csv(verb):
    rows = list(csv.DictReader(io.StringIO(verb("table", "ties by alpha, k", "--csv"))))

    assert [row["status"] for row in rows] == ["FINISHED"] * 3 + ["FAILED"]


def test_table_asks_for_keys_and_metrics_that_there_are(verb):
    text = verb("table", "--by", "alhpa", "--metric", "los")

    assert "--by alhpa: the sweep did not vary it. Did you mean 'alpha'?" in text
    assert "--metric los: nothing measured it. Did you mean 'loss'?" in text
    assert "there is no sweep 'other'" in verb("table", "other")
    assert "Did you mean 'ties by alpha, k'?" in verb("table", "alpha, k")
    assert "`python -m mecha_exp ls --sweeps` lists what there is." in verb("table", "zzzz")


def test_diff_names_what_differs_and_nothing_else(verb):
    found = verb("diff", "31abab", "51abab", "--json")

    assert found["parameters"] == {"alpha": [0.3, 0.5]}
    assert found["recipe"] == ['-merge "ties" &0 alpha=0.3', '+merge "ties" &0 alpha=0.5']
    assert found["inputs"] == found["environment"] == {}
    assert found["metrics"].keys() == {"accuracy", "loss"}
    assert "+0.2" in verb("diff", "31abab", "51abab")


def test_diff_of_a_run_with_itself(verb):
    assert "They do not differ." in verb("diff", "31abab", "31abab")


@pytest.mark.parametrize("name", ["ls", "show", "table", "diff", "clean", "track", "ui"])
def test_every_verb_explains_itself_with_an_example(name, monkeypatch, capsys):
    from mecha_exp.cli import main

    monkeypatch.setattr("sys.argv", ["mecha_exp", name, "--help"])
    with pytest.raises(SystemExit) as stop:
        main()

    assert stop.value.code == 0
    assert f"python -m mecha_exp {name}" in capsys.readouterr().out.partition("example")[2]


def test_conditions_compare_numbers_and_words():
    run = Run(Path(), Record("n", parameters={"alpha": 0.5, "vote": True, "method": "ties"}))

    for text, holds in (("alpha>=0.5", True), ("alpha<0.5", False), ("vote=true", True), ("method>1", False)):
        assert Filter.parse(text).holds(run) is holds
