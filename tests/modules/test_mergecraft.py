"""mergecraft's functions on modules, state dicts and pipelines; its walkthrough with the import changed."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mecha_exp as m
from mecha_exp import mergecraft
from mecha_exp.mergecraft import StateDict, dict_map, layer_merge, model_merge


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def module(seed: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    for number, parameter in enumerate(made.parameters()):
        parameter.data = rand(*parameter.shape, seed=seed + number)
    return made


BASE, ONE, TWO = (dict(module(seed).state_dict()) for seed in (0, 10, 20))


@pytest.mark.parametrize(
    ("function", "models", "keywords", "formula"),
    [
        ("soup", 3, {}, lambda a, b, c: (a + b + c) / 3),
        ("soup", 2, {"weights": [1, 3]}, lambda a, b: (a + 3 * b) / 4),
        ("task", 3, {}, lambda a, b, c: a + ((b - a) + (c - a)) / 2),
        ("task", 3, {"signs": [1, -1], "base_index": 1}, lambda a, b, c: b + ((a - b) - (c - b)) / 2),
        ("ties", 3, {"k": 1.0}, None),
        ("slerp", 2, {"tau": 0.25}, None),
        ("stock", 3, {}, None),
        ("dare", 3, {"p": 0.0}, lambda a, b, c: a + ((b - a) + (c - a)) / 2),
    ],
)
def test_the_functions_are_the_methods(function, models, keywords, formula):
    """Formulas by hand where they are short; elsewhere the merge method that is tested on its own."""
    given = [BASE, ONE, TWO][:models]
    by_method = {
        "ties": lambda a, b, c: m.ties(a, b, c, density=1.0, variant="paper"),
        "slerp": lambda a, b: m.slerp(a, b, alpha=0.25),
        "stock": lambda a, b, c: m.model_stock_pairwise(a, b, c),
    }

    merged = getattr(mergecraft, function)(given, **keywords)

    if formula is None:
        expected = m.merge(by_method[function](*map(m.model, given)))
    else:
        expected = {key: formula(*(model[key] for model in given)) for key in BASE}
    for key, tensor in expected.items():
        torch.testing.assert_close(merged[key], tensor, rtol=1e-5, atol=1e-6)


def test_modules_come_back_as_modules_with_frozen_parameters_of_the_last():
    models = [module(seed) for seed in (0, 10, 20)]
    for each in models:
        each[0].bias.requires_grad_(False)

    merged = mergecraft.soup(models)

    assert isinstance(merged, nn.Sequential) and merged is not models[-1]
    torch.testing.assert_close(
        merged[0].weight.data, (BASE["0.weight"] + ONE["0.weight"] + TWO["0.weight"]) / 3
    )
    assert torch.equal(merged[0].bias, models[-1][0].bias) and not merged[0].bias.requires_grad


def test_layers_that_are_passed_through_are_the_mean_of_the_others():
    merged = mergecraft.ties([BASE, ONE, TWO], base_index=0, k=0.2, passthrough_layers=["2.bias"])

    torch.testing.assert_close(merged["2.bias"], (ONE["2.bias"] + TWO["2.bias"]) / 2)
    assert list(merged) == list(BASE)


def test_the_walkthrough_of_merge_functions_of_ones_own():
    @dict_map
    def median_of_layers(models, **kw):
        assert kw["layer_name"] in BASE
        return torch.median(torch.stack(models), dim=0).values

    @model_merge
    def median(models, **kw):
        return median_of_layers(models)

    @layer_merge
    def largest_change(models, base_index=0, **_):
        base = models.pop(base_index)
        tasks = torch.stack([model - base for model in models])
        _, chosen = torch.max(tasks.abs(), dim=0, keepdim=True)
        return base + tasks.take_along_dim(chosen, dim=0).squeeze(0)

    merged = median([module(seed) for seed in (0, 10, 20)])
    expected = torch.stack([BASE["0.weight"], ONE["0.weight"], TWO["0.weight"]]).median(dim=0).values
    assert torch.equal(merged[0].weight.data, expected)

    merged = largest_change([BASE, ONE, TWO], base_index=0, passthrough=["2.weight", "2.bias"])
    a, b = ONE["0.bias"] - BASE["0.bias"], TWO["0.bias"] - BASE["0.bias"]
    torch.testing.assert_close(merged["0.bias"], BASE["0.bias"] + torch.where(a.abs() >= b.abs(), a, b))
    torch.testing.assert_close(merged["2.weight"], (ONE["2.weight"] + TWO["2.weight"]) / 2)


def test_fisher_with_diagonals_of_ones_own():
    @dict_map(["models", "diagonals"])
    def weighted(models, diagonals, eps=1e-8):
        weights = torch.stack(diagonals)
        return (torch.stack(models) * weights).sum(dim=0) / weights.sum(dim=0).clamp(min=eps)

    diagonals = [StateDict({k: torch.full_like(v, x) for k, v in BASE.items()}) for x in (1.0, 3.0)]

    merged = weighted([BASE, ONE], diagonals)

    torch.testing.assert_close(merged["0.bias"], (BASE["0.bias"] + 3 * ONE["0.bias"]) / 4)


def test_state_dicts_have_arithmetic():
    base, one = StateDict(BASE), StateDict(ONE)

    task = one - base
    half = base + task * 0.5

    torch.testing.assert_close(half["0.bias"], (BASE["0.bias"] + ONE["0.bias"]) / 2)
    torch.testing.assert_close(sum([base, one])["2.bias"], BASE["2.bias"] + ONE["2.bias"])
    torch.testing.assert_close((1 - base)["2.bias"], 1 - BASE["2.bias"])
    copy = half.to_model(module(3))
    torch.testing.assert_close(copy[0].bias.data, half["0.bias"])
    assert all((tensor == 0).all() for tensor in StateDict.zeros_like(module(3)).values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mergecraft.soup([]), "soup: give one model at least"),
        (lambda: mergecraft.soup([BASE, 3]), "cannot merge 3 of type int. Give torch modules"),
        (
            lambda: mergecraft.soup([BASE, {"0.weight": ONE["0.weight"]}]),
            "model 1 has other keys than",
        ),
        (lambda: mergecraft.slerp([BASE, ONE, TWO]), "it interpolates between two models, got 3"),
        (
            lambda: mergecraft.task([BASE, ONE], signs=[2]),
            "signs: expected 1 or -1 for each of 1 model,",
        ),
        (lambda: mergecraft.ties([BASE, ONE], base_index=4), "base_index: expected the number of the base"),
        (lambda: mergecraft.dare([BASE, ONE], p=1.0), "p: expected a fraction of at least 0 and below 1"),
        (lambda: mergecraft.soup([BASE, ONE], passthrough_layers=["2.bais"]), "Did you mean '2.bias'"),
        (
            lambda: mergecraft.fisher([BASE, ONE]),
            "fisher: the diagonals of the Fisher information",
        ),
        (lambda: StateDict(BASE) + StateDict({}), "model 1 has other keys"),
        (lambda: dict_map(["none"])(lambda models: models), "has no parameter none"),
    ],
)
def test_what_mergecraft_leaves_out_in_silence_is_an_error(call, message: str):
    with pytest.raises(m.MechaError, match=re.escape(message)):
        call()


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_names_and_pipelines_of_transformers(tmp_path: Path):
    """The walkthrough of GPT-2 on tiny models: sums, and TIES, of models by name and of pipelines."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: n for n, word in enumerate(["[UNK]", "good", "morning", "my", "name"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    size = {"vocab_size": 5, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 400}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    names = [str(tmp_path / name) for name in ("base", "law", "cooking")]
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(config).save_pretrained(name)
        tokenizer.save_pretrained(name)

    pipelines = [transformers.pipeline("text-generation", model=name) for name in names]
    merged = mergecraft.ties(names, task="text-generation", k=0.2)
    of_pipelines = mergecraft.ties(pipelines, k=0.2)

    assert type(merged) is type(of_pipelines) is type(pipelines[0])
    assert "generated_text" in merged("good morning", max_new_tokens=2)[0]
    states = [pipeline.model.state_dict() for pipeline in pipelines]
    expected = m.merge(m.ties(*(m.model(state) for state in states), density=0.2, variant="paper"))
    for result in (merged, of_pipelines):
        for key, tensor in result.model.state_dict().items():
            torch.testing.assert_close(tensor, expected[key])
        assert result.model.lm_head.weight is result.model.transformer.wte.weight
    base = StateDict.from_hf(names[0], task="text-generation")
    sums = base + (StateDict.from_hf(names[1], task="text-generation") - base) * 0.5
    assert "generated_text" in sums.to_model(names[0], task="text-generation")("my name")[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mergecraft.soup([BASE, ONE], wieghts=[1, 3]), "no argument wieghts. Did you mean 'weights'"),
        (lambda: mergecraft.ties([BASE, ONE], density=1.0), "ties: there is no argument density"),
        (
            lambda: mergecraft.ties([BASE, ONE], base_index=None),
            "base_index: expected the number of the base",
        ),
        (
            lambda: StateDict(BASE) + {**BASE, "2.bias": rand(1)},
            "2.bias is [2] in model 0 and [1] in model 1",
        ),
        (lambda: StateDict(wieght=rand(2, 2)).to_model(nn.Linear(2, 2)), "Did you mean 'weight'"),
        (lambda: StateDict(weight=rand(1, 2)).to_model(nn.Linear(2, 2)), "weight is [2, 2] in the model"),
    ],
)
def test_nothing_is_left_out_or_stretched_in_silence(call, message: str):
    with pytest.raises(m.RecipeError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("arguments", "others"), [((), (ONE, TWO)), ((2, 1.0), (BASE, ONE))])
def test_the_base_is_not_in_the_mean_of_passed_layers(arguments, others):
    """It is named by its position among the arguments, or by the default."""
    merged = mergecraft.ties([BASE, ONE, TWO], *arguments, passthrough=list(BASE))

    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, (others[0][key] + others[1][key]) / 2)


def test_more_arguments_than_a_mapped_function_has_are_an_error():
    @dict_map
    def first(models, factor=1):
        return models[0] * factor

    with pytest.raises(TypeError, match="too many positional arguments"):
        first([BASE, ONE], 2, 3)
