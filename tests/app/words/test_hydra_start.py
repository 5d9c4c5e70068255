"""What is done in place of Hydra, to save time, gives what Hydra gives."""

import logging
import os
import shutil
from pathlib import Path

import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core import utils as hydra_utils
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.grid import Grid
from mecha_exp.app.hydra.compose import CONFIG_NAME, composer_of, hydra_of
from mecha_exp.app.hydra.jobs import Jobs, Scratch, parse_override, run_job
from mecha_exp.app.hydra.plugins import register_with_hydra
from mecha_exp.app.main import main
from mecha_exp.errors import ConfigError

JOBS = [
    ["recipe=ties", "output=none", "alpha=0.3"],
    ["recipe=ties", "output=none", "alpha=0.5"],
    ["recipe=slerp", "blocks=GRAD_V", "models.experts=[a.safetensors,'b c.safetensors']"],
    ["recipe=slerp", "~rerun", "++blocks.encoder=0.2", "+new.key={a: [1, 2], b: null}"],
]


@pytest.mark.parametrize("kind", [ObjectType.CONFIG, ObjectType.GROUP])
@pytest.mark.parametrize(
    "group", ["", "recipe", "blocks", "blocks/SMOOTHSTEP", "hydra", "hydra/launcher", "no"]
)
def test_the_options_of_a_group_are_those_that_hydra_finds(group: str, kind: ObjectType):
    with hydra_of(get_args_parser().parse_args([])) as ours:
        loader = ours.config_loader
        theirs = ConfigLoaderImpl.get_group_options(loader, group, kind, None, ["hydra.job.num=0"])

        assert loader.get_group_options(group, kind) == theirs
        assert bool(theirs) == (group != "no") or kind is ObjectType.GROUP


