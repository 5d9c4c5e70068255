"""What public configurations have: parameters of the base, one value for each model, templates by name."""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from mecha_exp import ConfigError, from_mergekit, merge
from mecha_exp.cli import main
from mecha_exp.mergekit.methods import METHODS
from mecha_exp.mergekit.tokenizer_settings import CHAT_TEMPLATES, read_chat_template

WITH_BASE = [name for name, method in METHODS.items() if method.base == "required"]
BASE = "- {model: base, parameters: {weight: 1.0, density: 0.5, epsilon: 0.05, int8_mask: true, typo: 3}}\n"
PARAMETERS = {"weight": 0.5, "density": 1.0, "t": 0.5}


def of_method(name: str, base: str) -> str:
    """A configuration of a method, its base among the models."""
    others = "- model: a\n" + ("- model: b\n" if METHODS[name].counts[1] is None else "")
    own = {word: value for word, value in PARAMETERS.items() if word in METHODS[name].parameters}
    return f"merge_method: {name}\nbase_model: base\nparameters: {own}\nmodels:\n{base}{others}"


@pytest.mark.parametrize("name", WITH_BASE)
def test_parameters_of_the_base_are_a_warning(name: str, here: Path, caplog: pytest.LogCaptureFixture):
    without = from_mergekit(yaml.safe_load(of_method(name, "- model: base\n")))
    assert not caplog.records

    with caplog.at_level(logging.WARNING):
        given = from_mergekit(yaml.safe_load(of_method(name, BASE)))

    assert given == without
    assert [record.message for record in caplog.records] == [
        f"models[0].parameters: {name} has no parameters of the base model, and ignores weight, density, "
        "epsilon, typo, as mergekit does."
    ]


