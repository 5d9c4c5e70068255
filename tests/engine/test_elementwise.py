"""What is declared elementwise is tried before a merge: an entry depends on the same entry of each input."""

import random
from collections.abc import Callable

import pytest
import torch
from method_calls import METHODS, models_in, recipe_of
from torch import Tensor

import mecha_exp as m
from mecha_exp import Parameter, Return, Tile, merge_method, reduction
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.model_values import with_model_values
from mecha_exp.engine.planner.elementwise import (
    check_elementwise,
    refuse_unless_elementwise,
    works_on_entries,
)
from mecha_exp.graph.nodes import MergeNode

Function = Callable[[Tensor, Tensor], Tensor]


def marked_entries(a: Tensor) -> Tensor:
    marks = torch.zeros_like(a)
    marks[a > 0.7] = 1.0
    return marks


ELEMENTWISE: dict[str, Function] = {
    "arithmetic": lambda a, b: (a + b * 3 - 1) / (b.abs() + 1),
    "functions": lambda a, b: torch.lerp(a, b, 0.3).tanh().exp() + a.abs().pow(0.3).copysign(b),
    "choices": lambda a, b: torch.where((a > 0) & (b < 1) | a.isinf(), a, torch.maximum(a, b)),
    "other dtypes": lambda a, b: (a.double() + b.double()).to(a.dtype) + torch.complex(a, b).abs(),
    "not a number": lambda a, b: (a.log() - b.sqrt()).nan_to_num(0),
    "writing into its own": lambda a, b: a.clone().mul_(2).add_(b),
    "marks": lambda a, b: marked_entries(a) + b,
    "a table": lambda a, b: torch.tensor([0.0, 0.5, 1.0])[(a > 0.7).long()],
    "across models": lambda a, b: torch.stack([a, b]).median(0).values + torch.stack([a, b], -1).mean(-1),
    "another shape and back": lambda a, b: torch.cat([a, b]).view(2, -1).mean(0) + a.view(-1, 1).squeeze(-1),
    "ranks across models": lambda a, b: torch.stack([a, b]).sort(0).values[0] + b,
    "by entry in words": lambda a, b: torch.einsum("i,i->i", a, b),
    "numpy": lambda a, b: torch.from_numpy(a.numpy() * 2) + b,
}
"""Functions of an entry of each, however they are written."""


OTHERS: dict[str, tuple[str, Function]] = {
    "norm": ("'norm' looks at", lambda a, b: a * (a.norm() / b.norm())),
    "mean": ("'mean' looks at", lambda a, b: a - b.mean()),
    "quantile": ("'quantile' looks at", lambda a, b: a.clamp(max=a.abs().quantile(0.9))),
    "topk": ("'topk' looks at", lambda a, b: a * (a >= a.topk(3).values[-1])),
    "sort": ("'sort' looks at", lambda a, b: a.sort().values),
    "order": ("'argsort' looks at", lambda a, b: a[b.argsort()]),
    "softmax": ("'softmax' looks at", lambda a, b: a.softmax(-1)),
    "normalize": ("'normalize' looks at", lambda a, b: torch.nn.functional.normalize(a, dim=0)),
    "cosine": ("'cosine_similarity' looks at", lambda a, b: a * torch.cosine_similarity(a, b, 0)),
    "cumsum": ("'cumsum' looks at", lambda a, b: a.cumsum(0)),
    "roll": ("'roll' looks at", lambda a, b: a.roll(1)),
    "flip": ("'flip' looks at", lambda a, b: a.flip(0) + b),
    "fft": ("'fft_fft' looks at", lambda a, b: torch.fft.fft(a).real),
    "matmul": ("'matmul' looks at", lambda a, b: a * (a @ b)),
    "an entry": ("'__getitem__' looks at", lambda a, b: a - b[0]),
    "some entries": ("'__getitem__' looks at", lambda a, b: a[a > 0]),
    "halves": ("'chunk' looks at", lambda a, b: torch.cat(a.chunk(2))),
    "a decision": ("'any' looks at", lambda a, b: b if a.isnan().any() else a),
    "a comparison": ("'allclose' looks at", lambda a, b: a if torch.allclose(a, b) else b),
    "number of entries": (r"it reads the number of entries \('numel'\)", lambda a, b: a / a.numel()),
    "shape": (r"it reads the number of entries \('shape'\)", lambda a, b: a / a.shape[0]),
    "places": ("it reads the number of entries", lambda a, b: a * torch.arange(len(a))),
    "random": ("'rand_like' draws random numbers", lambda a, b: a + torch.rand_like(a)),
    "random masks": ("'bernoulli' draws random numbers", lambda a, b: a * torch.bernoulli(b.abs())),
    "random of Python": ("it gives other numbers when it is called again", lambda a, b: a * random.random()),
    "hidden from torch": ("depends on the other entries", lambda a, b: a * float(a.numpy().mean())),
}
"""Functions that see more than one entry, and how the error calls what gives them away."""


