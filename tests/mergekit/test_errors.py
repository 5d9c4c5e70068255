"""What a configuration of mergekit says wrongly or asks for in vain is an error that tells how to mend it."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from mergekit_configs import model_config
from safetensors.torch import save_file

from mecha_exp import CheckpointError, ConfigError, MechaError, from_mergekit

TIES = "merge_method: ties\nbase_model: base\n"
A = "models: [{model: a, parameters: {weight: 1}}]\n"


def said(config: str, **options: object) -> str:
    with pytest.raises(MechaError) as error:
        from_mergekit(yaml.safe_load(config), **options)
    assert isinstance(error.value, ConfigError | CheckpointError)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "merge_method: tise\nmodels: [{model: a}]",
            "merge_method: unknown method 'tise'. Did you mean 'ties'?",
        ),
        ("models: [{model: a}]", "merge_method: unknown method None"),
        (TIES + A + "densty: 1", "configuration: unknown word 'densty'."),
        (TIES + A + "parameter: {}", "configuration: unknown word 'parameter'. Did you mean 'parameters'?"),
        (TIES, "expected exactly one of 'models', 'slices' and 'modules', got none of them."),
        (
            TIES + A + "slices: [{}]",
            "expected exactly one of 'models', 'slices' and 'modules', got ['models', 'slices'].",
        ),
        (TIES + "models: {model: a}", "models: expected a list of mappings, got {'model': 'a'}."),
        (TIES + "models: [{modle: a}]", "models[0]: unknown word 'modle'. Did you mean 'model'?"),
        (TIES + "models: [{parameters: {}}]", "models[0]: names no 'model'."),
        (
            TIES + "models: [{model: [3]}]",
            "models[0].model: expected the path or the name of a model, got [3].",
        ),
        (TIES + "models: [{model: a@b@c}]", "models[0].model: expected a model as PATH, ORG/NAME@REVISION"),
        (TIES + "models: [{model: a}, {model: a}]", "models: a is there twice. An input is named once."),
        (f"merge_method: ties\n{A}", "models: ties needs a base model. Name it: base_model: ORG/MODEL"),
        (
            f"merge_method: slerp\nbase_model: base\n{A.replace('weight', 't')}",
            "slerp has one value for all inputs",
        ),
        (
            "merge_method: slerp\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {t: 1}",
            "models: slerp takes exactly 2 inputs, got 3.",
        ),
        (
            "merge_method: model_stock\nbase_model: base\nmodels: [{model: a}]",
            "models: model_stock takes at least 3 inputs, got 2.",
        ),
        (
            "merge_method: nuslerp\nmodels: [{model: a}]\nparameters: {weight: 1}",
            "models: nuslerp takes exactly 2 inputs beside the base, got 1.",
        ),
        (TIES + "models: [{model: a}]", "models: ties needs the parameter 'weight'. Give it under"),
        (
            TIES + "models: [{model: a, parameters: {weight: {filter: mlp, value: 1}}}]",
            "needs the parameter 'weight' at the key 'lm_head.weight'",
        ),
        (
            TIES + A + "parameters: {densities: 1}",
            "parameters.densities: ties has no such parameter, and mergekit",
        ),
        (TIES + A + "parameters: {densities: 1}", "Did you mean 'density'?"),
        (TIES + A + "parameters: [1]", "parameters: expected a mapping of parameters, got [1]."),
        (TIES + A + "parameters: {lambda: a}", "parameters.lambda: expected a number, got 'a'."),
        (TIES + A + "parameters: {lambda: true}", "parameters.lambda: expected a number, got True."),
        (TIES + A + "parameters: {lambda: .nan}", "parameters.lambda: expected a number, got nan."),
        (TIES + A + "parameters: {normalize: 2}", "parameters.normalize: expected true or false, got 2."),
        (
            TIES + A + "parameters: {density: {filter: mlp}}",
            "parameters.density[0]: a filter needs a 'value'",
        ),
        (
            TIES + A + "parameters: {density: [{filtre: mlp, value: 1}]}",
            "parameters.density[0]: unknown word 'filtre'. Did you mean 'filter'?",
        ),
        (
            TIES + A + "parameters: {density: [{filter: 3, value: 1}]}",
            "expected a part of the names of keys, got 3.",
        ),
        (
            TIES + A + "parameters: {density: [[1, 2], 3]}",
            "parameters.density: expected a number, got [1, 2].",
        ),
        (
            "merge_method: karcher\nmodels: [{model: a}, {model: b}]\nparameters: {max_iter: [2, 4]}",
            "parameters.max_iter, between its points: expected a whole number, got 2.66",
        ),
        (TIES + A + "dtype: float12", "dtype: unknown dtype 'float12'. Did you mean"),
        (TIES + A + "out_dtype: int8", "out_dtype: unknown dtype 'int8'."),
        (
            TIES + A + "parameters: {rescale: true, density: 0.5}",
            "models: rescale: ties is not rescaled here.",
        ),
        (
            f"merge_method: breadcrumbs_ties\nbase_model: base\n{A}parameters: {{normalize: true}}",
            "models: normalize: breadcrumbs_ties adds what agrees here",
        ),
        (
            TIES + A.replace("a,", "a+,"),
            "models[0].model: expected a model as PATH, ORG/NAME@REVISION or MODEL+ADAPTER, got 'a+'",
        ),
        (TIES + A + "tokenizer: {sorce: base}", "tokenizer: unknown word 'sorce'. Did you mean 'source'?"),
        (TIES + A + "tokenizer: base", "tokenizer: expected a mapping with 'source', got 'base'."),
        (
            TIES + A + "tokenizer: {source: base}\ntokenizer_source: base",
            "tokenizer and tokenizer_source: give one of them.",
        ),
        (
            TIES + A + "chat_template: chatmi",
            "chat_template: there is no template 'chatmi'. Did you mean 'chatml'? The names are auto,",
        ),
        (
            "base_model: base\ngate_mode: random",
            "this has words of a mixture of experts (mergekit-moe), whose configuration has a file of its",
        ),
        (
            "merge_method: linear\nmodules: [text]",
            "modules: expected models and parameters by module, got ['text'].",
        ),
        (
            TIES + "models: [{model: elsewhere}]\nparameters: {weight: 1}",
            "the model 'elsewhere' does not exist.",
        ),
        (
            TIES + "models: [{model: some/model@v2}]\nparameters: {weight: 1}",
            "'some/model@v2' is not a file here",
        ),
    ],
)
def test_what_is_wrong_is_said(config: str, message: str, here: Path):
    assert message in said(config)


SLICES = "merge_method: passthrough\nslices:\n"
PAIRS = "merge_method: linear\nparameters: {weight: 1}\nslices:\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "- sources: [{model: a}]",
            "slices[0].sources[0].layer_range: expected two whole numbers, the first",
        ),
        ("- sources: [{model: a, layer_range: [0]}]", "and the one after the last, got [0]."),
        (
            "- sources: [{model: a, layer_range: [2, 2]}]",
            "[2, 2] has no layers. Layers are numbered from 0, and the second number is larger.",
        ),
        ("- sources: [{model: a, layer_range: [-1, 2]}]", "[-1, 2] has no layers."),
        (
            "- sources: [{model: a, layer_range: [0, 4]}]\n- sources: [{model: b, layer_range: [2, 5]}]",
            "slices[1].sources[0].layer_range: ends at 5, and b has 4 layers, numbered from 0.",
        ),
        ("- {}", "slices[0].sources: expected a list of mappings, got None."),
        ("- source: []", "slices[0]: unknown word 'source'. Did you mean 'sources'?"),
        (
            "- {sources: [{model: a, layer_range: [0, 1]}], residual_weight: 0.5}",
            "slices[0].residual_weight: mergekit reads it nowhere. Remove it.",
        ),
        (
            "- sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [0, 1]}]",
            "slices[0]: passthrough takes exactly 1 input, got 2.",
        ),
    ],
)
def test_slices_that_cannot_be_stacked_are_refused(config: str, message: str, here: Path):
    assert message in said(SLICES + config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "- sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 3]}]",
            "slices[0]: its sources have different numbers of layers: [2, 3].",
        ),
        (
            "- sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2]}]\n"
            "- sources: [{model: a, layer_range: [2, 4]}]",
            "slices[1]: has 1 source, and slices[0] has 2. mergekit merges the last norm and the",
        ),
    ],
)
def test_slices_whose_sources_do_not_fit_are_refused(config: str, message: str, here: Path):
    assert message in said(PAIRS + config)


def test_a_base_of_a_slice_is_one_of_its_sources(here: Path):
    config = "merge_method: ties\nbase_model: base\nslices: [{sources: [{model: a, layer_range: [0, 1]}]}]"

    assert "slices[0]: the base model base is not among the sources. Add it." in said(config)


def test_nothing_is_downloaded_unless_that_is_asked_for(here: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def snapshot_download(repository: str, *, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        raise OSError("no network in tests")

    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", snapshot_download)
    config = TIES + "models: [{model: some/model}]\nparameters: {weight: 1}"

    assert "Nothing is downloaded without hub.offline=false (offline=False in Python)." in said(config)
    assert "cannot be fetched: no network in tests" in said(config, offline=False)
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "- a\n- b",
            "expected a configuration of mergekit, which is a mapping with 'merge_method', got ['a', 'b'].",
        ),
        ("", "expected a configuration of mergekit, which is a mapping with 'merge_method', got None."),
        ("a: [", "it is not valid YAML: line 2, column 1: did not find expected node content."),
        ("models: [{model: a}]\nmodels: []\n", "YAML: line 2, column 1: 'models' is there twice."),
        ("a: 1\n---\nb: 2", "two documents have no name. Each merge that another one names has a 'name'"),
        (TIES + A + "parameters: {lambda: a}", "parameters.lambda: expected a number, got 'a'."),
    ],
)
def test_a_file_is_named_in_its_errors(text: str, message: str, here: Path):
    (here / "config.yml").write_text(text)

    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        from_mergekit("config.yml")

    assert str(error.value).startswith("config.yml")


def test_a_file_that_is_not_there_is_an_error(here: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yml cannot be read: No such file or directory\."):
        from_mergekit("nowhere.yml")


def save_model(
    folder: Path, keys: list[str], layers: int | None = None, dtype: torch.dtype = torch.float32
) -> None:
    folder.mkdir()
    save_file({key: torch.zeros(2, 2, dtype=dtype) for key in keys}, folder / "model.safetensors")
    if layers is not None:
        (folder / "config.json").write_text(json.dumps(model_config(layers)))


GRADIENT = "merge_method: slerp\nbase_model: x\nmodels: [{model: y}]\nparameters: {t: [0, 1]}"


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            (["a.w"], None),
            (["a.w"], None),
            "x: its layers cannot be told. Numbered modules in its keys: none.",
        ),
        (
            (["text.0.w", "image.0.w"], None),
            (["text.0.w"], None),
            "x: its layers cannot be told. Numbered modules in its keys: image.* (1), text.* (1).",
        ),
        ((["h.0.w", "h.1.w"], 3), (["h.0.w"], 1), "of which its config.json says 3. Numbered modules"),
        ((["h.0.w", "h.1.w"], 2), (["h.0.w"], 1), "the models differ in their layers: x has 2, y has 1."),
    ],
)
def test_gradients_need_layers_that_can_be_told(x, y, message: str, here: Path):
    save_model(here / "x", *x)
    save_model(here / "y", *y)

    assert message in said(GRADIENT)


def test_keys_of_several_dtypes_need_a_dtype(here: Path):
    save_model(here / "x", ["a.w", "b.w"])
    for name, dtype in (("a.w", torch.float64), ("b.w", torch.float16)):
        tensors = {"a.w": torch.zeros(2, 2), "b.w": torch.zeros(2, 2)}
        tensors[name] = tensors[name].to(dtype)
        (here / name).mkdir()
        save_file(tensors, here / name / "model.safetensors")
    linear = "merge_method: linear\nparameters: {weight: 1}\nmodels: "

    assert "dtype: the models have several dtypes." in said(linear + "[{model: x}, {model: a.w}]")
    assert from_mergekit(yaml.safe_load(linear + "[{model: x}, {model: b.w}]")) is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("models.1.parameters.weight", "expected a number below 1 for one of the list, got '1'."),
        ("models.a", "models.a: expected a number below 1 for one of the list, got 'a'."),
        ("slices.0.x", "slices.0.x: there is no 'slices'."),
        ("merge_method.x", "merge_method.x: what stands above 'x' is 'ties', which has no parts."),
        ("parameters.densty", "parameters.densty: ties has no such parameter"),
    ],
)
def test_a_path_to_a_value_that_leads_nowhere_is_an_error(path: str, message: str, here: Path):
    assert message in said(TIES + A, values={path: 0.5})


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (
            TIES + A + "densty: 1\nparameters: {densities: 1, lambda: a}",
            ["configuration: unknown word 'densty'.", "parameters.densities: ", "parameters.lambda: "],
        ),
        (
            "merge_method: tise\nmodels: [{model: a}]\ndtype: float12\nout_dtype: int8",
            ["merge_method: unknown method 'tise'.", "dtype: unknown", "out_dtype: unknown dtype 'int8'."],
        ),
        (
            "merge_method: ties\nbase_model: [3]\nchat_template: chatmi\nmodels: [{model: a@b@c}]",
            [
                "base_model: expected the path",
                "models[0].model: expected a model as",
                "chat_template: there is",
            ],
        ),
        (
            TIES + "models:\n- {model: a, parameters: {weight: x}, extra: 1}\n"
            "- {model: b, parameters: {density: [{filtre: m, value: 1}, {filter: m}]}}",
            [
                "models[0]: unknown word 'extra'.",
                "models[0].parameters.weight: expected a number, got 'x'.",
                "models[1].parameters.density[0]: unknown word 'filtre'.",
                "models[1].parameters.density[1]: a filter needs a 'value'",
            ],
        ),
        (
            f"merge_method: ties\n{A}parameters: {{lambda: a}}\ntokenizer: {{source: [3], tokens: {{x: 1}}}}",
            [
                "parameters.lambda: expected a number",
                "models: ties needs a base model.",
                "tokenizer.source: expected the path",
                "tokenizer.tokens.x: expected a mapping with 'source', got 1.",
            ],
        ),
        (
            "merge_method: passthrough\nslices:\n"
            "- {sources: [{model: a, layer_range: [0]}], parameters: {scale: x}}\n"
            "- {sources: [{model: [3], layer_range: [2, 1]}], residual_weight: 1}",
            [
                "slices[0].parameters.scale: expected a number",
                "slices[1].residual_weight: mergekit reads it nowhere.",
                "slices[0].sources[0].layer_range: expected two whole numbers",
                "slices[1].sources[0].model: expected the path",
                "slices[1].sources[0].layer_range: [2, 1] has no layers.",
            ],
        ),
    ],
)
def test_all_mistakes_are_said_together(config: str, messages: list[str], here: Path):
    count, *lines = said(config).split("\n")

    assert count == f"{len(messages)} problems:"
    for number, (line, message) in enumerate(zip(lines, messages, strict=True), 1):
        assert line.startswith(f"  {number}. {message}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TIES + "modles: [{model: a}]",
            "configuration: unknown word 'modles'. Did you mean 'modules' or 'models'?",
        ),
        (TIES + "models: [{modle: a}]", "models[0]: unknown word 'modle'. Did you mean 'model'?"),
        (
            "merge_method: passthrough\nslices: [{sources: [{model: a, layer_rang: [0, 1]}]}]",
            "slices[0].sources[0]: unknown word 'layer_rang'. Did you mean 'layer_range'?",
        ),
    ],
)
def test_a_misspelt_word_is_not_missed_as_well(config: str, message: str, here: Path):
    assert said(config).startswith(message)


def test_the_mistakes_of_all_documents_are_said_together(here: Path):
    first = "name: first\n" + TIES + A + "parameters: {lambda: a}\ndtype: int8"
    (here / "config.yml").write_text(first + "\n---\nmerge_method: tise\nmodels: [{model: first}]")

    with pytest.raises(ConfigError) as error:
        from_mergekit("config.yml")

    place, *lines = str(error.value).split("\n")
    assert place == "config.yml: 3 problems:"
    assert lines[0] == "  1. document 'first': parameters.lambda: expected a number, got 'a'."
    assert lines[1].startswith("  2. document 'first': dtype: unknown dtype 'int8'.")
    assert lines[2].startswith("  3. merge_method: unknown method 'tise'.")
