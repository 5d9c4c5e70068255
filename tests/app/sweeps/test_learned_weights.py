"""`sweep=gradient`: weights of experts learned by a loss of the merged model, streamed from the files."""

import csv
import json
import os
import weakref
from importlib import import_module, resources
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import printed
from safetensors.torch import load_file, save_file
from sweep_folders import records, rows, sweep_of
from two_experts import without, write_two_experts

from mecha_exp.app.adaptive import learning
from mecha_exp.app.adaptive.coefficients import Coefficients
from mecha_exp.app.adaptive.learning import loss_and_gradient
from mecha_exp.app.adaptive.optimiser import Adam
from mecha_exp.app.adaptive.task_vectors import TaskVectors
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.evaluation.learning import registry
from mecha_exp.evaluation.learning.losses import bound_loss
from mecha_exp.evaluation.registry import find_evaluator
from mecha_exp.evaluation.scoring import Evaluation
from mecha_exp.graph.nodes import InMemory
from mecha_exp.runs.outcomes import read_outcomes
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.source import infos_of

PLUGIN = """
from pathlib import Path
from mecha_exp import evaluator, loss

@evaluator("test_distance", metric="distance", direction="minimize")
def distance(state_dict):
    return {"distance": sum(float(((t - 0.6) ** 2).sum()) for t in state_dict.values())}

@loss("test_quadratic")
def quadratic(state_dict, *, step, seed):
    with Path("called.txt").open("a") as file:
        print(step, file=file)
    if Path("stop.txt").exists() and step >= int(Path("stop.txt").read_text()):
        raise KeyboardInterrupt
    factor = float(Path("factor.txt").read_text()) if Path("factor.txt").exists() else 1.0
    return factor * (first(state_dict) + second(state_dict))

def first(state_dict):
    x, y = state_dict["block.0.w"]
    return (x - 0.3) ** 2 + (y - 0.8) ** 2

def second(state_dict):
    x, y = state_dict["block.1.w"]
    return (x - 0.6) ** 2 + (y - 0.4) ** 2
"""
FIRST, SECOND = "block.0.w", "block.1.w"


@pytest.fixture(autouse=True)
def losses_of_plugins(monkeypatch):
    """Losses of a test's plugins are gone after it; those that come along stay."""
    import_module("mecha_exp.evaluators.digits")
    monkeypatch.setattr(registry, "_logits", dict(registry._logits))
    monkeypatch.setattr(registry, "_losses", dict(registry._losses))


@pytest.fixture
def learn(folder: Path, app):
    """Learns the weights of two experts along two axes; each of two blocks has its own best ones."""
    models = dict(w.split("=", 1) for w in write_two_experts(folder, PLUGIN, (FIRST, SECOND)))
    usual = {
        "recipe": "task_arithmetic",
        "evaluator.name": "test_distance",
        "output": "none",
        "sweep.loss": "test_quadratic",
        "sweep.rate": "0.05",
        "sweep.steps": "200",
    }

    def run(*words: str):
        return app("sweep=gradient", *without({**models, **usual}, words), *words)

    return run


def weights(sweep: Path, learned: str, step: int) -> dict[str, list[float]]:
    """The kept weights by part, at full precision."""
    with (sweep / "learned_weights.csv").open() as file:
        found: dict[str, list[float]] = {}
        for row in csv.DictReader(file):
            if (row["learned"], row["step"]) == (learned, str(step)):
                found.setdefault(row["part"], []).append(float(row["weight"]))
    return found


def calls(folder: Path) -> list[int]:
    file = folder / "called.txt"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_weights_go_to_the_minimum_of_the_loss_and_the_points_have_them(learn, folder):
    outcome = learn("sweep.by=[expert,key]", "sweep.checkpoints=2")

    assert outcome.status == 0, outcome.err
    sweep = sweep_of(folder)
    by_expert, by_key = (weights(sweep, f"test_quadratic/{kind}", 200) for kind in ("expert", "key"))
    assert by_expert["default"] == pytest.approx([0.45, 0.6], abs=1e-3)
    assert by_key[FIRST] == pytest.approx([0.3, 0.8], abs=1e-3)
    assert by_key[SECOND] == pytest.approx([0.6, 0.4], abs=1e-3)
    table = rows(sweep)
    assert [(row["learned"], row["step"]) for row in table] == [
        ("nothing", "0"),
        *((f"test_quadratic/{kind}", step) for kind in ("expert", "key") for step in ("100", "200")),
    ]
    distance = sum((value - 0.6) ** 2 for value in (0.3, 0.8, 0.6, 0.4))
    assert float(table[4]["distance"]) == pytest.approx(distance, abs=2e-3)