def declared(function: Function, name: str = "mine") -> m.MergeMethod:
    @merge_method(elementwise=True, register=False, identifier=name)
    def method(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor):
        return function(a, b)

    return method


MODELS = ({"w": torch.linspace(0.2, 3, 30)}, {"w": torch.linspace(2, 0.1, 30)})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_elementwise_is_merged(name):
    made = m.merge(declared(ELEMENTWISE[name])(*MODELS))

    torch.testing.assert_close(made["w"], ELEMENTWISE[name](MODELS[0]["w"], MODELS[1]["w"]).float())


@pytest.mark.parametrize("name", OTHERS)
def test_what_sees_more_than_an_entry_is_refused_by_the_name_of_the_operation(name):
    reason, function = OTHERS[name]

    with pytest.raises(m.RecipeError, match=f"'mine' is declared elementwise, but .*{reason}"):
        m.merge(declared(function)(*MODELS))


@pytest.mark.parametrize("fuse", ["always", "never"])
def test_it_is_refused_before_anything_is_written(fuse, tmp_path):
    node = declared(OTHERS["norm"][1])(*MODELS)

    with pytest.raises(m.RecipeError, match="Declare it with `@merge_method` for whole tensors"):
        m.merge(node, tmp_path / "out.safetensors", options=m.EngineOptions(fuse=fuse))

    assert not list(tmp_path.iterdir())


def test_a_method_that_asks_for_its_place_may_use_it():
    @merge_method(elementwise=True, register=False)
    def by_place(a: Parameter(Tensor), tile: Tile) -> Return(Tensor):
        return a + torch.arange(tile.start, tile.stop)

    assert m.merge(by_place({"w": torch.zeros(4)}))["w"].tolist() == [0, 1, 2, 3]


def test_the_terms_of_a_sum_are_tried_too():
    @reduction(sums=True, register=False)
    def centred(a: Parameter(Tensor)) -> Return(Tensor, "param"):
        return (a - a.mean()).square()

    with pytest.raises(
        m.RecipeError, match="'centred' is declared a sum or rank by entry, but 'mean' looks at"
    ):
        m.merge(m.weighted_sum(*MODELS, alpha=centred(MODELS[0])))


def test_what_looks_at_all_entries_before_it_fails_is_refused():
    def of_large_numbers(a: Tensor, b: Tensor) -> Tensor:
        if a.max() < 1e6:
            raise ValueError("too small")
        return a

    with pytest.raises(m.MechaError, match="'max' looks at more than one entry"):
        m.merge(declared(of_large_numbers)({"w": torch.full([3], 1e7)}, {"w": torch.ones(3)}))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return models_in(tmp_path_factory.mktemp("models"), {"w": ((3, 4), torch.float32)})


def test_every_built_in_method_that_is_declared_elementwise_is(files):
    tried = set()
    for method in METHODS:
        roots = with_model_values(expand([recipe_of(method, files)]))
        program = compile_program(roots, torch.float32)
        for node, call in program.calls.items():
            if isinstance(node, MergeNode) and works_on_entries(node, program):
                refuse_unless_elementwise(node, call, program)
                tried.add(node.method)

    assert len(tried) > 50


def test_a_method_is_tried_once_for_all_points_of_a_sweep():
    calls = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        calls.append(len(a))
        return a + b

    method = declared(counted)
    programs = [
        compile_program([m.weighted_sum(method(*MODELS), MODELS[0], alpha=x)], torch.float32)
        for x in (0.1, 0.2)
    ]
    check_elementwise(programs[:1])
    once = len(calls)
    calls.clear()
    check_elementwise(programs)

    assert len(calls) == once > 0
