"""RegMean++ and DF-Merge: statistics that belong to a merge are measured for it, as the authors' code does.

The formulas are those of the authors' code, in plain torch.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import mecha_exp as m
from mecha_exp.app.recipes.files import with_files
from mecha_exp.calibration import (
    Expert,
    Request,
    Subject,
    calibrate,
    calibrate_along_merge,
    calibrate_scaled,
)
from mecha_exp.calibration.seams import files as measured
from mecha_exp.calibration.sequential_grams import blocks_of
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, EvaluationError, RecipeError
from mecha_exp.sources.statistics.header import METADATA

WIDTH, BLOCKS, EXAMPLES = 6, 3, 40
NAMES = ("a", "b", "c")
Tensors = dict[str, Tensor]


class Block(nn.Module):
    """A residual block of two linear layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """An embedding, blocks and a head, as a transformer has them."""

    def __init__(self, weights: Tensors | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        if weights is not None:
            self.load_state_dict(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data_of(name: str) -> Tensor:
    """The examples of an expert's task: rows of several positions each."""
    return torch.randn(EXAMPLES, 2, 4, generator=torch.Generator().manual_seed(100 + ord(name)))


def subject_of(weights: Tensors, name: str, network: type[nn.Module] = Network) -> Subject:
    module = network(weights).eval()
    return Subject(module, data_of(name), lambda x: module(x), lambda x: torch.tensor([0, 2]))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    """A base and three experts in the current folder; the experts are returned."""
    monkeypatch.chdir(tmp_path)
    made = []
    for seed, name in enumerate(("base", *NAMES)):
        torch.manual_seed(seed)
        weights = {
            key: value + torch.rand_like(value) * (".norm." in key)  # a plain norm's outputs are singular
            for key, value in Network().state_dict().items()
        }
        save_file(weights, f"{name}.safetensors")
        made.append(weights)
    return made[1:]


def along_merge(alpha: float = 0.9, names: Sequence[str] = NAMES, **changes: Any) -> list[str]:
    """Measure the experts along their merge; the names of the files."""
    with ExitStack() as stack:
        experts = []
        for name in names:
            stored = stack.enter_context(open_stored(Path(f"{name}.safetensors")))
            weights = {key: stored.read(key) for key in stored.keys()}
            given = {"network": Network, "output": f"{name}.along.safetensors", **changes}
            subject = subject_of(weights, name, given["network"])
            request = Request((), data=f"data of {name}")
            experts.append(Expert(subject, stored, request, Path(given["output"])))
        calibrate_along_merge(experts, alpha)
    return [f"{name}.along.safetensors" for name in names]


def of_each_alone(kind: str) -> list[str]:
    """Measure each expert by itself, as `calibrate` does; the names of the files."""
    for name in NAMES:
        with open_stored(Path(f"{name}.safetensors")) as stored:
            subject = subject_of({key: stored.read(key) for key in stored.keys()}, name)
            request = Request((kind,), labels="true")
            calibrate(subject, stored, request, Path(f"{name}.own.safetensors"))
    return [f"{name}.own.safetensors" for name in NAMES]


def plus_plus(files: Sequence[str], alpha: float = 0.9, names: Sequence[str] = NAMES) -> m.Node:
    given = m.statistics(*files, kind="gram")
    return m.regmean_plus_plus(*(f"{name}.safetensors" for name in names), statistics=given, alpha=alpha)


def official_plus_plus(models: list[Tensors], alpha: float) -> Tensors:
    """`RegMeanAlgorithmPlusPlus.run` of the authors, in float64: each block behind the merged ones."""
    models = [{key: value.double() for key, value in model.items()} for model in models]
    merged = {key: sum(model[key] for model in models) / len(models) for key in models[0]}
    network, inputs = Network().double(), [data_of(name).double() for name in NAMES]
    network.load_state_dict(merged)
    with torch.no_grad():
        inputs = [network.embed(x) for x in inputs]
        for number in range(BLOCKS):
            start, grams = f"layers.{number}.", []
            for model, x in zip(models, inputs, strict=True):
                block, rows = Block().double(), {}
                block.load_state_dict(
                    {k.removeprefix(start): v for k, v in model.items() if k.startswith(start)}
                )
                for name in ("up", "down"):
                    getattr(block, name).register_forward_pre_hook(
                        lambda _, given, name=name, rows=rows: rows.update({name: given[0].flatten(0, 1)})
                    )
                block(x)
                grams.append({name: x.T @ x / len(x) for name, x in rows.items()})
            for name in ("up", "down"):
                key = f"{start}{name}.weight"
                damped = [g[name] * (alpha + (1 - alpha) * torch.eye(len(g[name]))) for g in grams]
                right = sum(g @ model[key].T for g, model in zip(damped, models, strict=True))
                merged[key] = (torch.linalg.inv(sum(damped)) @ right).T
            network.load_state_dict(merged)
            inputs = [network.layers[number](x) for x in inputs]
    return merged


@pytest.mark.parametrize("alpha", [0.3, 0.9, 1.0])
def test_each_block_is_measured_behind_the_merged_ones_as_in_the_authors_code(models, alpha):
    made = m.merge(plus_plus(along_merge(alpha), alpha))

    expected = official_plus_plus(models, alpha)
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value.float(), rtol=1e-5, atol=1e-5, msg=key)


def test_the_first_block_is_that_of_regmean_and_later_ones_are_not(models):
    along_merge()
    for name, model in zip(NAMES, models, strict=True):
        with open_stored(Path(f"{name}.safetensors")) as stored:
            subject = subject_of({key: stored.read(key) for key in stored.keys()}, name)
            # what lies before the blocks is the mean in RegMean++
            mean = sum(each["embed.weight"] for each in models) / 3
            bias = sum(each["embed.bias"] for each in models) / 3
            calibrate(subject, stored, Request(("gram",)), Path(f"{name}.own.safetensors"))
            rows = F.linear(data_of(name), mean, bias).flatten(0, 1)
        norm = F.layer_norm(rows, (WIDTH,), model["layers.0.norm.weight"], model["layers.0.norm.bias"])
        along = load_file(f"{name}.along.safetensors")
        torch.testing.assert_close(
            along["gram/layers.0.up.weight"], norm.T @ norm / len(norm), rtol=1e-4, atol=1e-5
        )
        own = load_file(f"{name}.own.safetensors")
        assert own.keys() - along.keys() == {"gram/embed.weight", "gram/head.weight"}
        assert not torch.allclose(own["gram/layers.2.up.weight"], along["gram/layers.2.up.weight"], rtol=0.01)


class Pair(nn.Module):
    """Layers without a list of blocks, called in another order than they are named."""

    def __init__(self, weights: Tensors | None = None) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 3)
        self.first = nn.Linear(4, WIDTH)
        if weights is not None:
            self.load_state_dict(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_a_network_without_lists_has_a_block_for_each_layer_in_the_order_of_calls(models):
    assert blocks_of(subject_of(Pair().state_dict(), "a", Pair)) == ["first", "last"]
    assert blocks_of(subject_of(models[0], "a")) == [f"layers.{number}" for number in range(BLOCKS)]


class Twice(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x) + self.first(-x)))