def test_other_recipes_are_measured_beside_the_learned_weights(learn, folder):
    """Each with the hyperparameters that it has; the weights are those of the first recipe."""
    outcome = learn(
        "recipe=task_arithmetic,ties,metagpt",
        "alpha=0.3,0.6",
        "k=1",
        "sweep.checkpoints=1",
        "sweep.steps=5",
        "-m",
    )

    assert outcome.status == 0, outcome.err
    made = [r["parameters"] for r in records(sweep_of(folder))]
    assert [(p["recipe"], p["learned"], p.get("alpha"), p.get("k")) for p in made] == [
        ("task_arithmetic", "nothing", 0.3, None),
        ("task_arithmetic", "nothing", 0.6, None),
        ("ties", "nothing", 0.3, 1),
        ("ties", "nothing", 0.6, 1),
        ("metagpt", "nothing", 0.3, None),
        ("metagpt", "nothing", 0.6, None),
        ("task_arithmetic", "test_quadratic/expert", 1, None),
    ]


def test_a_learned_point_is_a_recipe_that_merges_alone(learn, app, folder):
    assert learn("sweep.by=block", "sweep.checkpoints=1", "sweep.steps=5").status == 0
    sweep = sweep_of(folder)
    word = next(w for w in records(sweep)[1]["overrides"] if w.lstrip("+").startswith("weights="))

    models = [f"models.base={folder}/base.safetensors"]
    models += [f"models.experts=[{folder}/a.safetensors,{folder}/b.safetensors]"]
    alone = app(
        *models, "recipe=task_arithmetic", "alpha=1", word, "evaluator=none", "output.path=m.safetensors"
    )

    assert alone.status == 0, alone.err
    merged = load_file(folder / "m.safetensors")
    learned = weights(sweep, "test_quadratic/block", 5)
    assert [merged[key].tolist() for key in (FIRST, SECOND)] == [
        pytest.approx(row, rel=1e-5) for row in learned.values()
    ]


def test_the_gradient_is_that_of_autograd():
    demo = Path(str(resources.files("mecha_exp.examples.digits")))
    states = [load_file(demo / f"{name}.safetensors") for name in ("base", "expert_0_3", "expert_4_6")]
    vectors, shapes = _vectors(*states), {key: tuple(t.shape) for key, t in states[0].items()}
    evaluation = Evaluation(find_evaluator("digits", shapes), {"split": "validation"})
    anatomy = Anatomy.of(infos_of(vectors.base))
    for name in ("entropy", "cross_entropy"):
        loss = bound_loss(name, evaluation)
        for kind in ("expert", "layer", "block", "key"):
            coefficients = Coefficients.of(kind, vectors.keys, anatomy, 2, "base")
            values = np.random.default_rng(0).uniform(0, 1, coefficients.shape)

            value, gradient = loss_and_gradient(loss, coefficients, vectors, values, step=3)

            learned = torch.tensor(values, requires_grad=True)
            model = {
                key: states[0][key]
                + sum(
                    learned[coefficients.of_key[key], i].float() * (e[key] - states[0][key])
                    for i, e in enumerate(states[1:])
                )
                for key in vectors.keys
            }
            expected = loss(model, 3)
            expected.backward()
            assert value == pytest.approx(expected.item(), rel=1e-5)
            assert np.abs(gradient - learned.grad.numpy()).max() <= 1e-5 * np.abs(gradient).max()


