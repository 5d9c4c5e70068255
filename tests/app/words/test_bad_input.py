"""Whatever is wrong with a command is said before anything is written, with where and how to mend it."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import serialize, weighted_sum

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


def _model(path: Path, **shapes: tuple[int, ...]) -> str:
    save_file({key: torch.ones(shape) for key, shape in shapes.items()}, path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=tise"], "recipe=tise: there is no such recipe. Did you mean 'ties'"),
        (["alhpa=0.3"], "alhpa: the recipe 'ties' has no 'alhpa'. Did you mean 'alpha'?"),
        (["recipe.densty=0.3"], "recipe.densty: recipe has no 'densty'. Did you mean 'density'?"),
        (["engine.worker=1"], "engine.worker: engine has no 'worker'. Did you mean 'workers'?"),
        (["alpha=abc"], "alpha: expected a number, got 'abc'"),
        (["evaluator=perplexity"], "evaluator.data: no value is given, and there is no default. Type eval"),
        (["k=1.5"], "error: k: 1.5 is out of range [0, 1]"),
        (["ties_kept=7"], "error: ties_kept: expected true or false, got 7"),
        (["recipe=dare_ties", "density=0"], "error: density: 0 is out of range (0, 1]"),
        (["recipe=dare_ties", "weights=[1,2]"], "2 weights are given for 3 models"),
        (
            ["recipe.method=tise_sum"],
            "recipe.method: unknown merge method 'tise_sum'. Did you mean 'ties_sum'",
        ),
        (["alpha=0.3,0.5"], "alpha=0.3,0.5 has several values: add -m to run each of them"),
        (["recipe=n_average", "alpha=0.1,0.2", "-m"], "the recipe 'n_average' has no 'alpha'"),
        (
            ["recipe=ties,n_average", "kk=0.1,0.2", "-m"],
            "kk: the recipe 'n_average' has no 'kk'. It uses no hyperparameter.",
        ),
        (
            ["seed=0,1", "-m"],
            "seed: the recipe 'ties' has no 'seed'. It uses alpha, combine, elect, k, ties_kept, trim, "
            "variant, weights.",
        ),
        (["alpha=0.3", "-m", "--cfg", "job"], "Only one of --run, --multirun, --cfg, --info and"),
        (["trackng=none"], "trackng: the recipe 'ties' has no 'trackng'. Did you mean 'tracking'?"),
        (["recipe=ties,n_average", "sweep.replicates=2", "-m"], "and this recipe has no seed"),
        (
            ["recipe=weighted_sum", "+seed=1,2", "-m"],
            "seed is swept, but the recipe 'weighted_sum' does not use it, so every point would be the same "
            "merge. It uses alpha.",
        ),
        (["models.base=no_base.safetensors"], "the model 'no_base.safetensors' does not exist. Looked in"),
        (
            ["models.base=bse.safetensors", "models.dir=pkg://mecha_exp.examples.digits"],
            "Did you mean 'base.safetensors'",
        ),
        (["models.base=pkg://mecha_exp.examples.digits/x.safetensors"], "x.safetensors does not exist"),
        (["models.base=pkg://no.such.package/x.safetensors"], "there is no package 'no.such.package'"),
        (["models.experts=[]"], "error: models.experts: at least one value is needed"),
        (
            ["recipe=fisher"],
            "the models: python -m mecha_exp calibrate MODEL data=FILE kind=KIND output=FILE",
        ),
        (["recipe=rebasin_by_activations"], "mecha_exp calibrate EXPERT data=FILE kind=KIND output=FILE"),
        (["recipe=slerp", "models.experts=[a.safetensors]"], "needs more experts than models.experts lists"),
        (["recipe=mecha"], "recipe.path"),
        (["recipe=mecha", "recipe.path=no.mecha"], "'no.mecha' does not exist"),
        (
            ["engine.compute_dtype=int8"],
            "engine.compute_dtype: expected auto, float32 or float64, got torch.int8",
        ),
        (["engine.workers=0"], "engine.workers: expected a positive whole number, got 0"),
        (["engine.on_extra=kep"], "engine.on_extra: unknown choice 'kep'. Did you mean 'keep'?"),
        (["engine.on_missing=bas"], "engine.on_missing: unknown choice 'bas'. Did you mean 'base'?"),
        (["output.dtype=float15"], "unknown dtype 'float15'. Did you mean 'float16'"),
        (["evaluator.name=digit"], "unknown evaluator 'digit'. Did you mean 'digits'?"),
        (
            ["evaluator.name.0=digits"],
            "evaluator.name: expected a name as in evaluator.name=digits, got {'0'",
        ),
        (
            ["sweep.replicate=2", "alpha=0.1,0.2", "-m"],
            "not in '2'. Known: data, experts, seed. 2 seeds are sweep.replicates=2.",
        ),
        (["blocks.conv9=0.1"], "the pattern 'conv9' matches none of the 8 keys"),
        (
            ["alpha=0.1,0.2", "output.path=m.safetensors", "-m"],
            "output.path=m.safetensors is the same for several points",
        ),
        (["alpha=0.1,", "-m"], "'alpha=0.1,' cannot be read"),
        (
            ["alpha=range(0.9,0.1,0.2)", "-m"],
            "alpha=range(0.9,0.1,0.2): the range is empty. It has a start, an end and a step: range(1,9,2).",
        ),
        (["--config-dir", "no_conf"], "--config-dir no_conf: there is no such folder."),
        (["--config-path", "conf"], "--config-path would replace our own configuration"),
        (
            ["hydra.run.dir=s3://bucket/run"],
            "hydra.run.dir=s3://bucket/run: runs and sweeps keep their folders on a disk. Machines share "
            "results with store=s3://bucket/path, and a merged model goes to a bucket with python -m",
        ),
        (["alpha=0.1,0.2", "-m", "hydra.sweep.dir=gs://b/sweep"], "hydra.sweep.dir=gs://b/sweep: runs and"),
    ],
)
def test_a_wrong_word_is_an_error_with_its_place_and_the_nearest_right_one(app, folder, arguments, message):
    outcome = app(*arguments)

    assert outcome.status != 0
    assert message in outcome.err.replace("\n", " ")
    assert list(folder.iterdir()) == []


def test_all_problems_of_a_recipe_are_reported_together(app, folder):
    outcome = app("alpha=abc", "k=7", "elect=maybe")

    assert outcome.status != 0
    for name in ("alpha: ", "k: ", "elect: "):
        assert name in outcome.err


def test_a_file_that_is_no_checkpoint(app, folder):
    (folder / "m.safetensors").write_text("not a model")

    outcome = app("models.base=m.safetensors")

    assert outcome.status != 0
    assert "m.safetensors" in outcome.err
    assert not (folder / "outputs").exists()


def test_a_truncated_file(app, folder):
    whole = (DIGITS / "base.safetensors").read_bytes()
    (folder / "m.safetensors").write_bytes(whole[:-1000])

    outcome = app("models.base=m.safetensors")

    assert outcome.status != 0
    assert "m.safetensors: truncated" in outcome.err
    assert not (folder / "outputs").exists()


def test_shapes_that_differ_are_listed_up_to_ten_with_their_number(app, folder):
    wide = _model(folder / "wide.safetensors", **{f"layer{i:02}": (3, 3) for i in range(12)})
    narrow = _model(folder / "narrow.safetensors", **{f"layer{i:02}": (3, 2) for i in range(12)})

    outcome = app("recipe=weighted_sum", f"models.base={wide}", f"models.experts=[{narrow}]")

    assert outcome.status != 0
    assert "12 keys have shapes that differ between the inputs" in outcome.err
    assert "layer00: [3, 3] in" in outcome.err
    assert "layer09" in outcome.err
    assert "layer10" not in outcome.err
    assert "and 2 more" in outcome.err


def test_a_missing_key_is_named_with_its_file_and_what_to_do(app, folder):
    whole = _model(folder / "whole.safetensors", a=(2,), b=(2,))
    part = _model(folder / "part.safetensors", a=(2,))

    outcome = app("recipe=weighted_sum", f"models.base={whole}", f"models.experts=[{part}]")

    assert outcome.status != 0
    assert "part.safetensors lacks 1 of the 2 keys that the other inputs have: b" in outcome.err
    assert " engine.on_missing=skip leaves such keys out, engine.on_missing=base takes them" in outcome.err


def test_a_setting_that_a_message_names_can_be_typed(app, folder):
    """For the application as for the verbs that read a recipe file."""
    whole = _model(folder / "whole.safetensors", a=(2,), b=(2,))
    part = _model(folder / "part.safetensors", a=(2,))
    recipe = folder / "r.mecha"
    recipe.write_text(serialize(weighted_sum(str(whole), str(part), alpha=0.5)))
    words = ["recipe=weighted_sum", f"models.base={whole}", f"models.experts=[{part}]", "evaluator=none"]

    for command in ([*words, "output=none"], ["merge", "r.mecha"], ["plan", "r.mecha"]):
        refused = app(*command)
        assert refused.status == 1
        setting = re.search(r"engine\.on_missing=skip", refused.err)[0]
        assert app(*command, setting).status == 0
    wrong = app("plan", "r.mecha", "engine.on_mising=skip", "on_missing=skip").err
    assert "Did you mean 'engine.on_missing'?" in wrong and "on_missing=skip' is not a setting" in wrong
    assert "engine.on_missing: unknown choice 'skp'" in app("plan", "r.mecha", "engine.on_missing=skp").err


def test_a_key_that_no_config_knows_is_left_out_or_an_error_as_the_configuration_says(app, folder):
    Path("model_configs").mkdir()
    Path("model_configs/two.yaml").write_text(
        "identifier: app_extras-test\ncomponents:\n  body:\n    keys:\n      app_extras.{a,b}: [2]\n"
    )
    for name in ("base", "other"):
        tensors = {key: torch.ones(2) for key in ("app_extras.a", "app_extras.b", "step")}
        save_file(tensors, folder / f"{name}.safetensors")
    words = ["recipe=weighted_sum", "models.base=base.safetensors", "models.experts=[other.safetensors]"]

    left_out = app(*words, "output.path=merged.safetensors", "evaluator=none")
    refused = app(*words, "engine.on_extra=error", "output.path=x.safetensors", "evaluator=none")

    said = "has 1 key that is not in its model config 'app_extras-test': step"
    assert left_out.status == 0
    assert said in " ".join((left_out.out + left_out.err).split())
    assert load_file("merged.safetensors").keys() == {"app_extras.a", "app_extras.b"}
    assert refused.status != 0
    assert said in refused.err


def test_an_output_that_is_an_input_is_refused_before_it_is_touched(app, folder):
    base = folder / "base.safetensors"
    base.write_bytes((DIGITS / "base.safetensors").read_bytes())

    outcome = app("models.base=base.safetensors", "output.path=base.safetensors")

    assert outcome.status != 0
    assert "which would be destroyed" in outcome.err
    assert base.read_bytes() == (DIGITS / "base.safetensors").read_bytes()


def test_a_name_that_is_not_text_is_refused_before_any_work(as_a_user, tmp_path):
    name = os.fsdecode(b"sp\xe4t.safetensors")

    outcome = as_a_user(f"output.path={name}", cwd=tmp_path)

    assert outcome.status == 1
    assert "'output.path=sp\\udce4t.safetensors' has a name that is not UTF-8" in outcome.err
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_is_a_file(app, folder):
    (folder / "taken").write_text("a file")

    outcome = app("output.path=taken/merged.safetensors")

    assert outcome.status != 0
    assert "taken" in outcome.err
    assert not (folder / "outputs").exists()


def test_nan_in_an_input_names_the_file_and_the_key(app, folder):
    save_file({"w": torch.tensor([1.0, float("nan")])}, folder / "bad.safetensors")
    _model(folder / "good.safetensors", w=(2,))

    outcome = app("recipe=weighted_sum", "models.base=good.safetensors", "models.experts=[bad.safetensors]")

    assert outcome.status != 0
    assert "bad.safetensors: the key 'w' has values that are not finite" in outcome.err
    assert "on_nonfinite=keep" in outcome.err
    assert not list(folder.rglob("outputs/**/*.safetensors"))


@pytest.mark.usefixtures("figures")
def test_one_bad_point_does_not_stop_the_others(app, folder):
    outcome = app("alpha=0.3,abc,0.5", "output=none", "-m")

    assert outcome.status != 0
    assert "1 of 3 points failed" in outcome.out
    assert "alpha=abc: alpha: expected a number, got 'abc'" in outcome.out
    rows = next(folder.rglob("sweep.csv")).read_text().splitlines()
    assert [row.split(",")[2] for row in rows[1:4]] == ["FINISHED", "FAILED", "FINISHED"]
    assert next(folder.rglob("sweep.png")).is_file()


def test_a_failed_point_is_a_failed_run_with_its_error(app, folder):
    from mlflow.tracking import MlflowClient

    app("alpha=0.3,abc", "output=none", "-m", tracked=True)

    client = MlflowClient(f"sqlite:///{(folder / 'outputs/mlflow.db').as_posix()}")
    experiment = client.get_experiment_by_name("mecha_exp")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert runs["alpha=abc"].info.status == "FAILED"
    assert "expected a number" in runs["alpha=abc"].data.tags["error"]
    assert runs["alpha=0.3"].info.status == "FINISHED"
    assert runs["ties by alpha"].info.status == "FAILED"


def test_a_server_that_does_not_answer_costs_no_merge_and_can_be_told_later(app, folder):
    outcome = app("tracking.uri=http://127.0.0.1:9", tracked=True)

    assert outcome.status != 0
    assert "the MLflow server at http://127.0.0.1:9 does not answer" in outcome.err
    (run,) = (folder / "outputs" / "runs").iterdir()
    assert f"python -m mecha_exp track {run.relative_to(folder)}" in outcome.err.replace("\n", " ")
    assert (run / "model.safetensors").is_file()

    later = app("track", str(run))

    assert later.status == 0
    assert "logged 'ties'" in later.out


@pytest.mark.parametrize("words", [[], ["alpha=0.3,0.5", "output=none", "-m"]], ids=["run", "sweep"])
def test_a_database_without_a_name_is_refused_before_any_work(app, folder, words):
    outcome = app("tracking.uri=sqlite:///", *words, tracked=True)

    assert outcome.status != 0
    assert "tracking.uri=sqlite:/// names no file" in outcome.err
    assert not (folder / "outputs").exists()


def test_a_database_below_a_file_is_refused_before_any_work(app, folder):
    (folder / "file").touch()

    outcome = app("tracking.uri=sqlite:///file/mlflow.db", tracked=True)

    assert outcome.status != 0
    assert outcome.err.startswith("error: tracking.uri=sqlite:///file/mlflow.db cannot be created: ")
    assert "file is not a folder. Name a file elsewhere, or leave it out with tracking=none." in outcome.err


def test_an_experiment_without_a_name_is_refused_before_any_work(app, folder):
    outcome = app("tracking.experiment=null", tracked=True)

    assert outcome.status != 0
    assert "tracking.experiment=None: expected a name of 1 to 500 characters" in outcome.err
    assert not (folder / "outputs").exists()


def test_an_output_that_is_a_loop_of_links_is_refused(app, folder):
    (folder / "loop").symlink_to("loop")

    outcome = app("output.path=loop")

    assert outcome.status != 0
    assert "it is a symbolic link that leads back to itself" in outcome.err


def test_the_same_of_a_sweep(app, folder):
    outcome = app("alpha=0.3,0.5", "output=none", "tracking.uri=http://127.0.0.1:9", "-m", tracked=True)

    assert outcome.status != 0
    assert outcome.err.count("does not answer") == 1
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()

    later = app("track", str(sweep))

    assert later.status == 0
    assert "logged 2 points" in later.out


def test_tracking_a_folder_that_holds_no_run(app, folder):
    outcome = app("track", ".")

    assert outcome.status != 0
    assert "holds no finished run" in outcome.err


def test_the_dashboard_of_a_folder_where_nothing_was_tracked(app, folder):
    outcome = app("ui")

    assert outcome.status != 0
    assert "nothing has been tracked in this folder yet" in outcome.err


def test_a_name_that_belongs_into_a_group_is_met_with_the_group(app):
    outcome = app("on_tied=untie", "dtype=bfloat16")

    assert outcome.status == 1
    assert "Did you mean 'engine.on_tied'?" in outcome.err
    assert "Did you mean 'output.dtype'?" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["~output"], "~output: every run needs 'output'. Choose an option of it, as in output=none."),
        (["~output", "experiment=alpha_curve"], "~output: every run needs 'output'."),
        (["~sweep.mode", "alpha=0.1,0.2", "-m"], "~sweep.mode: settings of a sweep cannot be taken away."),
        (["evaluator.timeout.0=3"], "evaluator.timeout: expected a value, got {'0': 3}."),
        (["evaluator.race_alpha.0=1", "alpha=0.1,0.2", "-m"], "evaluator.race_alpha: expected a value, got"),
    ],
)
def test_what_every_run_reads_is_not_taken_away(app, words, message):
    outcome = app(*words)

    assert outcome.status == 1
    assert message in " ".join(outcome.err.split())
