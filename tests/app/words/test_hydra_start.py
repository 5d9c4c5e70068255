"""What is done in place of Hydra, to save time, gives what Hydra gives; its plugins and callbacks work."""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import hydra
import pytest
from hydra.core import utils as hydra_utils
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import HydraContext
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.config.compose import CONFIG_NAME, Composer, composer_of
from mecha_exp.app.config.execution import Callbacks, run_job, yaml_text
from mecha_exp.app.config.grid import Grid
from mecha_exp.app.config.jobs import Composed, Jobs, Scratch
from mecha_exp.app.config.overrides import parse_override
from mecha_exp.app.main import main
from mecha_exp.errors import ConfigError

JOBS = [
    ["recipe=ties", "output=none", "alpha=0.3"],
    ["recipe=ties", "output=none", "alpha=0.5"],
    ["recipe=slerp", "blocks=GRAD_V", "models.experts=[a.safetensors,'b c.safetensors']"],
    ["recipe=slerp", "~rerun", "++blocks.encoder=0.2", "+new.key={a: [1, 2], b: null}"],
]
SWEEP = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=sweep"]


def by_hydra(words: Sequence[str]) -> DictConfig:
    """The configuration that Hydra's public function composes."""
    return hydra.compose(CONFIG_NAME, [*words], return_hydra_config=True)


def jobs_of(composer: Composer, words: Sequence[Sequence[str]], first: int = 0) -> Jobs:
    return composer.jobs(SWEEP, words, first, like=composer.compose(SWEEP))


def test_a_folder_of_the_users_adds_options(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nalpha: 1\n")

    with composer_of(["--config-dir", str(tmp_path)]) as composer:
        assert {"mine", "ties"} <= composer.options("recipe")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"recipe/evil.yaml": "# @package hydra.callbacks\nx: {_target_: os.abort}\n"}, "hydra.callbacks"),
        ({"recipe/evil.yaml": "defaults: ['/code@hydra.callbacks']\n", "code.yaml": "x: 1\n"}, "/code@hydra"),
        ({"recipe/evil.yaml": "defaults: [{'/models@_global_.hydra.x': digits}]\n"}, "_global_.hydra.x"),
        ({"hydra/launcher/evil.yaml": "_target_: os.abort\n"}, "hydra.launcher"),
        ({"recipe/evil.yaml": "# @package _global_\nhydra: 3\n"}, "sets hydra,"),
    ],
)
def test_no_way_of_defaults_leads_a_file_to_the_settings_of_hydra(tmp_path: Path, files, named: str):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    group = next(iter(files)).rpartition("/")[0]

    with (
        pytest.raises(ConfigError, match="which can run code") as raised,
        composer_of(["--config-dir", str(tmp_path)]) as composer,
    ):
        composer.compose([f"{group}=evil"])

    assert named in str(raised.value)


def test_jobs_have_the_configuration_that_hydra_would_compose():
    with composer_of([]) as composer:
        made = list(jobs_of(composer, JOBS, first=5))
        composed = [by_hydra([*SWEEP, *words]) for words in JOBS]

    for number, (ours_job, hydras_job) in enumerate(zip(made, composed, strict=True), 5):
        hydras_job.hydra.job.update(id=number, num=number)
        assert _everything(ours_job) == _everything(hydras_job)
        assert OmegaConf.is_struct(ours_job) == OmegaConf.is_struct(hydras_job)
        assert OmegaConf.is_readonly(ours_job.hydra) == OmegaConf.is_readonly(hydras_job.hydra)


def test_the_jobs_of_a_sweep_share_what_is_resolved_once(monkeypatch):
    times = iter("abc")
    OmegaConf.register_new_resolver("test_now", lambda: next(times), use_cache=True)
    with composer_of([]) as composer:
        words = ["+note='${test_now:}'"]
        like = composer.compose([*SWEEP, *words])
        assert like.note == "a"

        jobs = composer.jobs(SWEEP, [[*words, "alpha=0.1"], [*words, "alpha=0.2"]], 0, like=like)

        assert [job.note for job in jobs] == ["a", "a"]