def test_a_folder_of_the_users_adds_options(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nalpha: 1\n")

    with hydra_of(get_args_parser().parse_args(["--config-dir", str(tmp_path)])) as ours:
        assert {"mine", "ties"} <= set(ours.config_loader.get_group_options("recipe"))


def test_jobs_have_the_configuration_that_hydra_would_compose():
    register_with_hydra()
    with hydra_of(get_args_parser().parse_args([])) as ours:
        sweep = ours.compose_config(CONFIG_NAME, ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        theirs = ConfigLoaderImpl(ours.config_loader.get_search_path())

        made = list(Jobs(ours.config_loader, sweep, JOBS, first_number=5))
        composed = [theirs.load_sweep_config(sweep, words) for words in JOBS]

    for number, (ours_job, hydras_job) in enumerate(zip(made, composed, strict=True), 5):
        hydras_job.hydra.job.update(id=number, num=number)
        assert _everything(ours_job) == _everything(hydras_job)
        assert OmegaConf.is_struct(ours_job) == OmegaConf.is_struct(hydras_job)
        assert OmegaConf.is_readonly(ours_job.hydra) == OmegaConf.is_readonly(hydras_job.hydra)


COMPOSED = [
    *JOBS,
    ["alpha=0.1,0.2", "recipe=ties,slerp", "hydra.sweep.dir=s"],
    ["hydra.run.dir=a", "recipe=ties", "hydra.run.dir='b c'", "hydra.job.config.override_dirname.kv_sep=+"],
    ["blocks.encoder=0.2", "blocks={decoder: 0.1}", "+sweep.options={b: 1}", "hydra/launcher=basic"],
    ["hydra.job.env_copy=[HOME]", "hydra.searchpath=[pkg://mecha_exp]", "rerun=always"],
]
WRONG = [["recipe=no"], ["no=1"], ["~no"], ["+alpha.x=1"], ["alpha=1,2"], ["++recipe=ties"], ["hydra.no=1"]]


@pytest.mark.parametrize("mode", [RunMode.RUN, RunMode.MULTIRUN])
@pytest.mark.parametrize("words", [*COMPOSED, *WRONG])
def test_the_loader_composes_what_hydra_composes(words: list[str], mode: RunMode):
    register_with_hydra()
    with hydra_of(get_args_parser().parse_args([])) as ours:
        theirs = ConfigLoaderImpl(ours.config_loader.get_search_path())
        expected = _composed_or_error(theirs, words, mode)

        for _ in range(2):
            assert _composed_or_error(ours.config_loader, words, mode) == expected


def _composed_or_error(loader: ConfigLoader, words: list[str], mode: RunMode) -> object:
    try:
        return _everything(loader.load_configuration(CONFIG_NAME, words, mode))
    except HydraException as error:
        return str(error)


@pytest.mark.parametrize(
    "words", [["alpha=0.3"], ["alpha=0.3,0.5", "-m"], ["alpha=0.3,0.5", "output=none", "-m"]]
)
def test_a_command_composes_its_configuration_once(words: list[str], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counted: list[list[str]] = []
    compose = ConfigLoaderImpl.load_configuration

    def count(loader: ConfigLoaderImpl, name: str, overrides: list[str], *more: object) -> DictConfig:
        counted.append(overrides)
        return compose(loader, name, overrides, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)

    assert main(["tracking=none", "recipe=ties", *words]) == 0
    assert len(counted) == 1, counted


def test_the_next_batch_of_a_sweep_composes_nothing_from_the_files_again(monkeypatch):
    register_with_hydra()
    with hydra_of(get_args_parser().parse_args([])) as ours:
        sweep = ours.compose_config(CONFIG_NAME, ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        first = list(Jobs(ours.config_loader, sweep, JOBS))
        monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", lambda *_: pytest.fail("composed again"))
        again = list(Jobs(ours.config_loader, sweep, JOBS))

    assert [_everything(job) for job in again] == [_everything(job) for job in first]


def test_jobs_in_turn_have_nothing_of_the_one_before():
    plain = [["alpha=0.1", "++note=a"], ["alpha=0.2", "++note=b"], ["alpha=0.3"], ["++note=c"]]
    nested = [["++blocks.a=0.1"], ["++blocks.b=0.2"], ["++new={a: 1}"], ["++new={b: 2}"], ["+note=d"]]
    again = [["models.experts=[a]"], ["models.experts=[b,c]"], ["alpha=null"], ["alpha=${seed}"], ["alpha=1"]]
    beside = [
        [word, f"alpha=0.{i}"] for word in ("plugins=[a]", "+note=d", "~rerun", "alpha=1") for i in (1, 2)
    ]
    inside = [["++blocks={a: 1}", "++blocks.a=0.1"], ["++blocks={a: 1}", "++blocks.a=0.2"]]
    words = [*JOBS, *plain, *nested, *again, *reversed(plain), *JOBS, *beside, *inside]
    words += [[*reversed(pair)] for pair in (*inside, *beside)]
    register_with_hydra()
    with hydra_of(get_args_parser().parse_args([])) as ours:
        sweep = ours.compose_config(CONFIG_NAME, ["hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        jobs = Jobs(ours.config_loader, sweep, words)

        for number, (index, job) in enumerate(jobs.in_turn(range(len(words)))):
            assert index == number
            assert _everything(job) == _everything(jobs[number])


def test_points_in_turn_have_nothing_of_the_one_before():
    words = [["alpha=0.1"], ["alpha=0.2"], ["recipe=slerp", "alpha=1"], ["++new={a: 1}"], ["++new={b: 2}"]]
    register_with_hydra()
    with composer_of(["-m"]) as composer:
        grid = Grid.of(words, composer)

        for one, other in zip(grid.in_turn(), grid, strict=True):
            assert _everything(one) == _everything(other)


def test_a_point_after_one_that_cannot_be_made_has_all_of_its_values():
    words = [["alpha=0.1", "k=0.1"], ["models.experts.b=1", "k=0.2"], ["models.experts.b=2", "k=0.3"]]
    words += [["alpha=0.2", "k=0.3"], ["alpha=0.2", "k=0.4"]]
    register_with_hydra()
    with composer_of(["-m"]) as composer:
        grid = Grid.of(words, composer)
        scratch = Scratch()
        for point, given in zip(grid.points, words, strict=True):
            if given[0].startswith("models"):
                with pytest.raises(ConfigError):
                    point.config(scratch)
            else:
                assert _everything(point.config(scratch)) == _everything(point.config())


def test_a_job_can_be_changed_without_changing_the_others():
    with hydra_of(get_args_parser().parse_args([])) as ours:
        sweep = ours.compose_config(CONFIG_NAME, [], RunMode.MULTIRUN)

        first, second, *_ = Jobs(ours.config_loader, sweep, JOBS)

    first.models.base = "other.safetensors"
    first.hydra.job.name = "other"
    assert second.models.base != "other.safetensors" and second.hydra.job.name != "other"


@pytest.mark.parametrize("words", [[], ["hydra.job.chdir=true"], ["hydra.output_subdir=null"]])
def test_a_job_runs_as_hydra_runs_it(tmp_path: Path, monkeypatch, words: list[str]):
    register_with_hydra()
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}

    def task(config: DictConfig) -> float:
        seen["folder"], seen["recipe"] = Path.cwd(), HydraConfig.get().runtime.choices.recipe
        seen["output"], seen["variable"] = HydraConfig.get().runtime.output_dir, os.environ["MINE"]
        logging.getLogger("mecha_exp").warning("a warning")
        return float(config.alpha)

    fixed = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep", "+hydra.job.env_set.MINE=x", *words]
    with hydra_of(get_args_parser().parse_args([])) as ours:
        sweep = ours.compose_config(CONFIG_NAME, fixed, RunMode.MULTIRUN)
        job = Jobs(ours.config_loader, sweep, JOBS)[0]
        context = HydraContext(config_loader=ours.config_loader, callbacks=Callbacks())
        theirs = hydra_utils.run_job(task, job, "hydra.sweep.dir", "hydra.sweep.subdir", context)
        seen_by_theirs, files = dict(seen), _files(tmp_path / "sweep")
        shutil.rmtree(tmp_path / "sweep")
        result = run_job(Jobs(ours.config_loader, sweep, JOBS)[0], task, context)

    assert (
        (result.return_value, result.overrides) == (theirs.return_value, theirs.overrides) == (0.3, JOBS[0])
    )
    assert (result.working_dir, result.task_name) == (
        str(Path(theirs.working_dir).absolute()),
        theirs.task_name,
    )
    assert seen == seen_by_theirs and Path.cwd() == tmp_path and "MINE" not in os.environ
    assert _files(tmp_path / "sweep") == files and len(files) == (
        1 if "hydra.output_subdir=null" in words else 4
    )


def test_the_error_of_a_job_is_its_return_value(tmp_path: Path):
    def task(config: DictConfig) -> float:
        raise ZeroDivisionError("in the task")

    with hydra_of(get_args_parser().parse_args([])) as ours:
        fixed = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir='{tmp_path}'"]
        sweep = ours.compose_config(CONFIG_NAME, fixed, RunMode.MULTIRUN)
        context = HydraContext(config_loader=ours.config_loader, callbacks=Callbacks())
        result = run_job(Jobs(ours.config_loader, sweep, JOBS)[0], task, context)

    with pytest.raises(ZeroDivisionError, match="in the task"):
        _ = result.return_value


def _files(folder: Path) -> dict[str, object]:
    """The files of a job by name: what a YAML file says, whether another has any text."""
    return {
        path.name: OmegaConf.to_container(OmegaConf.load(path))
        if path.suffix == ".yaml"
        else bool(path.read_text())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_word_that_cannot_be_read_is_named():
    with pytest.raises(OverrideParseException) as raised:
        parse_override("alpha=[1")

    assert raised.value.override == "alpha=[1"


def _everything(config: DictConfig) -> object:
    return OmegaConf.to_container(config, resolve=False, enum_to_str=True)
