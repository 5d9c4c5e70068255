"""`sweep=greedy_soup`: experts by validation, each kept only if the soup is better with it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sweep_folders import records, rows, sweep_of
from two_experts import without

from mecha_exp.app.adaptive.soup import p_value
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation import Outcomes
from mecha_exp.verdict.paired_tests import mcnemar

PLUGIN = """
from pathlib import Path
from mecha_exp import Outcomes, evaluator

@evaluator("test_votes", metric="hits", splits=("validation", "test"))
def votes(state_dict, *, split):
    with Path("measured.txt").open("a") as file:
        print(split, sum(i * w for i, w in enumerate(state_dict["w"].tolist(), 1)), file=file)
    return Outcomes({"all": (state_dict["w"] > 0).numpy()})

@evaluator("test_number", metric="hits")
def number(state_dict):
    return {"hits": float((state_dict["w"] > 0).float().mean())}
"""
EXAMPLES = 200


@pytest.fixture
def soup(folder: Path, app):
    """Makes soups of four experts by whose mean each example is decided.

    Alone, `tiny` hits 1 example, `some` 60, `many` 100, `bad` none. `many`, `some` and `tiny` hit
    different ones, as their mean does, and `bad` outvotes all.
    """
    files = {}
    for name, first, last in (("tiny", 160, 161), ("some", 100, 160), ("many", 0, 100), ("bad", 0, 0)):
        votes = torch.full((EXAMPLES,), -20.0 if name == "bad" else -1.0)
        votes[first:last] = 5.0
        files[name] = f"{folder}/{name}.safetensors"
        save_file({"w": votes}, files[name])
    save_file({"w": torch.zeros(EXAMPLES)}, folder / "base.safetensors")
    (folder / "plugin.py").write_text(PLUGIN)
    usual = {
        "models.base": f"{folder}/base.safetensors",
        "models.experts": f"[{','.join(files.values())}]",
        "plugins": f"[{folder}/plugin.py]",
        "evaluator.name": "test_votes",
        "recipe": "n_average",
        "output": "none",
    }

    def run(*words: str):
        has_base = any(word.startswith("recipe=") for word in words)  # which `n_average` does not take
        chosen = {key: value for key, value in usual.items() if key != "models.base" or has_base}
        return app("sweep=greedy_soup", *without(chosen, words), *words)

    return run


def kept(sweep: Path) -> dict[str, bool]:
    with (sweep / "greedy_soup.csv").open() as file:
        return {row["expert"]: row["kept"] == "true" for row in csv.DictReader(file)}


def subsets(sweep: Path) -> list[tuple[str, str]]:
    return [(row["soup"], row["subset"]) for row in rows(sweep)]


def test_an_expert_is_kept_if_it_helps_beyond_the_noise(soup, folder):
    outcome = soup()

    assert outcome.status == 0, outcome.err
    sweep = sweep_of(folder)
    assert kept(sweep) == {"many": True, "some": True, "tiny": False, "bad": False}
    assert subsets(sweep) == [
        ("single", "[tiny]"),
        ("single", "[some]"),
        ("single", "[many]"),
        ("single", "[bad]"),
        ("uniform", "[tiny,some,many,bad]"),
        ("trial", "[some,many]"),
        ("trial", "[tiny,some,many]"),
        ("trial", "[some,many,bad]"),
        ("greedy", "[some,many]"),
    ]
    assert "greedy soup + tiny: 0.805 against 0.8, p = 1: not kept" in outcome.out
    assert "better with tiny, within the noise: sweep.rule=paper keeps such" in outcome.out


def test_the_rule_of_the_paper_keeps_what_is_not_worse(soup, folder):
    assert soup("sweep.rule=paper").status == 0

    assert kept(sweep_of(folder)) == {"many": True, "some": True, "tiny": True, "bad": False}
    assert subsets(sweep_of(folder))[-1] == ("greedy", "[tiny,some,many]")


def test_the_soup_is_reported_on_test_once_and_no_other_trial_is(soup, folder):
    assert soup().status == 0

    reported = {(r["soup"], r["subset"]) for r in rows(sweep_of(folder)) if r["test/hits"]}
    reported.remove(("trial", "[some,many]"))  # which is the same merge as the soup
    assert reported == {("greedy", "[some,many]"), ("single", "[many]"), ("uniform", "[tiny,some,many,bad]")}
    on_test = [line for line in (folder / "measured.txt").read_text().splitlines() if line.startswith("test")]
    assert len(on_test) == len(set(on_test)) + 1, "the expert `many` is an input and a soup of its own"


def test_a_soup_by_the_metric_of_one_task_is_tested_on_its_examples(soup, folder):
    (folder / "plugin.py").write_text(
        PLUGIN.replace(
            '{"all": (state_dict["w"] > 0).numpy()}',
            '{"front": (state_dict["w"][:130] > 0).numpy(), "back": (state_dict["w"][130:] > 0).numpy()}',
        )
    )

    outcome = soup("evaluator.metric=hits/front")

    assert outcome.status == 0, outcome.err
    assert kept(sweep_of(folder)) == {"many": True, "some": True, "tiny": False, "bad": False}
    with (sweep_of(folder) / "greedy_soup.csv").open() as file:
        p = {row["expert"]: row["p"] for row in csv.DictReader(file)}["some"]
    assert float(p) == pytest.approx(float(mcnemar(0, 30))), "30 of the 130 examples differ"


def test_trials_are_not_on_the_front_of_several_evaluators(soup, folder):
    (folder / "plugin.py").write_text(
        PLUGIN
        + """