COMPOSED = [
    *JOBS,
    ["hydra.run.dir=a", "recipe=ties", "hydra.run.dir='b c'", "hydra.job.config.override_dirname.kv_sep=+"],
    ["++blocks.encoder=0.2", "++blocks={decoder: 0.1}", "+sweep.options={b: 1}", "hydra/launcher=basic"],
    ["hydra.job.env_copy=[HOME]", "hydra.searchpath=[pkg://mecha_exp]", "rerun=always"],
    [
        "~engine.device",
        "++alpha=1",
        "models.experts.0=x",
        "hydra.job.config.override_dirname.exclude_keys=[k]",
    ],
]
WRONG = [
    ["recipe=no"],
    ["no=1"],
    ["~no"],
    ["+alpha=1"],
    ["hydra.no=1"],
    ["blocks={decoder: 0.1}"],
    ["~alpha=17"],
]


@pytest.mark.parametrize("words", COMPOSED)
def test_a_configuration_is_what_hydra_composes(words: list[str]):
    with composer_of([]) as composer:
        for _ in range(2):
            assert _everything(composer.compose(words)) == _everything(by_hydra(words))


@pytest.mark.parametrize("words", WRONG)
def test_what_hydra_refuses_is_refused(words: list[str]):
    with composer_of([]) as composer:
        with pytest.raises(HydraException):
            by_hydra(words)
        with pytest.raises((HydraException, ConfigError)):
            composer.compose(words)


@pytest.mark.parametrize(
    "words", [["alpha=0.3"], ["alpha=0.3,0.5", "-m"], ["alpha=0.3,0.5", "output=none", "-m"]]
)
def test_a_command_composes_its_configuration_once(words: list[str], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    counted: list[list[str]] = []
    compose = hydra.compose

    def count(name: str, overrides: list[str], **more: bool) -> DictConfig:
        counted.append(overrides)
        return compose(name, overrides, **more)

    monkeypatch.setattr(hydra, "compose", count)

    assert main(["tracking=none", "recipe=ties", *words]) == 0
    assert len(counted) == 1, counted


def test_the_next_batch_of_a_sweep_composes_nothing_from_the_files_again(monkeypatch):
    with composer_of([]) as composer:
        first = list(jobs_of(composer, JOBS))
        monkeypatch.setattr(hydra, "compose", lambda *_, **__: pytest.fail("composed again"))
        again = list(jobs_of(composer, JOBS))

    assert [_everything(job) for job in again] == [_everything(job) for job in first]


def test_a_part_of_the_jobs_is_all_that_a_worker_needs():
    with composer_of([]) as composer:
        jobs = jobs_of(composer, JOBS, first=5)
        part = jobs.part([3, 1])

        assert part.numbers == [8, 6]
        assert [_everything(job) for job in part] == [_everything(jobs[3]), _everything(jobs[1])]
        assert len(part.bases) < len(jobs.bases)


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
    with composer_of([]) as composer:
        jobs = jobs_of(composer, words)

        for number, (index, job) in enumerate(jobs.in_turn(range(len(words)))):
            assert index == number
            assert _everything(job.config) == _everything(jobs[number])
            assert job.written == OmegaConf.to_container(job.config, enum_to_str=True)


def test_points_in_turn_have_nothing_of_the_one_before():
    words = [["alpha=0.1"], ["alpha=0.2"], ["recipe=slerp", "alpha=1"], ["++new={a: 1}"], ["++new={b: 2}"]]
    with composer_of(["-m"]) as composer:
        grid = Grid.of(words, composer)

        for one, other in zip(grid.in_turn(), grid, strict=True):
            assert _everything(one) == _everything(other)


def test_a_point_after_one_that_cannot_be_made_has_all_of_its_values():
    words = [["alpha=0.1", "k=0.1"], ["models.experts.b=1", "k=0.2"], ["models.experts.b=2", "k=0.3"]]
    words += [["alpha=0.2", "k=0.3"], ["alpha=0.2", "k=0.4"]]
    with composer_of(["-m"]) as composer:
        grid = Grid.of(words, composer)
        scratch = Scratch()
        for point, given_words in zip(grid.points, words, strict=True):
            if given_words[0].startswith("models"):
                with pytest.raises(ConfigError):
                    point.config(scratch)
            else:
                assert _everything(point.config(scratch)) == _everything(point.config())


def test_a_job_can_be_changed_without_changing_the_others():
    with composer_of([]) as composer:
        first, second, *_ = jobs_of(composer, JOBS)

    first.models.base = "other.safetensors"
    first.hydra.job.name = "other"
    assert second.models.base != "other.safetensors" and second.hydra.job.name != "other"


@pytest.mark.parametrize("words", [[], ["hydra.job.chdir=true"], ["hydra.output_subdir=null"]])
def test_a_job_runs_as_hydra_runs_it(tmp_path: Path, monkeypatch, words: list[str]):
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}

    def task(config: DictConfig) -> float:
        seen["folder"], seen["recipe"] = Path.cwd(), HydraConfig.get().runtime.choices.recipe
        seen["output"], seen["variable"] = HydraConfig.get().runtime.output_dir, os.environ["MINE"]
        logging.getLogger("mecha_exp").warning("a warning")
        return float(config.alpha)

    settings = [*SWEEP, "+hydra.job.env_set.MINE=x", *words]
    with composer_of([]) as composer:
        jobs = composer.jobs(settings, JOBS, 0, like=composer.compose(settings))
        callbacks = Callbacks(jobs[0])
        context = HydraContext(GlobalHydra.instance().config_loader(), callbacks)  # type: ignore[arg-type]
        theirs = hydra_utils.run_job(task, jobs[0], "hydra.sweep.dir", "hydra.sweep.subdir", context)
        seen_by_theirs, files = dict(seen), _files(tmp_path / "sweep")
        shutil.rmtree(tmp_path / "sweep")
        result = run_job(Composed(jobs[0]), task, callbacks)

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