def test_one_tensor_of_one_expert_is_in_memory_at_a_time():
    states = [{f"k{i}": torch.randn(50) for i in range(3)} for _ in range(9)]
    alive: list[weakref.ref] = []
    most = 0

    class Watched(MemorySource):
        def read(self, key):
            nonlocal most
            tensor = super().read(key)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            return tensor

    sources = tuple(Watched(InMemory(state)) for state in states)
    vectors = TaskVectors(sources[0], sources[1:], (False,) * 8, ("k0", "k1", "k2"), ())
    merged = vectors.merged({key: np.full(8, 0.5) for key in vectors.keys})
    products = vectors.products({key: torch.ones(50) for key in vectors.keys})

    assert most <= 3, "the base's, the expert's, and the last one while it is replaced"
    expected = [[float((state[k] - states[0][k]).sum()) for state in states[1:]] for k in vectors.keys]
    assert products == pytest.approx(np.array(expected), abs=1e-4)
    total = sum(state["k0"] - states[0]["k0"] for state in states[1:])
    assert torch.allclose(merged["k0"], states[0]["k0"] + 0.5 * total, atol=1e-5)


def test_other_parts_of_the_same_kind_are_learned_anew():
    one = Coefficients("block", ("a", "b"), {FIRST: 0, SECOND: 1}, 2)

    same = Coefficients("block", ("a", "b"), {FIRST: 0, SECOND: 1}, 2)
    other = Coefficients("block", ("a", "b"), {FIRST: 1, SECOND: 0}, 2)
    assert one.identity == same.identity and json.dumps(one.identity) != json.dumps(other.identity)


def test_adam_is_that_of_torch_and_stays_within_the_bounds():
    start = np.array([[0.3, 0.9], [0.5, 0.1]])
    ours, theirs = Adam.begin(start, 0.05, 0.0, 1.0), torch.tensor(start, requires_grad=True)
    optimiser = torch.optim.Adam([theirs], lr=0.05)
    for step in range(40):
        target = np.sin(step + np.arange(4)).reshape(2, 2) * 2
        ours = ours.after(2 * (ours.values - target))
        optimiser.zero_grad()
        ((theirs.clamp(0.0, 1.0) - torch.tensor(target)) ** 2).sum().backward()
        optimiser.step()

    assert ours.raw == pytest.approx(theirs.detach().numpy(), rel=1e-9)
    assert ours.values.min() >= 0 and ours.values.max() <= 1
    assert (ours.raw != ours.values).any(), "the example leaves the bounds"


def test_an_interrupted_descent_goes_on_where_it_was(learn, folder, monkeypatch):
    monkeypatch.setattr(learning, "SECONDS_BETWEEN_WRITES", 0.0)
    (folder / "stop.txt").write_text("23")
    assert learn("sweep.steps=40", "hydra.sweep.dir=cut").status == 130
    assert calls(folder) == list(range(24))
    (folder / "stop.txt").unlink()

    assert learn("sweep.steps=40", "hydra.sweep.dir=cut").status == 0
    assert calls(folder) == [*range(24), *range(23, 40)]
    assert learn("sweep.steps=40", "hydra.sweep.dir=whole", "store=null").status == 0

    both = [(folder / name / "learned_weights.csv").read_text() for name in ("cut", "whole")]
    assert both[0] == both[1]
    before = len(calls(folder))
    again = learn("sweep.steps=40", "hydra.sweep.dir=cut")
    assert again.status == 0 and "nothing to do" in again.out
    assert len(calls(folder)) == before


@pytest.mark.heavy
def test_the_same_seed_learns_the_same_from_validation_alone(app, folder):
    usual = ("sweep=gradient", "recipe=task_arithmetic", "sweep.steps=4", "sweep.by=block", "output=none")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        outcome = app(*usual, f"hydra.sweep.dir={name}", f"sweep.seed={seed}", "store=null")
        assert outcome.status == 0, outcome.err

    tables = [(folder / name / "learned_weights.csv").read_text() for name in "abc"]
    assert tables[0] == tables[1] != tables[2]
    learned = [read_outcomes(path) for path in sorted((folder / "a").glob("*/outcomes.parquet"))]
    on_test = [any(part.split == "test" and part.role == "point" for part in parts) for parts in learned]
    assert sum(on_test) == 2, "the best that was learned, and the best of the others"


