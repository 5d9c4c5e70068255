"""What an evaluator declares: libraries, checks before a merge, and what lies beside the inputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import Context, evaluator
from mecha_exp.engine.code_hash import of_function
from mecha_exp.engine.code_hash.modules import label_of
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import all_evaluators, find_evaluator, identity, read_scoring
from mecha_exp.evaluators.common import ModelFolder, chosen_device, model_folder

SHAPES = {"w": (2, 3)}


def folder(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file({"w": torch.zeros(2, 3)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("extra", "hint"), [("lm", r"pip install 'mecha_exp\[lm\]'"), ("", "pip install no_such_library")]
)
def test_a_library_that_is_missing_is_named_with_the_command(extra: str, hint: str):
    @evaluator("test_needs", metric="m", libraries=("json", "no_such_library"), extra=extra)
    def needs(state_dict):
        return {"m": 1.0}

    with pytest.raises(
        ConfigError, match=rf"^evaluator=test_needs needs no_such_library.* installed: {hint}$"
    ):
        find_evaluator("test_needs", SHAPES)


def test_a_check_sees_shapes_context_and_parameters_before_a_merge():
    seen = []

    @evaluator("test_checked", metric="m", check=lambda *arguments: seen.append(arguments))
    def checked(state_dict, *, times: int = 2):
        return {"m": 1.0}

    context = Context("mine")
    read_scoring({"name": "test_checked", "times": 3}, SHAPES, context=context)

    assert seen == [(SHAPES, context, {"times": 3})]


def test_the_version_of_a_library_decides_the_key(monkeypatch: pytest.MonkeyPatch):
    @evaluator("test_versions", metric="m", libraries=("numpy", "yaml"))
    def versions(state_dict):
        return {"m": 1.0}

    keys = []
    for number in ("1.0", "1.0", "2.0"):  # each as in a process of its own
        identity._version.cache_clear()
        monkeypatch.setattr(identity, "version", lambda name, number=number: number)
        keys.append(read_scoring({"name": "test_versions"}, SHAPES).evaluations[0].key)

    identity._version.cache_clear()
    assert keys[0] == keys[1] != keys[2]


def test_what_lies_beside_the_inputs_decides_the_key_and_paths_do_not(tmp_path: Path):
    @evaluator("test_depends", metric="m", depends=lambda context, _: model_folder(context).contents)
    def depends(state_dict):
        return {"m": 1.0}

    def key(path: Path) -> str:
        context = Context(inputs={"a": path})
        return read_scoring({"name": "test_depends"}, SHAPES, context=context).evaluations[0].key

    a, b = folder(tmp_path / "a", _name_or_path="me/a"), folder(tmp_path / "b", _name_or_path="me/b")
    first = key(a)
    assert key(b) == key(b / "model.safetensors") == first
    (b / "tokenizer.json").write_text("{}")
    with_tokenizer = key(b)
    folder(b, rope_theta=1.0)
    assert len({first, with_tokenizer, key(b)}) == 3


def test_an_optional_parameter_is_checked_like_others(tmp_path: Path):
    @evaluator("test_optional", metric="m")
    def optional(state_dict, *, count: int | None = None, file: Path | None = None):
        return {"m": 1.0}

    bound = all_evaluators()["test_optional"].bind({"count": None, "file": str(tmp_path)})
    assert bound == {"count": None, "file": tmp_path}
    with pytest.raises(ConfigError, match="expected a whole number or null, got 'two'") as error:
        all_evaluators()["test_optional"].bind({"count": "two", "file": "gone"})
    assert "evaluator.file: gone does not exist." in str(error.value)
    with pytest.raises(ConfigError, match=r"does not exist\. The folder is not set: name it, as"):
        all_evaluators()["test_optional"].bind({"file": "None/test"})  # of ${data.dir}/test


def test_splits_wait_for_the_file_of_the_last_one(tmp_path: Path):
    @evaluator("test_splits", metric="m", splits=("validation", "test"))
    def splits(state_dict, *, split: str = "validation", test: Path | None = None):
        return {"m": 1.0}

    assert read_scoring({"name": "test_splits"}, SHAPES).selection_split is None
    scoring = read_scoring({"name": "test_splits", "test": str(tmp_path)}, SHAPES)
    assert (scoring.selection_split, scoring.report_split) == ("validation", "test")


def test_the_folder_is_that_of_the_first_input_that_has_a_configuration(tmp_path: Path):
    bare, b = tmp_path / "bare.safetensors", folder(tmp_path / "b", size=3)
    save_file({"w": torch.zeros(2, 3)}, bare)

    found = model_folder(Context(inputs={"a": bare, "b": b / "model.safetensors"}))

    assert (found.path, found.config["size"]) == (b, 3)
    with pytest.raises(ConfigError, match=r"looked in .*\(models.base, models.experts\)"):
        model_folder(Context(inputs={"a": bare}))
    (b / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read as a model's configuration: expected a mapping"):
        _ = ModelFolder(b).config


def test_code_of_evaluators_counts_as_far_as_it_is_reached():
    assert label_of("mecha_exp.evaluators.common.networks", "mecha_exp.evaluators.lm_eval") is None
    assert label_of("mecha_exp.checkpoint", "mecha_exp.evaluators.lm_eval") == "mecha_exp"
    functions = [all_evaluators()[name].score for name in ("digits", "perplexity")]
    assert len({of_function(function) for function in functions}) == 2


def test_no_library_is_imported_to_know_the_evaluators():
    program = (
        "import sys; from mecha_exp.evaluation import all_evaluators; all_evaluators(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert not {"transformers", "lm_eval", "datasets", "sklearn", "diffusers"} & set(done.stdout.split())


def test_the_first_device_that_is_there_is_chosen():
    assert chosen_device("auto").type in ("cpu", "cuda")