@evaluator("test_size", metric="size", direction="minimize")
def size(state_dict):
    return {"size": float(state_dict["w"].abs().sum())}
"""
    )

    outcome = soup("evaluator.also=[{name: test_size}]")

    assert outcome.status == 0, outcome.err
    marked = [row["soup"] for row in rows(sweep_of(folder)) if row["pareto"].lower() == "true"]
    assert marked and "trial" not in marked


def test_a_soup_that_was_interrupted_goes_on(soup, folder):
    (folder / "plugin.py").write_text(
        PLUGIN.replace(
            "    return Outcomes",
            '    if Path("stop.txt").exists() and state_dict["w"][160] > 0 and state_dict["w"][0] > 0:\n'
            "        raise KeyboardInterrupt\n    return Outcomes",
        )
    )
    (folder / "stop.txt").touch()
    assert soup("hydra.sweep.dir=s").status == 130
    before = (folder / "measured.txt").read_text().splitlines()
    (folder / "stop.txt").unlink()

    assert soup("hydra.sweep.dir=s").status == 0

    after = (folder / "measured.txt").read_text().splitlines()[len(before) :]
    assert kept(folder / "s") == {"many": True, "some": True, "tiny": False, "bad": False}
    again = [line for line in after if line.startswith("validation") and line in before[:-1]]
    assert again == [], "what was measured before the interrupt is not measured again"


def test_other_recipes_make_soups_too(soup, folder):
    assert soup("recipe=task_arithmetic", "alpha=0.5").status == 0

    assert kept(sweep_of(folder))["some"]
    assert {record["parameters"]["method"] for record in records(sweep_of(folder))} == {"task_arithmetic"}


def test_the_p_value_is_that_of_mcnemars_test():
    one, other = np.zeros(30), np.zeros(30)
    one[:5], other[3:20] = 1, 1

    assert p_value(Outcomes({"t": one}), Outcomes({"t": other})) == pytest.approx(float(mcnemar(3, 15)))
    with pytest.raises(EvaluationError, match="cannot compare two points"):
        p_value(Outcomes({"t": one}), Outcomes({"t": other[:20]}))


def test_numbers_without_outcomes_are_refused_but_by_the_rule_of_the_paper(soup, folder):
    outcome = soup("evaluator.name=test_number", "hydra.sweep.dir=s")

    assert outcome.status == 1
    assert "gives one hits for each model, and a test needs outcomes by example" in outcome.err
    assert "Use sweep.rule=paper" in outcome.err
    assert soup("evaluator.name=test_number", "sweep.rule=paper", "hydra.sweep.dir=p").status == 0
    assert kept(folder / "p") == {"many": True, "some": True, "tiny": True, "bad": False}


def test_an_expert_that_cannot_be_measured_is_named(soup, folder):
    (folder / "plugin.py").write_text(
        PLUGIN.replace(
            '(state_dict["w"] > 0).numpy()',
            '(state_dict["w"] / 0 > 0).numpy() if state_dict["w"][0] < -10 else [1 / 0]',
        )
    )

    outcome = soup()

    assert outcome.status == 1
    assert "sweep=greedy_soup: tiny has no hits (point 0, see above)" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models.experts=[a.safetensors]"], "models.experts lists 1: give two or more"),
        (["sweep.rule=papre"], "sweep.rule=papre: there is no such rule. Did you mean 'paper'"),
        (
            ["evaluator.metric=[hits,hits/all]", "evaluator.direction=maximize"],
            "sweep=greedy_soup chooses by one metric, and evaluator.metric names 2. Name one, as in "
            "evaluator.metric=hits.",
        ),
        (["sweep.level=5"], "sweep.level=5: expected a level of the test between 0 and 1"),
        (["evaluator=none", "evaluator.name=null"], "sweep=greedy_soup needs a metric to choose by"),
        (["recipe=n_average,median"], "for one value of each key, and recipe has several"),
        (["+sweep.replicate=[experts]"], "sweep=greedy_soup is for one set of experts and one seed"),
        (["hydra.sweep.subdir=x"], "hydra.sweep.subdir: sweep=greedy_soup finds its points by their numbers"),
        (
            ["recipe=task_arithmetic", "weights=[1,2,3,4]"],
            "weights lists a value for each of 4 experts, and sweep=greedy_soup leaves experts out",
        ),
    ],
)
def test_what_is_wrong_is_said_before_any_work(soup, folder, words, message):
    outcome = soup(*words)

    assert outcome.status != 0
    assert message in " ".join(outcome.err.split()), outcome.err
    assert not (folder / "outputs" / "multiruns").exists() and not (folder / "measured.txt").exists()


def test_a_soup_of_all_experts_is_counted_once(app, folder):
    outcome = app("sweep=greedy_soup", "output=none", "tracking=none", "-m")
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())

    assert outcome.status == 0, outcome.err
    everyone = "subset=[expert_0_3,expert_4_6,expert_7_9]"
    said = f"'soup=greedy,{everyone}' is the same model as 'soup=uniform,{everyone}', and is counted once."
    assert said in written["notes"] and written["candidates"] == 4
    assert not any("the same best score" in note for note in written["notes"])
    assert f"soup=greedy,{everyone}" not in {c["point"] for c in written["comparisons"]}