def test_entries_that_ties_would_merge_get_weights_too(learn, folder):
    states = {"base": [0.0, 0.0], "a": [1.0, 0.2], "b": [-0.1, 0.7]}
    for name, pair in states.items():
        save_file({key: torch.tensor(pair) for key in (FIRST, SECOND)}, folder / f"{name}.safetensors")

    outcome = learn(
        "recipe=elected_task_arithmetic", "density=1", "sweep.by=key", "sweep.checkpoints=1", "sweep.high=2"
    )

    assert outcome.status == 0, outcome.err
    sweep = sweep_of(folder)
    # of a both entries have the elected sign; of b the second one
    learned = weights(sweep, "test_quadratic/key", 200)
    for key, (x, y) in {FIRST: (0.3, 0.8), SECOND: (0.6, 0.4)}.items():
        assert learned[key] == pytest.approx([x, (y - 0.2 * x) / 0.7], abs=5e-3)
    assert not (sweep / "task_vectors").exists()


def test_listed_points_are_measured_beside_what_is_learned(learn, folder):
    outcome = learn("alpha=0.2,0.4", "sweep.steps=10", "sweep.checkpoints=2")

    assert outcome.status == 0, outcome.err
    table = rows(sweep_of(folder))
    assert [(row["learned"], row["step"], row["alpha"]) for row in table] == [
        ("nothing", "0", "0.2"),
        ("nothing", "0", "0.4"),
        ("test_quadratic/expert", "5", "1"),
        ("test_quadratic/expert", "10", "1"),
    ]


def test_running_statistics_that_are_pooled_are_refused(learn, folder):
    for name, value in (("base", 0.0), ("a", 1.0), ("b", 2.0)):
        keys = {FIRST: torch.full((2,), value), SECOND: torch.full((2,), value)}
        norm = {f"bn.{key}": torch.full((2,), value + 1) for key in ("weight", "bias")}
        norm |= {f"bn.{key}": torch.full((2,), value + 1) for key in ("running_mean", "running_var")}
        norm["bn.num_batches_tracked"] = torch.tensor(3)
        save_file(keys | norm, folder / f"{name}.safetensors")

    outcome = learn("sweep.steps=2", "sweep.checkpoints=1")

    assert outcome.status == 1
    assert "the engine does not merge 'bn.running_" in outcome.err
    assert "engine.running_stats=merge" in outcome.err
    assert learn("sweep.steps=2", "sweep.checkpoints=1", "engine.running_stats=merge").status == 0


