"""Documents from outside: one door for JSON and YAML, its limits, and schemas by dataclasses."""

import ast
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import mecha_exp as m
from mecha_exp.documents import (
    MAX_DEPTH,
    DocumentError,
    parse_json,
    parse_yaml,
    parse_yaml_documents,
    read_json,
    typed,
)
from mecha_exp.errors import ConfigError
from mecha_exp.runs.record import Record

PACKAGE = Path(m.__file__).parent
READERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "yaml": {
        "load",
        "load_all",
        "safe_load",
        "safe_load_all",
        "full_load",
        "unsafe_load",
        "compose",
        "parse",
    },
    "OmegaConf": {"load"},
    "tomllib": {"load", "loads"},
    "ujson": {"load", "loads"},
    "orjson": {"loads"},
}
"""What reads JSON, YAML and TOML, by the module or the class that has it."""
DOORS = {
    "documents.py": "the door itself",
    "checkpoint/safetensors/json_reader.py": "headers are read entry by entry, within limits of their own",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)
NINE = [(f"a{n}", ", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 10)]
BOMB = "\n".join(["a0: &a0 [x, x]", *(f"{name}: &{name} [{below}]" for name, below in NINE)])
MERGING_BOMB = "\n".join(["a0: &a0 {x: 1}", *(f"{name}: &{name} {{<<: [{below}]}}" for name, below in NINE)])


def readings(tree: ast.AST) -> Iterator[str]:
    """The names of all functions in a module that read JSON, YAML or TOML, however they were imported."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (
                f"{node.module}.{a.name}" for a in node.names if a.name in READERS.get(node.module or "", ())
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = names.get(node.value.id, node.value.id).rpartition(".")[2]
            if node.attr in READERS.get(owner, ()):
                yield f"{owner}.{node.attr}"


def test_nothing_reads_json_or_yaml_but_the_door():
    found = {
        path.relative_to(PACKAGE).as_posix(): sorted(
            set(readings(ast.parse(path.read_text(encoding="utf-8"))))
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }

    assert {path: names for path, names in found.items() if names and path not in DOORS} == {}
    assert all(found[path] for path in DOORS), "a door that reads nothing is none"


@pytest.mark.parametrize(
    "code",
    [
        *("import json\njson.loads(x)", "import yaml as y\ny.safe_load(x)", "from json import loads"),
        *("f = yaml.load", "from omegaconf import OmegaConf as O\nO.load(x)"),
    ],
)
def test_the_search_finds_each_way_to_read(code: str):
    assert list(readings(ast.parse(code)))


@given(JSON)
def test_what_json_and_yaml_say_is_what_was_written(value: Any):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_read_or_refused(raw: bytes):
    for parse in (parse_json, parse_yaml):
        try:
            parse(raw)
        except DocumentError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "more than 100 levels"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "more than 100 levels"),
        ('{"a":' * 500 + "1" + "}" * 500, "more than 100 levels"),
        ("1" + "0" * 400, "a number of 401 digits"),
        ("[" + "1" * 5000 + "]", "a number of 5,000 digits"),
        ('["\\ud800"]', "half a character"),
        (b'["\xff"]', "not UTF-8"),
    ],
)
def test_json_and_yaml_beyond_the_limits_are_refused(text: str | bytes, message: str):
    for parse in (parse_json, parse_yaml):
        if parse is parse_json or "half" not in message:
            with pytest.raises(DocumentError, match=message):
                parse(text)


def test_a_hundred_levels_are_read():
    for parse in (parse_json, parse_yaml):
        assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "its aliases stand for more than 10,000 values"),
        (MERGING_BOMB, "its aliases stand for more than"),
        ("&a [*a]", "an alias that holds itself"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: 'a' is there twice"),
        ("2001-99-99", "not valid YAML"),
        ("!!bool x", "not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a: 1\n---\nb: 2", "2 documents of YAML, and one is expected"),
    ],
)  # fmt: skip
def test_yaml_that_means_too_much_or_nothing_is_refused(text: str, message: str):
    started = time.monotonic()

    with pytest.raises(DocumentError, match=message):
        parse_yaml(text)

    assert time.monotonic() - started < 60  # and not for ever


def test_aliases_within_the_limit_are_what_they_name():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]") == {
        "a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}],
    }  # fmt: skip


def test_a_name_is_a_text_where_it_names_a_model_and_tags_can_be_left_out():
    assert parse_yaml_documents("model: 100\nother: 100", {"model"}) == [{"model": "100", "other": 100}]
    assert parse_yaml_documents("a: !function os.system", without_tags=True) == [{"a": None}]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "run.json")

    with pytest.raises(DocumentError, match="a pipe or a device"):
        read_json(tmp_path / "run.json")
    assert Record.find(tmp_path) is None


@dataclass
class Inner:
    number: float


@dataclass
class Outer:
    name: str
    inner: Inner | None = None
    both: int | list[str] = 0
    pair: tuple[str, list[int]] | None = None
    many: dict[str, Inner] = field(default_factory=dict)


def test_a_document_becomes_its_dataclass():
    content = {
        "name": "n",
        "inner": {"number": 1},
        "both": ["a"],
        "pair": ["F32", [1]],
        "many": {"a": {"number": "nan"}},
    }

    read = typed(content, Outer)

    assert (read.inner, read.both, read.pair) == (Inner(1.0), ["a"], ("F32", [1]))
    assert read.many["a"].number != read.many["a"].number
    assert typed({"name": "n", "newer": 1}, Outer, foreign=True) == Outer("n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected a mapping"),
        ({}, "it lacks 'name'"),
        ({"name": 1}, "name: expected a text, got 1"),
        ({"name": "n", "inner": {"number": True}}, "inner: number: expected a number, got True"),
        (
            {"name": "n", "inner": {"number": 10**400}},
            "inner: number: expected a number, got one of 401 digits",
        ),
        ({"name": "n", "both": 1.5}, "both: expected a whole number, got 1.5"),
        ({"name": "n", "pair": ["a"]}, "pair: expected a list of 2"),
        ({"name": "n", "wrokers": 1}, "written by a newer mecha_exp: it has the unknown word 'wrokers'"),
        ({"name": "n", "many": {"a": None}}, "many: expected a mapping, got None"),
    ],
)
def test_what_is_not_of_its_dataclass_is_named(content: Any, message: str):
    with pytest.raises(DocumentError, match=message):
        typed(content, Outer)


def merged(folder: Path, origin: object) -> Path:
    """A merged model whose header has an origin."""
    path = folder / "merged.safetensors"
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    recipe = m.serialize(
        m.weighted_sum(m.model(f"{folder}/a.safetensors"), f"{folder}/a.safetensors", alpha=0.5)
    )
    text = origin if isinstance(origin, str) else json.dumps(origin)
    save_file({"w": torch.ones(2)}, path, {"mecha_recipe": recipe, "mecha_origin": text})
    return path


HOSTILE_ORIGINS = [
    ({"engine": {"workers": 1}}, "written by a newer mecha_exp: it has the unknown word 'workers'"),
    ({"engine": []}, "engine: expected a mapping"),
    ({"engine": {"on_tied": 7}}, "engine: expected a text"),
    ({"inputs": 7}, "inputs: expected a list"),
    ({"inputs": [None]}, "inputs: expected a text"),
    ({"methods": []}, "methods: expected a mapping"),
    ({"versions": {"torch": 2}}, "versions: expected a text"),
    ({"tiles": 1}, "written by a newer mecha_exp: it has the unknown word 'tiles'"),
    ("null", "expected a mapping"),
    ("[]", "expected a mapping"),
    ('"x"', "expected a mapping"),
    ("[" * 200_000, "more than 100 levels"),
    ("{", "it is not JSON"),
]


@pytest.mark.parametrize(("origin", "message"), HOSTILE_ORIGINS)
@pytest.mark.parametrize("verb", ["merge", "reproduce"])
def test_an_origin_of_another_kind_is_refused_in_words(tmp_path, run_cli, origin, message: str, verb: str):
    path = merged(tmp_path, origin)

    said = run_cli(verb, str(path), *(["-o", str(tmp_path / "out.safetensors")] if verb == "merge" else []))

    assert said.status == 1 and message in said.err, said
    assert "mecha_origin in its header" in said.err


def test_aliases_of_a_recipe_of_config_dir_end(tmp_path, run_cli):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(BOMB)

    said = run_cli("plan", "recipe=mine", "--config-dir", str(tmp_path), "tracking=none")

    assert said.status == 1 and "its aliases stand for more than 10,000 values" in said.err
    assert "mine.yaml" in said.err


@pytest.mark.parametrize("text", ["7", "[a, b]", "text"])
def test_a_file_of_config_dir_that_is_no_mapping_is_refused(text, tmp_path, run_cli):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")

    said = run_cli("plan", "experiment=mine", "--config-dir", str(tmp_path), "tracking=none")

    assert said.status == 1 and "mine.yaml: expected a mapping, got " in said.err


TOKENIZER = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": 1, "content": "b"}]}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": "x"}),
        ("tokenizer_config.json", {"additional_special_tokens": 7}),
        ("tokenizer.json", {**TOKENIZER, "added_tokens": 1.5}),
        ("tokenizer.json", {**TOKENIZER, "added_tokens": [{"id": "x"}]}),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}, "merges": 7}}),
        ("tokenizer.json", {"model": {"vocab": [7]}}),
        ("added_tokens.json", {"a": "x"}),
    ],
)
def test_a_tokenizer_of_another_kind_counts_as_none_with_a_warning(
    tmp_path, caplog, name: str, content: object
):
    from mecha_exp.sources.tokenizer import Tokenizer

    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / name).write_text(json.dumps(content))

    tokenizer = Tokenizer.beside(tmp_path)

    assert tokenizer is not None and tokenizer.tokens == {0: "a"}
    assert f"{tmp_path / name} counts as if it were not there" in caplog.text


@pytest.mark.parametrize("field", ["metrics", "names", "parts", "tags", "model"])
@pytest.mark.parametrize("value", [None, 7, [7], {"a": None}])
def test_a_result_of_the_store_that_is_damaged_is_none(tmp_path, field: str, value: object):
    from mecha_exp.lab.store import ResultStore
    from mecha_exp.lab.stored_results import StoredMerge

    store = ResultStore(tmp_path)
    store.put(StoredMerge("a1", {"recipe": "r"}, ["base"], {"x": 0.1}))
    path = tmp_path / "points" / "a1" / "merge.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    found = store.get("a1")

    assert found is None or (field, value) in (("model", None), ("parts", {"a": None}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "weighted_sum", "a": "a", "b": "b", "alpha": 10**400}, "alpha"),
        ({"model": "a", "merge_space": ["weight"]}, "unknown merge space"),
        ({"model": "a", "merge_space": {}}, "unknown merge space"),
    ],
)
def test_numbers_and_spaces_that_are_none_are_refused(config: dict[str, Any], message: str):
    from mecha_exp.recipe.yaml_reader import build_recipe

    with pytest.raises(m.RecipeError, match=message):
        build_recipe(config)


def test_a_number_of_an_adapter_is_one_that_a_float_can_be(tmp_path):
    from mecha_exp.peft.config import parse_config

    for content in ({"lora_alpha": 10**400}, {"r": 10**400}, {"alpha_pattern": {"q": 10**400}}):
        with pytest.raises(m.CheckpointError, match="expected a"):
            parse_config({"peft_type": "LORA", **content}, tmp_path)


def test_a_run_whose_recipe_is_not_utf8_is_listed(tmp_path, run_cli):
    Record("point").save(tmp_path / "run")
    (tmp_path / "run" / "recipe.mecha").write_bytes(b"\xff\xfe")

    said = run_cli("show", str(tmp_path / "run"))

    assert said.status == 0, said


def test_settings_of_a_run_that_are_damaged_are_named(tmp_path):
    from mecha_exp.runs.record import read_settings

    for text, message in (
        ("engine: 7", "engine: expected a mapping"),
        ("[", "not valid YAML"),
        ("plugins: x", "plugins"),
    ):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_settings(tmp_path)