def test_a_block_that_is_called_twice_is_refused():
    with pytest.raises(
        ConfigError, match=r"the block 'first' of Twice is called 2 times.*Merge by recipe=regmean"
    ):
        blocks_of(subject_of(Twice().state_dict(), "a", Twice))


def test_experts_of_other_networks_are_refused(models):
    save_file(dict(Pair().state_dict()), "b.safetensors")

    with ExitStack() as stack:
        experts = []
        for name, network in (("a", Network), ("b", Pair)):
            stored = stack.enter_context(open_stored(Path(f"{name}.safetensors")))
            subject = subject_of({key: stored.read(key) for key in stored.keys()}, name, network)
            experts.append(Expert(subject, stored, Request((), data="x"), Path(f"{name}.along.safetensors")))
        with pytest.raises(
            ConfigError, match=r"the networks of a\.safetensors and b\.safetensors have other param"
        ):
            calibrate_along_merge(experts)


def test_an_interrupted_measurement_goes_on_at_its_block(models, monkeypatch):
    expected = [Path(file).read_bytes() for file in along_merge()]
    for name in NAMES:
        Path(f"{name}.along.safetensors").unlink()
    runs: list[str] = []
    forward = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        runs.append("")
        if len(runs) == 2 * EXAMPLES * len(NAMES):  # in the second block
            raise KeyboardInterrupt
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", counted)
    with pytest.raises(KeyboardInterrupt):
        along_merge()
    before = len(runs)

    files = along_merge()

    assert [Path(file).read_bytes() for file in files] == expected
    assert len(runs) - before < sum(range(1, BLOCKS + 1)) * EXAMPLES * len(NAMES) + BLOCKS
    assert not list(Path().glob(".*calibration"))