@pytest.mark.parametrize("factor", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_an_error_with_a_cure(learn, folder, factor):
    (folder / "factor.txt").write_text(factor)

    outcome = learn("sweep.steps=3", "sweep.checkpoints=1")

    assert outcome.status == 1
    assert (
        f"learned=test_quadratic/expert: the loss is {factor} at step 0. Lower sweep.rate=0.05" in outcome.err
    )
    assert "1 of 2 points failed" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.loss=entropy"], "gives no logits to differentiate. Register them with @logits_of"),
        (["sweep.loss=[]"], "sweep.loss is empty, so nothing would be learned: sweep.loss=entropy."),
        (["sweep.by=[]"], "sweep.by is empty, so nothing would be learned: sweep.by=expert."),
        (["sweep.start=true"], "sweep.start=True: expected one number from 0 to 1"),
        (["sweep.loss=hinge"], "sweep.loss=hinge: there is no such loss"),
        (
            ["evaluator=none", "evaluator.name=null"],
            "learns by a loss on an evaluator's data: choose one with evaluator=digits",
        ),
        (["recipe=slerp"], "learns a weight for each task vector, and recipe=slerp has no"),
        (["recipe=ties"], "learns the weights of base + sum of weight (expert - base), of files"),
        (
            ["models.base=a.safetensors,b.safetensors"],
            "learns the weights of one set of models, and models.base has several values",
        ),
        (
            ["sweep.by=blok"],
            "sweep.by=blok: there are no such parts to learn weights of. Did you mean 'block'",
        ),
        (["+blocks.0=0.5"], "'blocks' gives some another strength. Leave that out"),
        (["+sweep.replicates=3"], "sweep=gradient is for one set of experts and one seed"),
        (["models.experts=[]"], "learns the weights of experts: list them in models.experts"),
        (
            ["models.experts=[a.safetensors,a.safetensors]"],
            "sweep=gradient: models.experts lists a.safetensors twice.",
        ),
        (["sweep.steps=0"], "sweep.steps=0: expected a whole number, 1 or more"),
        (["sweep.checkpoints=x"], "sweep.checkpoints=x: expected a whole number, 1 or more"),
        (["sweep.rate=-1"], "sweep.rate=-1: expected a learning rate above 0"),
        (["sweep.low=2"], "sweep.low=2 is not below sweep.high=1"),
        (["sweep.high=high"], "sweep.high=high: expected a finite number"),
        (["sweep.start=1.5"], "sweep.start=1.5: expected one number from 0 to 1"),
        (["sweep.start=[0.1,0.2,0.3]"], "or a list of one for each of the 2 experts"),
        (["alpha=interval(0,1)"], "sweep=gradient needs values, not a range"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(learn, folder, words, message):
    outcome = learn(*words)

    assert outcome.status != 0
    assert message in " ".join(outcome.err.split()), outcome.err
    assert not (folder / "outputs" / "multiruns").exists() and not calls(folder)


def test_layers_of_a_model_without_any_are_refused(learn, folder):
    for name in ("base", "a", "b"):
        save_file({"w": torch.zeros(2), "v": torch.zeros(2)}, folder / f"{name}.safetensors")

    outcome = learn("sweep.by=layer")

    assert outcome.status == 1
    assert "sweep.by=layer: base has no layers that are known. Use sweep.by=key" in outcome.err


def test_damaged_progress_is_said(learn, folder):
    assert learn("sweep.steps=3", "hydra.sweep.dir=s", "sweep.checkpoints=1").status == 0
    (folder / "s" / "learning-test_quadratic-expert.json").write_text("{")

    outcome = learn("sweep.steps=3", "hydra.sweep.dir=s", "sweep.checkpoints=1")

    assert outcome.status == 1
    assert "is damaged" in outcome.err and "Delete it to learn anew" in outcome.err


def test_the_plan_says_that_more_points_follow(learn):
    outcome = learn("debug=plan", "alpha=0.2,0.4")

    assert outcome.status == 0, outcome.err
    assert "The sweep makes more points while it runs" in outcome.out


@pytest.mark.usefixtures("figures")
def test_the_figure_has_the_loss_and_the_map_of_weights(app, folder):
    outcome = app(
        "sweep=gradient", "recipe=task_arithmetic", "sweep.steps=4", "sweep.by=block", "output=none"
    )

    assert outcome.status == 0, outcome.err
    sweep = sweep_of(folder)
    assert {"sweep.png", "sweep-weights.png"} <= {path.name for path in sweep.glob("*.png")}
    page = (sweep / "report.html").read_text()
    assert "The loss over the steps" in page and "The learned weight of each expert in each part" in page
    with (sweep / "learning.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 4 and all(value > 0 for value in losses)
    values = json.loads((sweep / "1" / "run.json").read_text())["block_weights"]
    assert set(values) == {f"weights.{place}" for place in range(3)}


def _vectors(base, *experts) -> TaskVectors:
    sources = [MemorySource(InMemory(state)) for state in (base, *experts)]
    return TaskVectors(sources[0], tuple(sources[1:]), (False,) * len(experts), tuple(base), ())


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_learning_that_is_killed_again_and_again_gives_the_undisturbed_weights(tmp_path: Path):
    words = ["sweep=gradient", "recipe=task_arithmetic", "sweep.by=[expert,block]", "sweep.steps=300"]

    printed("sweep_killing", tmp_path, 0, 8, *words, "output=none", "tracking=none")

    sweeps = [
        next((tmp_path / name / "outputs" / "multiruns").iterdir()) for name in ("undisturbed", "disturbed")
    ]
    for name in ("learned_weights.csv", "learning.csv"):
        assert (sweeps[0] / name).read_text() == (sweeps[1] / name).read_text()
    assert [row["accuracy"] for row in rows(sweeps[0])] == [row["accuracy"] for row in rows(sweeps[1])]
