"""What the command line offers, beside the demo (test_demo.py); what goes wrong is in test_bad_input.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from programs import environment
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sweep_folders import only_run

import mecha_exp
from mecha_exp import deserialize, evaluator, merge
from mecha_exp.app.words.reader import reorder
from mecha_exp.cli import NO_READER, verbs
from mecha_exp.system import progress

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"


def test_a_single_run_shows_its_metrics_and_where_they_are(app, folder):
    outcome = app("recipe=weighted_sum", "alpha=0.2")

    assert outcome.status == 0
    assert "accuracy" in outcome.out
    assert "merged in" in outcome.out
    assert str(only_run(folder).relative_to(folder)) in outcome.out
    assert (only_run(folder) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "recipe=ties", "alpha=0.3,0.5"],
        ["recipe=ties", "-m", "alpha=0.3,0.5"],
        ["recipe=ties", "alpha=0.3,0.5", "--multirun"],
    ],
)
def test_the_multirun_flag_may_stand_anywhere(arguments):
    assert reorder(arguments)[1:] == ["recipe=ties", "alpha=0.3,0.5"]
    assert reorder(arguments)[0] in ("-m", "--multirun")


def test_a_flag_keeps_its_value_when_the_arguments_are_reordered():
    assert reorder(["a=1", "--config-dir", "mine", "b=2"]) == ["--config-dir", "mine", "a=1", "b=2"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no broken pipes")
def test_a_reader_that_leaves_ends_the_output_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)

    ended = subprocess.run(
        [sys.executable, "-m", "mecha_exp", "--help"], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    )

    os.close(writer)
    assert ended.returncode == NO_READER
    assert not ended.stderr


def test_no_output_keeps_no_model_and_measures_it_all_the_same(app, folder):
    app("output=none")

    assert not list(folder.rglob("*.safetensors"))
    metrics = json.loads((only_run(folder) / "metrics.json").read_text())
    assert 0.8 < metrics["accuracy"] < 1
    assert metrics["weights/distance/base"] > 0


def test_an_output_path_is_relative_to_the_current_folder(app, folder):
    app("output.path=models/merged.safetensors")

    assert (folder / "models" / "merged.safetensors").is_file()
    assert not (only_run(folder) / "model.safetensors").exists()


def test_a_sweep_may_name_each_output_after_its_point(app, folder):
    outcome = app("alpha=0.1,0.2", "output.path=m-${alpha}.safetensors", "-m")

    assert outcome.status == 0
    assert (folder / "m-0.1.safetensors").is_file()
    assert (folder / "m-0.2.safetensors").is_file()


def test_the_output_dtype_can_be_chosen(app, folder):
    app("output.dtype=bfloat16", "output.path=m.safetensors")

    assert {t.dtype for t in load_file(folder / "m.safetensors").values()} == {torch.bfloat16}


def test_models_of_ones_own_are_looked_for_in_the_current_folder_and_in_models_dir(app, folder):
    (folder / "elsewhere").mkdir()
    save_file({"w": torch.zeros(4)}, folder / "a.safetensors")
    save_file({"w": torch.ones(4)}, folder / "elsewhere" / "b.safetensors")

    outcome = app(
        "recipe=weighted_sum",
        "models.dir=elsewhere",
        "models.base=a.safetensors",
        "models.experts=[b.safetensors]",
        "alpha=0.25",
        "output.path=m.safetensors",
    )

    assert outcome.status == 0, outcome.err
    assert load_file(folder / "m.safetensors")["w"].tolist() == [0.25] * 4


def test_models_that_are_not_the_demos_are_measured_by_their_weights(app, folder):
    save_file({"w": torch.tensor([3.0, 4.0])}, folder / "a.safetensors")
    save_file({"w": torch.tensor([3.0, 4.5])}, folder / "b.safetensors")

    app("recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]", "alpha=1.0")

    metrics = json.loads((only_run(folder) / "metrics.json").read_text())
    assert metrics["weights/distance/a"] == pytest.approx(0.5)
    assert metrics["weights/relative_change/a"] == pytest.approx(0.1)
    assert metrics["weights/distance/b"] == 0
    assert "accuracy" not in metrics


def test_an_evaluator_that_is_asked_for_must_fit(app, folder):
    save_file({"w": torch.zeros(2)}, folder / "a.safetensors")

    outcome = app("recipe=n_average", "models.experts=[a.safetensors]", "evaluator=digits")

    assert outcome.status != 0
    assert "evaluator=digits cannot measure this model" in outcome.err


def test_the_plan_says_what_would_be_done_and_does_nothing(app, folder):
    outcome = app("recipe=ties", "k=0.5", "blocks=digits_late", "debug=plan")

    assert outcome.status == 0
    for words in (
        "base.safetensors",
        "expert_7_9",
        "212.0 kB",
        "0.5",
        "conv1",
        "passes over the data",
        "memory",
    ):
        assert words in outcome.out
    assert "Nothing was merged" in outcome.out
    assert list(folder.iterdir()) == []


def test_block_weights_reach_their_blocks_only(app, folder):
    app("recipe=weighted_sum", "alpha=1.0", "blocks.conv1=0", "output.path=m.safetensors")

    merged = load_file(folder / "m.safetensors")
    base, expert = (load_file(DIGITS / f"{name}.safetensors") for name in ("base", "expert_0_3"))
    assert torch.equal(merged["conv1.weight"], base["conv1.weight"])
    assert torch.equal(merged["fc1.weight"], expert["fc1.weight"])


def test_the_recipe_in_a_models_header_makes_the_same_tensors_again(app, folder):
    app("recipe=ties", "alpha=0.7", "output.path=m.safetensors")
    with safe_open(folder / "m.safetensors", "pt") as file:
        text = file.metadata()["mecha_recipe"]

    merge(deserialize(text), "again.safetensors")

    first, again = load_file("m.safetensors"), load_file("again.safetensors")
    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_a_recipe_as_text_may_call_the_method_of_a_plugin(app, folder):
    (folder / "own.py").write_text(
        "from torch import Tensor\nfrom mecha_exp import Parameter, Return, merge_method\n"
        "@merge_method(elementwise=True)\n"
        "def test_own_half(a: Parameter(Tensor)) -> Return(Tensor):\n    return a * 0.5\n"
    )
    (folder / "my.mecha").write_text(
        'version 0.1.0\nparameter "net" merge_space="weight" model_config=null\nmerge "test_own_half" &0\n'
    )
    base = Path(__file__).parents[2] / "examples" / "digits" / "base.safetensors"
    words = (
        "recipe=mecha",
        "recipe.path=my.mecha",
        f"net={base}",
        "evaluator=none",
        "output.path=h.safetensors",
    )

    outcome = app(*words, "plugins=own.py")

    assert outcome.status == 0, outcome.err
    assert torch.equal(load_file("h.safetensors")["fc1.bias"], load_file(base)["fc1.bias"] * 0.5)


def test_a_recipe_file_is_a_recipe(app, folder):
    app("recipe=ties", "alpha=0.7", "output.path=m.safetensors")
    (folder / "my.mecha").write_text((only_run(folder) / "recipe.mecha").read_text())

    outcome = app("recipe=mecha", "recipe.path=my.mecha", "output.path=again.safetensors")

    assert outcome.status == 0, outcome.err
    assert Path("again.safetensors").read_bytes() == Path("m.safetensors").read_bytes()


def test_a_broken_recipe_file_is_an_error_with_line_and_column(app, folder):
    (folder / "my.mecha").write_text('version 0.1.0\nmerge "weighted_sum" &0\n')

    outcome = app("recipe=mecha", "recipe.path=my.mecha")

    assert outcome.status != 0
    assert "line 2, column" in outcome.err


def test_an_experiment_is_a_sweep_without_being_told_so(app, folder):
    outcome = app("experiment=alpha_by_k", "k=0.2,0.5", "hydra.sweeper.params.alpha='0.5,0.8'")

    assert outcome.status == 0, outcome.err
    assert "alpha_by_k" in outcome.out
    assert len(list(folder.rglob("run.json"))) == 4


def test_the_same_command_gives_the_same_bytes(app, folder):
    for name in ("a", "b"):
        app("recipe=dare_ties", "density=0.3", f"output.path={name}.safetensors")

    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_another_seed_gives_another_merge(app, folder):
    for seed in (1, 2):
        app("recipe=dare_ties", f"seed={seed}", f"output.path={seed}.safetensors")

    assert Path("1.safetensors").read_bytes() != Path("2.safetensors").read_bytes()


def test_configuration_of_ones_own_is_found_by_config_dir(app, folder):
    (folder / "mine" / "recipe").mkdir(parents=True)
    (folder / "mine" / "recipe" / "half.yaml").write_text(
        "# @package _global_\nshare: 0.5\nrecipe:\n  method: weighted_sum\n  a: ${models.base}\n"
        "  b: ${models.experts.1}\n  alpha: ${share}\n"
    )

    outcome = app("recipe=half", "--config-dir", "mine", "share=0.1")

    assert outcome.status == 0, outcome.err


def test_a_file_of_ones_own_that_is_not_yaml_is_named_with_its_line(app, folder):
    (folder / "mine" / "recipe").mkdir(parents=True)
    (folder / "mine" / "recipe" / "half.yaml").write_text("# @package _global_\nshare: [0.5\n")

    outcome = app("recipe=half", "--config-dir", "mine")

    assert outcome.status == 1
    assert (
        "half.yaml: it is not valid YAML: line 3, column 1: did not find expected ',' or ']'" in outcome.err
    )


def test_help_shows_how_to_begin_and_what_there_is_to_choose(as_a_user, tmp_path):
    outcome = as_a_user("--help", cwd=tmp_path)

    assert outcome.status == 0
    for words in ("recipe=ties alpha=0.3,0.5,0.7 -m", "experiment=alpha_curve", "weighted_sum", "tile_size"):
        assert words in outcome.out
    for verb in verbs():
        assert f"python -m mecha_exp {verb} " in outcome.out, verb
    for group in {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml")}:
        assert f"\n{group} " in outcome.out, group
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["alpha=0.3,0.5"], ["blocks.*=interval(0,1)"], ["recipe=ties,slerp"]])
def test_help_does_not_mind_words_that_sweep(app, words):
    outcome = app(*words, "-h")

    assert outcome.status == 0, outcome.err
    assert "python -m mecha_exp ui " in outcome.out


@pytest.mark.parametrize(
    ("word", "message"), [("alhpa=1", "Could not override 'alhpa'"), ("alpha=[", "cannot be read")]
)
def test_help_says_what_is_wrong_with_the_words_beside_it(app, word, message):
    outcome = app(word, "-h")

    assert outcome.status == 1
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("verb", verbs())
def test_each_verb_explains_itself(app, verb):
    outcome = app(verb, "--help")

    assert outcome.status == 0
    assert outcome.out.startswith(f"usage: python -m mecha_exp {verb} ")
    assert f"python -m mecha_exp {verb} " in outcome.out.partition("example")[2], "an example of its use"


def test_the_configuration_can_be_shown(app):
    outcome = app("recipe=slerp", "--cfg", "job", "--resolve")

    assert outcome.status == 0
    assert "method: slerp" in outcome.out
    assert "a: pkg://mecha_exp.examples.digits/expert_0_3.safetensors" in outcome.out


def test_the_version_is_that_of_the_package(app):
    assert app("--version").out == f"mecha_exp {mecha_exp.__version__}\n"


@pytest.mark.heavy
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_answers_and_ends_with_its_parent(app, folder, free_port, ending):
    app("output=none", tracked=True)
    command = [sys.executable, "-m", "mecha_exp", "ui", "--port", str(free_port)]

    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        try:
            answer = _first_answer(f"http://127.0.0.1:{free_port}/health")
            server.send_signal(ending)
            server.wait(timeout=20)
        finally:
            server.kill()

    assert answer == b"OK"
    _await_end(f"http://127.0.0.1:{free_port}/health")


def _await_end(address: str) -> None:
    """Wait until nobody answers: the server of MLflow ends after the command that has started it."""
    for _ in range(60):
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except OSError:
            return
        time.sleep(0.5)
    raise TimeoutError(address)


def _first_answer(address: str) -> bytes:
    for _ in range(120):
        try:
            with urllib.request.urlopen(address, timeout=2) as answer:
                return answer.read()
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(address)


def test_inputs_that_are_called_alike_are_told_apart_by_their_folders(app, folder):
    for name, value in (("one", 1.0), ("two", 2.0)):
        (folder / name).mkdir()
        save_file({"w": torch.full((3,), value)}, folder / name / "model.safetensors")

    app(
        "recipe=weighted_sum",
        "models.base=one/model.safetensors",
        "models.experts=[two/model.safetensors]",
        "alpha=0.25",
    )

    metrics = json.loads((only_run(folder) / "metrics.json").read_text())
    assert metrics["weights/relative_change/one"] == pytest.approx(0.25)
    assert metrics["weights/relative_change/two"] == pytest.approx(0.375)


def test_an_evaluator_that_raises_fails_its_point_with_its_traceback(app, folder):
    @evaluator("test_broken", metric="x")
    def broken(state_dict):
        raise ZeroDivisionError("the score is broken")

    outcome = app("alpha=0.1,0.2", "output=none", "evaluator.name=test_broken", "-m")

    assert outcome.status != 0
    assert "2 of 2 points failed" in outcome.out
    assert "ZeroDivisionError: the score is broken" in outcome.out


def test_the_log_says_how_far_a_long_merge_is(app, folder, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)

    app("output=none")

    log = (only_run(folder) / "mecha_exp.log").read_text()
    assert re.search(r"[\d.]+ [kM]B of [\d.]+ MB, .*/s, \d+ s left, at conv", log)


def test_a_warning_about_inputs_is_given_once_for_all_points(app, folder):
    expert, other = (load_file(DIGITS / f"expert_{digits}.safetensors") for digits in ("0_3", "4_6"))
    coarse = {key: tensor.bfloat16() for key, tensor in other.items()}
    for name, tensors in {"expert": expert, "copy": expert, "coarse": coarse}.items():
        save_file(tensors, folder / f"{name}.safetensors")
    experts = "models.experts=[expert.safetensors,copy.safetensors,coarse.safetensors]"

    sweep = app("recipe=task_arithmetic", experts, "alpha=0.1,0.2,0.3", "output=none", "evaluator=none", "-m")

    said = " ".join((sweep.out + sweep.err).split())
    assert sweep.status == 0, said
    assert said.count("have the same content: one model that is given 2 times") == 1
    assert said.count("is merged as if it had been trained") == 1
