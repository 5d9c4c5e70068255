"""Views and methods with data, as a user's own file declares them, beside the built-in ones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp as m
from mecha_exp.checkpoint import open_stored
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.registry import all_methods, resolve_method
from mecha_exp.plugins import load_plugins
from mecha_exp.sources.statistics.header import StatisticsHeader, fingerprint

VIEWS = [method for method in all_methods() if method.kind is Kind.VIEW]
PLUGIN = '''
import torch
from torch import Tensor

from mecha_exp import Parameter, Return, StateDict, merge_method
from mecha_exp.extensions.merge_methods import RenamedSource


@merge_method(view=True, arranges="keys")
def below_a_prefix(
    a: Parameter(StateDict[Tensor]), prefix: Parameter(str), end: Parameter(str) = ""
) -> Return(Tensor):
    """The keys below a prefix, without it."""
    keys = (key for key in a.all_keys() if key.startswith(prefix) and key.endswith(end))
    return RenamedSource(a, {key.removeprefix(prefix): key for key in keys})


@merge_method(composite=True, statistics="mask", paper_keys={"axes:1": "mean", "default": "merge"})
def masked_first(
    *models: Parameter(Tensor, "weight"), statistics: Parameter(Tensor, "param")
) -> Return(Tensor, "weight"):
    """The first model where its mask is 1, and the second elsewhere."""
    mask, _ = dict(statistics.arguments)["files"]
    return of_two(models[0], models[1], mask)


@merge_method(elementwise=True, register=False)
def of_two(a: Parameter(Tensor), b: Parameter(Tensor), mask: Parameter(Tensor)) -> Return(Tensor, "weight"):
    return torch.where(mask > 0, a, b)
'''
A = {"tower.x.weight": torch.full((2, 3), 1.0), "tower.x.bias": torch.full((2,), 2.0), "head": torch.ones(1)}
B = {"x.weight": torch.full((2, 3), 5.0), "x.bias": torch.full((2,), 6.0)}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, MergeMethod]:
    """The methods of a file of the user's own, beside the models `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(PLUGIN)
    save_file(A, "a.safetensors")
    save_file(B, "b.safetensors")
    load_plugins(["own.py"])
    return {name: resolve_method(name) for name in ("below_a_prefix", "masked_first")}


def test_a_view_of_a_users_own_is_merged_in_place(plugin):
    tower = plugin["below_a_prefix"]("a.safetensors", prefix="tower.")

    made = m.merge(m.weighted_sum(tower, "b.safetensors", alpha={"x.bias": 1.0, "default": 0.25}))

    assert {key: tensor.unique().tolist() for key, tensor in made.items()} == {"x.weight": [2], "x.bias": [6]}
    with m.plan([m.Job(tower, {})]) as planned:
        assert planned.whole_bytes == 0
        assert planned.bytes_read == sum(A[key].nbytes for key in A if key.startswith("tower."))


def test_views_of_one_model_that_differ_in_a_value_are_told_apart(plugin):
    view = plugin["below_a_prefix"]
    weights, biases = (view("a.safetensors", prefix="tower.", end=end) for end in ("weight", "bias"))

    assert m.merge(weights | biases).keys() == {"x.weight", "x.bias"}
    with m.plan(
        [m.Job(weights | biases | view("a.safetensors", prefix="tower.", end="bias"), {})]
    ) as planned:
        assert len(planned.sources) == 3  # the file, and two views


def test_a_view_of_a_users_own_is_called_from_the_command_line(plugin, app):
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/own.yaml").write_text(
        "# @package _global_\nrecipe:\n  method: weighted_sum\n  alpha: 0.25\n  b: b.safetensors\n"
        "  a: {method: below_a_prefix, a: a.safetensors, prefix: tower.}\n"
    )

    made = app(
        *("--config-dir=conf", "recipe=own", "plugins=[own.py]", "output.path=made.safetensors"),
        *("tracking=none", "evaluator=none"),
        cwd=Path.cwd(),
    )

    assert made.status == 0, made.out + made.err
    assert {key: tensor.unique().tolist() for key, tensor in load_file("made.safetensors").items()} == {
        "x.weight": [2], "x.bias": [3],
    }  # fmt: skip


def masks(name: str, mask: dict[str, torch.Tensor], kind: str = "mask") -> str:
    """Write statistics of a model of the current folder."""
    with open_stored(Path(f"{name}.safetensors")) as stored:
        header = StatisticsHeader(name, "", fingerprint(stored), "data", "", 500, 0, "true", (kind,))
    path = f"{name}.{kind}.safetensors"
    save_file({f"{kind}/{key}": tensor for key, tensor in mask.items()}, path, header.metadata())
    return path


def test_a_method_of_a_users_own_receives_the_statistics_that_it_declares(plugin):
    save_file({key: tensor + 1 for key, tensor in B.items()}, "c.safetensors")
    mask = {"x.weight": torch.tensor([[1.0, 0, 1]] * 2), "x.bias": torch.tensor([0.0, 1])}
    files = [masks("b", mask), masks("c", mask)]
    method, models = plugin["masked_first"], ("b.safetensors", "c.safetensors")

    made = m.merge(method(*models, statistics=m.statistics(*files, kind="mask")))

    assert made["x.weight"].tolist() == [[5, 6, 5]] * 2
    assert made["x.bias"].tolist() == [7, 6]
    with pytest.raises(m.RecipeError, match="masked_first: it needs the statistics mask, got fisher"):
        other = [masks("b", mask, "fisher"), masks("c", mask, "fisher")]
        m.merge(method(*models, statistics=m.statistics(*other, kind="fisher")))
    with pytest.raises(m.RecipeError, match=r"statistics of c, whose content is not that of models\[0\]"):
        m.merge(method(*models, statistics=m.statistics(*reversed(files), kind="mask")))
    with pytest.raises(m.RecipeError, match=r"masked_first: statistics is 1, and not statistics\(FILE,"):
        m.merge(method(*models, statistics=1))
    by_kind = m.merge(m.for_keys(method(*models, statistics=m.statistics(*files, kind="mask")), "paper"))
    assert by_kind["x.bias"].tolist() == [6.5, 6.5]
    assert torch.equal(by_kind["x.weight"], made["x.weight"])


@pytest.mark.parametrize("view", VIEWS, ids=lambda method: method.identifier)
def test_a_view_of_a_merge_is_refused_by_its_name(view: MergeMethod):
    values = {
        spec.name: 1 if spec.interface is int else "0:1"
        for spec in view.signature.parameters
        if spec.required and not spec.is_model
    }
    models = [m.slerp(B, B) for spec in view.signature.parameters if spec.is_model]

    with pytest.raises(m.RecipeError, match=rf"{view.identifier}: \w+ is slerp\(a, b\), a merge"):
        m.merge(view(*models, **values))


def test_declarations_that_cannot_be_kept_are_refused():
    with pytest.raises(m.RecipeError, match="the first parameter of a view is the model"):

        @m.merge_method(view=True, register=False)
        def without_models(size: m.Parameter(int)) -> m.Return(torch.Tensor):
            return size

    with pytest.raises(m.RecipeError, match="needs the statistics gram, as a parameter `statistics`"):

        @m.merge_method(statistics="gram", register=False)
        def without_statistics(a: m.Parameter(torch.Tensor)) -> m.Return(torch.Tensor):
            return a
