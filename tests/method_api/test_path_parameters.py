"""Parameters that name files: a method receives paths, and the signature has what lies there."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mecha_exp import EngineOptions, Parameter, Return, deserialize, merge, merge_method, serialize
from mecha_exp.engine.planner.plan import Job
from mecha_exp.engine.planner.planner import plan
from mecha_exp.engine.runtime.resumption import resume_token
from mecha_exp.errors import ConfigError, RecipeError
from mecha_exp.graph.nodes import Node, models_of
from mecha_exp.lab.signature import Signature, signature_of


@merge_method(elementwise=True, register=False)
def by_file(a: Parameter(Tensor), strength: Parameter(Path), more: Parameter(Path) = None) -> Return(Tensor):
    """a times the number in a file."""
    assert isinstance(strength, Path) and (more is None or isinstance(more, Path))
    return a * json.loads(strength.read_text())


@merge_method(register=False)
def by_files(a: Parameter(Tensor), *strengths: Parameter(Path)) -> Return(Tensor):
    """a times the numbers in files."""
    return a * sum(json.loads(path.read_text()) for path in strengths)


@merge_method(composite=True, register=False)
def by_default(a: Parameter(Tensor), strength: Parameter(Path) = Path("s.json")) -> Return(Tensor):
    """a times the number in a file that has a default."""
    return by_file(a, strength)


RECIPES = {
    "a path": lambda a: by_file(a, Path("s.json")),
    "a string": lambda a: by_file(a, strength="s.json"),
    "several": lambda a: by_files(a, "s.json"),
    "the default of a composite": lambda a: by_default(a),
    "from home": lambda a: by_file(a, "~/s.json"),
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    Path("s.json").write_text("0.5")


def signed(recipe: Node) -> Signature:
    return signature_of(recipe, dict.fromkeys(models_of(recipe), "content"), EngineOptions(), {})


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_receives_a_path_and_its_content_decides_the_signature(name):
    of, model = RECIPES[name], {"w": torch.ones(3)}
    values, digests, hashes = [], [], []
    for text in ("0.5", "0.25", "0.5"):
        Path("s.json").write_text(text)
        values.append(merge(of(model))["w"].tolist())
        digests.append(signed(of("a")).digest)
        hashes.append(tuple(signed(of("a")).methods.values()))

    assert values == [[0.5] * 3, [0.25] * 3, [0.5] * 3]
    assert digests[0] == digests[2] != digests[1]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_file_counts_by_its_content_alone_and_a_folder_by_its_files():
    folder = Path("masks")
    folder.mkdir()
    (folder / "one.json").write_text("0.5")
    Path("other.json").write_text("0.5")
    of_folder = signed(by_file("a", folder)).digest
    (folder / "two.json").write_text("0.5")

    assert signed(by_file("a", "s.json")).digest == signed(by_file("a", "other.json")).digest
    assert of_folder != signed(by_file("a", folder)).digest


def test_an_interrupted_merge_does_not_go_on_with_another_content(save):
    recipe = by_file(save("a", {"w": torch.ones(3)}), "s.json")

    def token() -> str | None:
        with plan([Job(recipe, Path("merged.safetensors"))]) as planned:
            return resume_token(planned, 0)

    before = token()
    assert token() == before
    Path("s.json").write_text("0.25")
    assert token() != before


def test_a_recipe_as_text_holds_the_path():
    named = merge_method(elementwise=True)(_named)
    recipe = named("a.safetensors", Path("s.json"))

    assert serialize(recipe).endswith(' "s.json"')
    assert deserialize(serialize(recipe)) is recipe


def _named(a: Parameter(Tensor), strength: Parameter(Path)) -> Return(Tensor):
    """a. Source: a test."""
    return a


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("t.json", "by_file: strength: there is no file or folder t.json"),
        (3, "by_file: strength: expected a path, got 3"),
        ({"w": "s.json"}, "by_file: strength: expected one path for all keys, got values by key"),
    ],
)
def test_what_is_no_file_is_refused_before_any_work(value, message):
    with pytest.raises(RecipeError) as error:
        merge(by_file({"w": torch.ones(3)}, value))

    assert message in str(error.value)


def test_the_signature_says_which_file_is_missing():
    with pytest.raises(ConfigError, match=r"by_file: strength: there is no file or folder t\.json"):
        signed(by_file("a", "t.json"))