RUN = "recipe=mergekit recipe.path=public.yml evaluator=none tracking=none output=none"


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Runs a command line in this process, in a folder of its own."""

    def of_words(words: str) -> int:
        monkeypatch.setattr("sys.argv", ["mecha_exp", *shlex.split(words)])
        return main()

    return of_words


def test_the_verb_and_a_run_say_it_once(
    run: Callable[[str], int], here: Path, capsys: pytest.CaptureFixture[str]
):
    (here / "public.yml").write_text(of_method("della_linear", BASE))
    for words in ("merge public.yml -o merged", RUN, f"{RUN} parameters.lambda=0.4,0.5 -m"):
        assert run(words) == 0

        captured = capsys.readouterr()
        said = " ".join((captured.out + captured.err).split())
        assert said.count("ignores weight, density, epsilon, typo, as mergekit does.") == 1, words


@pytest.mark.parametrize("name", ["breadcrumbs", "breadcrumbs_ties"])
def test_each_model_has_its_own_gamma_and_density(name: str, here: Path):
    settings = {"a": (0.5, 0.6, 0.3), "b": (0.25, 0.4, 0.0)}
    models = [
        {"model": model, "parameters": dict(zip(("weight", "density", "gamma"), values, strict=True))}
        for model, values in settings.items()
    ]

    merged = merge(from_mergekit({"merge_method": name, "base_model": "base", "models": models}))

    base, a, b = (
        merge(from_mergekit({"merge_method": "passthrough", "models": [{"model": model}]}))
        for model in ("base", "a", "b")
    )
    for key, tensor in base.items():
        kept = [
            _crumbs(model[key] - tensor, *values)
            for model, values in zip((a, b), settings.values(), strict=True)
        ]
        if name == "breadcrumbs_ties":
            majority = torch.where(sum(kept) >= 0, 1, -1)
            kept = [torch.where(delta.sign() == majority, delta, 0) for delta in kept]
        torch.testing.assert_close(merged[key], tensor + sum(kept), rtol=1e-5, atol=1e-6)


def _crumbs(delta: torch.Tensor, weight: float, density: float, gamma: float) -> torch.Tensor:
    """The weighted entries after the largest ones, by their ranks."""
    count = delta.numel()
    kept = int(density * count)
    least = max(0, count - kept - int(gamma * count))
    order = delta.abs().flatten().argsort()[least : least + kept]
    mask = torch.zeros(count).index_fill_(0, order, 1).view_as(delta)
    return weight * delta * mask


def test_each_model_has_its_own_epsilon(here: Path):
    def merged(first: float, second: float) -> dict[str, torch.Tensor]:
        models = [
            {"model": "a", "parameters": {"weight": 1.0, "epsilon": first}},
            {"model": "b", "parameters": {"weight": 0.0, "epsilon": second}},
        ]
        config = {"merge_method": "della_linear", "base_model": "base", "models": models}
        return merge(from_mergekit({**config, "parameters": {"density": 0.5}}))

    narrow, other, wide = merged(0.1, 0.1), merged(0.1, 0.4), merged(0.4, 0.1)

    assert all(torch.equal(narrow[key], other[key]) for key in narrow)
    assert any(not torch.equal(narrow[key], wide[key]) for key in narrow)


TWO = "merge_method: ties\nbase_model: base\nmodels: [{model: a, parameters: {weight: 1}}, {model: b%s}]\n"
ALL, SOME = ", parameters: {weight: [0, 1]}", ", parameters: {weight: [{filter: mlp, value: 1}]}"


@pytest.mark.parametrize(("own", "is_refused"), [(ALL, True), (SOME, False), ("", False)])
def test_a_value_that_each_model_overrides_is_refused(own: str, is_refused: bool, here: Path):
    config, values = yaml.safe_load(TWO % own), {"parameters.weight": 0.3}
    if not is_refused:
        assert from_mergekit(config, values=values) != from_mergekit(
            config, values={"parameters.weight": 0.4}
        )
        return
    with pytest.raises(ConfigError, match="each model has a value of its own, which counts before this one"):
        from_mergekit(config, values=values)
    from_mergekit({**config, "parameters": {"weight": 0.3}})


def test_a_density_of_task_arithmetic_is_a_warning_and_not_swept(
    here: Path, caplog: pytest.LogCaptureFixture
):
    config = yaml.safe_load(of_method("task_arithmetic", "- model: base\n"))
    with_density = {**config, "parameters": {**config["parameters"], "density": 0.5, "rescale": True}}

    assert from_mergekit(with_density) == from_mergekit(config)
    assert [record.message for record in caplog.records] == [
        "parameters: task_arithmetic makes nothing sparse and ignores density, rescale, as mergekit does."
    ]
    with pytest.raises(ConfigError, match=r"parameters.density: task_arithmetic makes nothing sparse"):
        from_mergekit(with_density, values={"parameters.density": 0.3})


def test_a_value_for_the_base_is_refused(here: Path):
    config = yaml.safe_load(of_method("ties", BASE))

    with pytest.raises(
        ConfigError, match=r"models.0.parameters.weight: ties has no parameters of the base model"
    ):
        from_mergekit(config, values={"models.0.parameters.weight": 0.3})
    from_mergekit(config, values={"models.1.parameters.weight": 0.3})


def test_a_sweep_of_a_value_that_is_overridden_is_refused_before_any_work(
    run: Callable[[str], int], here: Path, capsys: pytest.CaptureFixture[str]
):
    (here / "public.yml").write_text(TWO % ALL)

    assert run(f"{RUN} parameters.weight=0.2,0.4 -m") == 1

    assert capsys.readouterr().err.count("parameters.weight: each model has a value of its own") == 1
    assert not (here / "outputs").exists()


SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
HEAD = "<|start_header_id|>%s<|end_header_id|>\n\n%s<|eot_id|>"
CHATS = {
    "alpaca": "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nHello.\n\n### Instruction:\nHi\n\n"
    "### Response:\n",
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "exaone": "[|system|]Be kind.[|endofturn|]\n[|user|]Hi\n[|assistant|]Hello.[|endofturn|]\n[|user|]Hi\n"
    "[|assistant|]",
    "llama3": f"<s>{HEAD}{HEAD}{HEAD}{HEAD}<|start_header_id|>assistant<|end_header_id|>\n\n"
    % ("system", "Be kind.", "user", "Hi", "assistant", "Hello.", "user", "Hi"),
    "mistral": "<s> [INST] Be kind.\n\nHi [/INST] Hello.</s> [INST] Hi [/INST]",
}


@pytest.fixture
def render() -> Callable[[str, Sequence[dict[str, str]]], str]:
    """Renders a chat as transformers does, with the beginning of an answer."""
    jinja2 = pytest.importorskip("jinja2")
    sandbox = pytest.importorskip("jinja2.sandbox").ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox.globals["raise_exception"] = raise_exception
    known = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    return lambda name, messages: sandbox.from_string(read_chat_template(name)).render(
        messages=messages, **known
    )


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_chat_has_the_format_of_its_name(name: str, render: Callable[..., str]):
    assert render(name, [SYSTEM, USER, ANSWER, USER]) == CHATS[name]
    if name == "exaone":
        assert render(name, [USER]) == "[|system|][|endofturn|]\n[|user|]Hi\n[|assistant|]"
    if name == "mistral":
        with pytest.raises(Exception, match="the user begins"):
            render(name, [ANSWER])