def test_the_error_of_a_job_is_raised(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def task(config: DictConfig) -> float:
        raise ZeroDivisionError("in the task")

    with composer_of([]) as composer:
        job = jobs_of(composer, JOBS)[0]
        with pytest.raises(ZeroDivisionError, match="in the task"):
            run_job(Composed(job), task, Callbacks(job))


VALUES = st.text() | st.floats(allow_nan=False) | st.integers() | st.none() | st.booleans()


@given(st.lists(VALUES))
def test_what_is_written_is_read_by_omegaconf_as_it_was(values: list[object]):
    plain = [value for value in values if "${" not in str(value)]

    assert OmegaConf.to_container(OmegaConf.create(yaml_text({"x": plain}))) == {"x": plain}


CALLBACK = """
from pathlib import Path

class Noting:
    def __getattr__(self, event):
        if not event.startswith("on_"):
            raise AttributeError(event)
        events = Path("events")
        return lambda **about: events.write_text((events.exists() and events.read_text() or "") + event + " ")
"""


@pytest.mark.parametrize("sweeper", ["lab", "basic"])
@pytest.mark.parametrize("launcher", ["onepass", "basic"])
def test_callbacks_are_told_of_sweeps_with_every_sweeper_and_launcher(
    sweeper: str, launcher: str, app, folder: Path, monkeypatch
):
    (folder / "noting_callback.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(folder)
    words = ["+hydra.callbacks.mine._target_=noting_callback.Noting", "output=none", "evaluator=none"]

    outcome = app(
        *words,
        "alpha=0.3,0.5",
        "-m",
        f"hydra/sweeper={sweeper}",
        f"hydra/launcher={launcher}",
        "hydra.sweep.dir=s",
    )

    assert outcome.status == 0, outcome.err
    job = ["on_job_start", "on_job_end"]
    events = (folder / "events").read_text().split()
    assert events == ["on_multirun_start", *job, *job, "on_multirun_end"]
    assert sorted(path.parent.name for path in (folder / "s").rglob("run.json")) == ["0", "1"]
    assert {path.name for path in (folder / "s" / "0" / ".hydra").iterdir()} == {
        "config.yaml", "hydra.yaml", "overrides.yaml",
    }  # fmt: skip
    assert OmegaConf.load(folder / "s" / "multirun.yaml").hydra.sweep.dir == "s"


def test_callbacks_are_told_of_a_single_run(app, folder: Path, monkeypatch):
    (folder / "noting_callback.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(folder)

    outcome = app("+hydra.callbacks.mine._target_=noting_callback.Noting", "output=none", "evaluator=none")

    assert outcome.status == 0, outcome.err
    events = (folder / "events").read_text().split()
    assert events == ["on_run_start", "on_job_start", "on_job_end", "on_run_end"]


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
