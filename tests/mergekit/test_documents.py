"""Documents of one file name each other's merges, which become one graph; nothing in between is written."""

import json
import re
from pathlib import Path

import pytest
import torch
from mergekit_configs import CONFIGS
from mergekit_tokens import TOKEN_CONFIGS, write_token_models
from safetensors.torch import load_file, save_file

from mecha_exp import MechaError, from_mergekit, merge
from mecha_exp.cli import main
from mecha_exp.graph.nodes import models_of

TWO = CONFIGS["documents"]
ONE = "name: one\nmerge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
LAST = "merge_method: passthrough\nmodels: [{model: one}]\n"


def write(text: str) -> str:
    Path("config.yml").write_text(text)
    return "config.yml"


def test_they_give_what_one_after_the_other_gives(here: Path):
    documents = TWO.split("---\n")
    texts = dict(zip(("one", "out", "two"), documents, strict=True))
    for name in ("one", "two", "out"):
        merge(from_mergekit(write(texts[name])), here / name)

    made = merge(
        from_mergekit(write(TWO.replace("model: one", "model: uno").replace("name: one", "name: uno")))
    )

    written = load_file(here / "out" / "model.safetensors")
    assert all(torch.equal(made[key], written[key]) for key in written)


def test_the_verb_merges_them_with_values_of_each(here: Path, monkeypatch: pytest.MonkeyPatch):
    write(f"{ONE}---\n{LAST}")
    words = ["merge", "config.yml", "out", "-p", "one.models.1.parameters.weight", "3"]
    monkeypatch.setattr("sys.argv", ["mecha_exp", *words, "-p", "out_dtype", "bfloat16"])

    assert main() == 0

    made = load_file(here / "out" / "model.safetensors")
    a, b = (merge(from_mergekit({"merge_method": "passthrough", "models": [{"model": n}]})) for n in "ab")
    for key, tensor in made.items():
        torch.testing.assert_close(tensor, (0.25 * a[key] + 0.75 * b[key]).bfloat16())
    assert sorted(path.name for path in here.iterdir()) == ["config.yml", "out"]


def test_a_document_with_the_name_of_a_section_is_refused_by_the_bench(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write(f"{ONE}---\n{LAST}".replace("one", "output"))
    words = ["recipe=mergekit", "recipe.path=config.yml", "evaluator=none", "tracking=none"]
    monkeypatch.setattr("sys.argv", ["mecha_exp", *words, "output.dtype=bfloat16"])

    assert main() == 1
    assert "a document has the name 'output', which has a meaning of its own here" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_dtype_of_a_merge_that_is_not_written_goes_on(here: Path):
    made = merge(from_mergekit(write(f"{ONE}out_dtype: bfloat16\n---\n{LAST}")))

    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}


def test_the_tokenizer_of_a_merge_that_is_not_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_token_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    union = TOKEN_CONFIGS["a union without a base"]
    for words in (
        ["merge", write(union), "plain"],
        ["merge", write(f"name: one\n{union}---\n{LAST}"), "out"],
    ):
        monkeypatch.setattr("sys.argv", ["mecha_exp", *words])
        assert main() == 0

    made, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
    assert all(torch.equal(made[key], plain[key]) for key in plain)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 24

    with pytest.raises(MechaError, match="tokenizer: one, a merge of this file, has a tokenizer that is not"):
        from_mergekit(write(f"name: one\n{union}---\n{LAST}tokenizer_source: base"))
    moved = "name: one\nmerge_method: passthrough\nmodels: [{model: moved}]\n"
    last = "merge_method: linear\nmodels: [{model: base}, {model: one}]\nparameters: {weight: 1}\n"
    with pytest.raises(MechaError, match="tokenizer: rows of one would be moved, a merge of this file"):
        from_mergekit(write(f"{moved}---\n{last}tokenizer_source: base"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}---\n{ONE}", "two documents have the name 'one'. Each merge"),
        (f"{ONE}---\n{ONE.replace('name: one', 'name: two')}", "merges of 2 documents: 'one', 'two'."),
        (f"{LAST}---\nname: one\n{LAST}", "circle"),
        (f"{LAST}name: two\n---\nname: one\n{LAST.replace('one', 'two')}", "in a circle: two -> one -> two."),
        (f"{ONE}densty: 1\n---\n{LAST}", "document 'one': configuration: unknown word 'densty'."),
        (
            f"{ONE.replace('model: b', 'model: x')}---\n{LAST}",
            "document 'one': the model 'x' does not exist.",
        ),
        (
            f"{ONE}---\nmerge_method: passthrough\nmodels: [{{model: one+a}}]",
            "one+a: one is a merge of this file, and an adapter is added to a model that is read.",
        ),
        (
            f"{ONE}---\nmerge_method: passthrough\n"
            "slices: [{sources: [{model: one, layer_range: [0, 2]}]}]",
            "slices[0]: takes layers of one, a merge of this file, and layers are taken of models that",
        ),
        (
            f"{ONE}---\nmerge_method: linear\nparameters: {{weight: 1}}\n"
            "models: [{model: one}, {model: mixed}]",
            "document 'mixed': dtype: its keys have BF16 and F32. Say one of them: dtype: float32",
        ),
    ],
)
def test_documents_that_cannot_be_one_graph_are_refused(text: str, message: str, here: Path, llamas: Path):
    if "mixed" in text:
        mixed = "name: mixed\nmerge_method: passthrough\nmodels: [{model: half}]\n"
        text = f"{text}\n---\n{mixed}"
        write_half(here, llamas)
    with pytest.raises(MechaError, match=re.escape(message)):
        from_mergekit(write(text))


def write_half(here: Path, llamas: Path) -> None:
    """A model with one key in bfloat16."""
    (here / "half").mkdir()
    tensors = load_file(llamas / "a" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, here / "half" / "model.safetensors")
    (here / "half" / "config.json").write_bytes((llamas / "a" / "config.json").read_bytes())


def test_a_path_of_no_document_is_an_error(here: Path):
    text = f"{ONE}---\n{LAST.strip()}\nname: two\n"
    with pytest.raises(
        MechaError, match=r"three\.dtype: begins with the name of no document. There are 'one'"
    ):
        from_mergekit(write(text), values={"three.dtype": "float16"})


@pytest.mark.parametrize("name", ["100", "007", "1.50", "1e3", "nan", ".inf", "yes", "2024-01-31", "0x10"])
def test_a_model_is_called_as_its_folder_is_written(name: str, here: Path, models: Path):
    (here / name).symlink_to(models / "a")
    text = "merge_method: linear\nmodels:\n- model: {0}\n- model: {{path: {0}x}}\nparameters: {{weight: 1}}\n"
    (here / f"{name}x").symlink_to(models / "b")
    (here / "steps.yml").write_text(text.format(name))

    assert [model.source for model in models_of(from_mergekit("steps.yml"))] == [name, f"{name}x"]
    if name == "100":
        content = {"merge_method": "linear", "models": [{"model": 100}], "parameters": {"weight": 1}}
        assert [model.source for model in models_of(from_mergekit(content))] == ["100"]