def test_an_example_that_fails_is_named(models):
    class Failing(Network):
        def forward(self, x: Tensor) -> Tensor:
            if torch.equal(x, data_of("b")[3]):
                raise ValueError("three")
            return super().forward(x)

    with pytest.raises(EvaluationError, match="example 3 fails: ValueError: three"):
        along_merge(network=Failing)


def test_what_lies_outside_the_blocks_is_counted_as_not_measured(models, caplog):
    m.merge(plus_plus(along_merge()))

    outside = 2 * ["embed"] + 2 * ["head"]  # with their biases
    inside = BLOCKS * ["norm", "norm", "up bias", "down bias"]
    count, keys = len(outside + inside), len(models[0])
    assert f"{count} of {keys} keys have no gram and get the mean of the models" in caplog.text


def test_gram_matrices_of_another_merge_are_refused(models):
    files = along_merge(0.9)

    for node, message in (
        (plus_plus(files, 0.5), r"measured with alpha=0\.9, and the call has 0\.5"),
        (plus_plus(files[:2], names=NAMES[:2]), "measured along the merge of other models"),
        (
            m.regmean(*(f"{n}.safetensors" for n in NAMES), statistics=m.statistics(*files, kind="gram")),
            "measured along a merge by regmean_plus_plus, and is for that alone",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            m.merge(node)


def test_gram_matrices_of_each_expert_by_itself_are_refused(models):
    files = of_each_alone("gram")

    with pytest.raises(RecipeError, match=r"recipe=regmean_plus_plus measures them"):
        m.merge(plus_plus(files))


# DF-Merge


def scaled(scales: Sequence[float], labels: str = "true") -> list[str]:
    """Measure the experts at their scales; the names of the files."""
    for name, scale in zip(NAMES, scales, strict=True):

        def make(stored: Any, name: str = name) -> Subject:
            return subject_of({key: stored.read(key) for key in stored.keys()}, name)

        calibrate_scaled(
            Path("base.safetensors"), Path(f"{name}.safetensors"), scale, make,
            Request((), labels=labels, data=f"data of {name}"), Path(f"{name}.scaled.safetensors"),
        )  # fmt: skip
    return [f"{name}.scaled.safetensors" for name in NAMES]


def test_the_scaled_model_of_a_pickle_is_measured(models):
    torch.save(load_file("b.safetensors"), "pickled.bin")
    expected, made = Path("expected.safetensors"), Path("made.safetensors")

    for name, output in (("b.safetensors", expected), ("pickled.bin", made)):
        calibrate_scaled(
            Path("base.safetensors"), Path(name), 0.5,
            lambda stored: subject_of({key: stored.read(key) for key in stored.keys()}, "b"),
            Request((), labels="true", data="data of b"), output,
        )  # fmt: skip

    of_file = load_file(expected)
    assert of_file.keys() == load_file(made).keys()
    assert all(torch.equal(tensor, of_file[key]) for key, tensor in load_file(made).items())


def df_merge(files: Sequence[str], scales: Any, base: str = "base") -> m.Node:
    given = m.statistics(*files, kind="fisher")
    models = [f"{name}.safetensors" for name in NAMES]
    return m.df_merge(f"{base}.safetensors", *models, statistics=given, scales=scales)


def official_df_merge(base: Tensors, models: list[Tensors], scales: Sequence[float]) -> Tensors:
    """`DFMerge._merge_step` of the authors, with the information of true labels."""
    above, below = ({key: torch.zeros_like(value) for key, value in base.items()} for _ in range(2))
    for name, model, scale in zip(NAMES, models, scales, strict=True):
        network = Network({key: base[key] + scale * (model[key] - base[key]) for key in base})
        fisher = {key: torch.zeros_like(value) for key, value in base.items()}
        for x in data_of(name):
            network.zero_grad()
            F.cross_entropy(network(x), torch.tensor([0, 2]), reduction="sum").backward()
            for key, parameter in network.named_parameters():
                fisher[key] += parameter.grad.square() / EXAMPLES
        for key in base:
            size = fisher[key] + 1e-12
            above[key] += size * scale * (model[key] - base[key])
            below[key] += size
    return {key: base[key] + len(models) * above[key] / below[key] for key in base}


@pytest.mark.parametrize("scales", [(0.2, 0.5, 1.0), (0.4, 0.4, 0.4)])
def test_scaled_task_vectors_are_weighted_by_the_information_of_the_scaled_models(models, scales):
    made = m.merge(df_merge(scaled(scales), scales if len(set(scales)) > 1 else scales[0]))

    expected = official_df_merge(load_file("base.safetensors"), models, scales)
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_information_of_another_scale_or_base_is_refused(models):
    files = scaled((0.2, 0.5, 1.0))

    for node, message in (
        (df_merge(files, (0.2, 0.6, 1.0)), r"measured at the scale 0\.5, and the call has 0\.6"),
        (df_merge(files, 0.2), r"b\.scaled\.safetensors was measured at the scale 0\.5"),
        (df_merge(files, (0.2, 0.5, 1.0), "a"), "belongs to a task vector from another base, whose content"),
        (df_merge([files[1], *files[1:]], (0.5, 0.5, 1.0)), r"not that of models\[0\], a\.safetensors"),
        (
            m.fisher(*(f"{n}.safetensors" for n in NAMES), statistics=m.statistics(*files, kind="fisher")),
            r"holds statistics of base\.safetensors \+ 0\.2 \(a\.safetensors - base\)",
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            m.merge(node)


def test_information_of_the_experts_themselves_is_refused(models):
    files = of_each_alone("fisher")

    with pytest.raises(RecipeError, match="by itself, and df_merge needs those that belong to the merge"):
        m.merge(df_merge(files, 0.5))


# measured for a recipe


def asked(kind: str, **changes: Any) -> Any:
    own = {"along_merge": {"alpha": 0.9}, "scaled": {"base": "base.safetensors", "scales": 0.5}}
    settings = {"data": ["one", "two"], "module": "net.py:subject", **changes.pop("settings", {})}
    given = {"calibrate": kind, "models": ["a.safetensors", "b.safetensors"], **own.get(kind, {})}
    return {"statistics": {"files": {**given, "settings": settings, **changes}}}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (asked("along"), "calibrate: along: expected along_merge or scaled.*Did you mean 'along_merge'"),
        (asked("scaled", alhpa=1), "calibrate=scaled: it takes no 'alhpa'"),
        ({**asked("scaled")["statistics"]["files"], "settings": 3}, "calibration.count=100, got 3"),
        (asked("scaled", base=None), "models.base: the method scales task vectors from a base"),
        (asked("scaled", scales=[1.0]), "scales: 1 is given for 2 experts"),
        (asked("along_merge", alpha={"default": 1}), "damping: expected one number from 0 to 1 for all"),
        (asked("along_merge", alpha=1.5), "damping: expected one number from 0 to 1"),
        (asked("scaled", settings={"data": []}), r"models\.data=\[a\.jsonl,b\.jsonl\]"),
        (asked("scaled", settings={"data": ["one"]}), "data of 1 task are given for 2 experts"),
        (asked("scaled", settings={"cuont": 3}), "calibration.cuont: there is no such.*Did you mean 'count'"),
        (asked("scaled", settings={"count": "3"}), "calibration.count: expected a whole number, got '3'"),
        (asked("scaled", settings={"count": 0}), "calibration.count: expected 1 or more, got 0"),
        (asked("scaled", settings={"labels": "all"}), "expected sampled, true or exact, got 'all'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_measurement_is_said_before_any_work(models, recipe, message):
    with pytest.raises(ConfigError, match=message):
        with_files(recipe, [])
    assert not Path("outputs").exists()


@pytest.mark.parametrize("kind", ["along_merge", "scaled"])
def test_statistics_are_measured_once_for_each_set_of_values(bench, kind, monkeypatch):
    save_file(load_file("a.safetensors"), "base.safetensors")
    recipe = asked(kind, settings={"data": ["a.pt", "b.pt"], "count": 20})
    first = with_files(recipe, [])["statistics"]["files"]
    monkeypatch.setattr("mecha_exp.calibration.sequential_grams.calibrate_along_merge", None)
    monkeypatch.setattr("mecha_exp.calibration.calibrate_along_merge", None)
    monkeypatch.setattr("mecha_exp.calibration.calibrate_scaled", None)

    assert with_files(recipe, [])["statistics"]["files"] == first
    with safe_open(first[0], framework="pt") as file:
        assert json.loads(file.metadata()[METADATA])["count"] == 20
    other = {"alpha": 0.5} if kind == "along_merge" else {"scales": 0.7}
    with pytest.raises(TypeError):  # measured anew
        with_files(asked(kind, settings={"data": ["a.pt", "b.pt"], "count": 20}, **other), [])
    content = torch.load("a.pt", weights_only=True)
    torch.save({**content, "images": content["images"] + 1}, "a.pt")
    with pytest.raises(TypeError):  # other data
        with_files(recipe, [])


@pytest.mark.parametrize("kind", ["along_merge", "scaled"])
def test_statistics_have_the_same_bytes_wherever_the_models_lie(bench, kind, monkeypatch):
    settings = {"data": ["a.pt", "b.pt"], "module": f"{bench / 'net.py'}:subject", "count": 20}
    made = []
    for folder in ("here", "there"):
        (bench / folder).mkdir()
        for name, source in (("a", "a"), ("b", "b"), ("base", "a")):
            save_file(load_file(f"{source}.safetensors"), bench / folder / f"{name}.safetensors")
        monkeypatch.setattr(measured, "STATISTICS", bench / folder / "statistics")
        recipe = asked(kind, settings=settings)
        given = recipe["statistics"]["files"]
        given["models"] = [f"{folder}/{name}.safetensors" for name in "ab"]
        if kind == "scaled":
            given["base"] = f"{folder}/base.safetensors"
        files = with_files(recipe, [])["statistics"]["files"]
        made.append([Path(file).read_bytes() for file in files])

    assert made[0] == made[1]


def test_few_examples_are_worth_a_warning_with_their_number(models, caplog):
    m.merge(plus_plus(along_merge()))
    m.merge(df_merge(scaled((0.5, 0.5, 0.5)), 0.5))

    assert "a.along.safetensors and 2 more: gram of only 40 examples. A few hundred tell more." in caplog.text
    assert "fisher of only" not in caplog.text  # few for each of many scales are meant


@m.merge_method(register=False)
def by_norms(
    *models: m.Parameter(m.StateDict[Tensor]),
    statistics: m.Parameter(m.StateDict[Tensor], "param"),
    **kwargs: object,
) -> m.Return(Tensor):
    """The mean of the models, of linear layers weighed by the mean size of their inputs."""
    key = str(kwargs["key"])
    if key not in statistics:
        return sum(model[key] for model in models) / len(models)
    sizes = [part[key].mean() for part in statistics.parts]
    return sum(size * model[key] for size, model in zip(sizes, models, strict=True)) / sum(sizes)


@pytest.mark.parametrize("kind", ["norm", "mean", "gradient"])
def test_a_method_of_ones_own_reads_other_kinds_of_statistics(models, kind):
    files = of_each_alone(kind)

    made = m.merge(by_norms(*(f"{n}.safetensors" for n in NAMES), statistics=m.statistics(*files, kind=kind)))

    key = "layers.1.down.weight"
    sizes = [load_file(file)[f"{kind}/{key}"].mean() for file in files]
    expected = sum(size * model[key] for size, model in zip(sizes, models, strict=True)) / sum(sizes)
    torch.testing.assert_close(made[key], expected)


def test_regmean_gives_no_negative_variance(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    means = torch.tensor([100.0, 100.0001, 99.9999])
    models = [
        {"n.running_mean": mean.repeat(50) + torch.rand(50) * 1e-4, "n.running_var": torch.full((50,), 1e-9)}
        for mean in means
    ]
    method = m.regmean.__wrapped__

    class Nothing(dict[str, Tensor]):
        parts = ()

    made = method(*models, statistics=Nothing(), alpha=0.9, key="n.running_var")
    exact = torch.stack([x["n.running_mean"].double() for x in models]).var(0, correction=0) + 1e-9

    assert float(made.min()) > 0
    torch.testing.assert_close(made.double(), exact, rtol=0.05, atol=0)  # means near 100 have seven digits
