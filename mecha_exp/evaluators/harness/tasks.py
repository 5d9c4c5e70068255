"""The tasks of lm-evaluation-harness: found by name, loaded once, checked before anything is merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from mecha_exp.documents import MAX_YAML, parse_yaml_documents, read_bytes
from mecha_exp.errors import ConfigError, did_you_mean, nearest, shortened, some
from mecha_exp.evaluators.common.libraries import calm
from mecha_exp.evaluators.common.tables import require_other_examples

_UNDEFINED = re.compile(r"'([^']+)' is undefined")


class LoadedTasks:
    """Tasks with their data, in place of the library's manager, which would load them for each model.

    Attributes:
        tasks: by name.
    """

    def __init__(self, tasks: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        self.tasks, self._groups = dict(tasks), dict(groups)

    def load(self, names: Sequence[str]) -> dict[str, Any]:
        """What `TaskManager.load` returns: copies, for the library writes its settings into them."""
        return {"tasks": {name: _copy(task) for name, task in self.tasks.items()}, "groups": self._groups}

    def alone(self, name: str) -> LoadedTasks:
        """One of the tasks."""
        return LoadedTasks({name: self.tasks[name]}, {})

    def on(self, split: str | None) -> LoadedTasks:
        """The tasks with the examples of a split; None is the split that the library takes."""
        return self._on_validation if split == "validation" else self

    @cached_property
    def _on_validation(self) -> LoadedTasks:
        """The tasks with the examples of their validation splits in place of those of their test splits.

        The name of the split is changed, and not left out: by it the library knows that an example must not
        be among its own few-shot examples.
        """
        tasks = {name: _copy(task) for name, task in self.tasks.items()}
        for task in tasks.values():
            task._config.test_split = task.config.validation_split
        return LoadedTasks(tasks, self._groups)

    def check_split(self, split: str, where: str) -> None:
        """Check that each task has a split.

        Args:
            split: `validation` or `test`.
            where: the place in the configuration, for the message.

        Raises:
            ConfigError: there is no such split, or a task lacks it.
        """
        if split not in ("validation", "test"):
            raise ConfigError(f"{where}: expected validation or test.")
        lacking = [n for n, task in self.tasks.items() if not getattr(task.config, f"{split}_split", None)]
        if lacking:
            raise ConfigError(
                f"{where}: no {split} split has {some(lacking)}. Leave out these tasks, or the setting."
            )

    def check_splits(self, where: str) -> None:
        """Check that each task has a validation and a test split, of different examples.

        Raises:
            ConfigError: one has not, or a label of a user's task is beyond its choices.
        """
        for split in ("validation", "test"):
            self.check_split(split, where)
        for name, task in self._on_validation.tasks.items():
            _check_labels(task)
            validation, test = (map(repr, part.eval_docs) for part in (task, self.tasks[name]))
            require_other_examples(validation, test, f"{where}: the task {name}")

    def among(self, examples: Mapping[str, Sequence[int]]) -> LoadedTasks:
        """The tasks that have some examples, with the same few-shot examples for each as among all."""
        tasks = {name: _copy(self.tasks[name]) for name in examples}
        for name, places in examples.items():
            if hasattr(tasks[name], "sampler"):
                tasks[name].sampler = _InTurn(tasks[name], places)
        return LoadedTasks(tasks, {})

    def __getattr__(self, name: str) -> Any:  # for messages about tasks
        return {}


class _InTurn:
    """A sampler of few-shot examples that draws for left-out examples, too, as one generator serves all.

    Args:
        task: whose sampler it is.
        places: the examples that are asked for, ascending.
    """

    def __init__(self, task: Any, places: Sequence[int]) -> None:
        self._task, self._sampler, self._places = task, task.sampler, places
        self._start()

    def _start(self) -> None:
        self._next, self._asked, self._documents = 0, iter(self._places), None

    def set_rnd(self, seed: int | None) -> None:
        """Begin anew, with a seed."""
        self._sampler.set_rnd(seed)
        self._start()

    def sample(self, n: int, eval_doc: Any = None, **more: Any) -> Any:
        """The few-shot examples of the next example, which are not that example itself."""
        place = next(self._asked)
        if eval_doc is not None and self._documents is None:
            self._documents = self._task.eval_docs
        for earlier in range(self._next, place):
            own = None if self._documents is None else self._documents[earlier]
            self._sampler.sample(n, eval_doc=own, **more)
        self._next = place + 1
        return self._sampler.sample(n, eval_doc=eval_doc, **more)


def _copy(task: Any) -> Any:
    """A copy of a task with a configuration of its own, and the same data."""
    copied = copy(task)
    copied._config = copy(task.config)
    copied._config.generation_kwargs = deepcopy(task.config.generation_kwargs)
    return copied


def load_tasks(names: Sequence[str], include: str | None, *, offline: bool) -> LoadedTasks:
    """The tasks with their data; loaded once in a process.

    Args:
        names: of tasks, groups and tags, or paths of YAML files.
        include: a folder of YAML files; None for the library's own tasks alone.
        offline: whether nothing may be downloaded.

    Raises:
        ConfigError: a task is unknown, or its data is not there.
    """
    return _loaded(tuple(names), include, _changes(names, include), offline)


def local_files(names: Sequence[str], include: str | None) -> list[Path]:
    """The YAML files of a user's tasks, and the data files that they name, by path.

    Raises:
        ConfigError: a folder or a file does not exist.
    """
    if include is not None and not Path(include).is_dir():
        raise ConfigError(f"evaluator.include_path={include}: there is no such folder.")
    folder = sorted(Path(include).rglob("*")) if include else []
    files = [file for file in folder if file.suffix in (".yaml", ".yml", ".py")]
    for name in names:
        if _is_file(name):
            if not Path(name).is_file():
                raise ConfigError(f"evaluator.tasks: the file {name} does not exist.")
            files.append(Path(name))
    data = [path for file in files if file.suffix != ".py" for path in _data_files(file)]
    return list(dict.fromkeys([*files, *data]))


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _data_files(file: Path) -> Iterator[Path]:
    """The local data files that a task's YAML names.

    Raises:
        ConfigError: one does not exist, or the file is not YAML.
    """
    try:
        [content] = parse_yaml_documents(read_bytes(file, MAX_YAML), without_tags=True) or [None]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a task of lm_eval: {_one_line(error)}") from None
    settings = content.get("dataset_kwargs") if isinstance(content, dict) else None
    named = settings.get("data_files") if isinstance(settings, dict) else None
    for name in _strings(named):
        path = Path(name)
        if path.is_file():
            yield path
        elif "://" not in name and not any(letter in name for letter in "*?["):
            raise ConfigError(
                f"{file} names the data file {name}, which does not exist. A path in it is relative to the "
                "current folder."
            )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (name for part in value.values() for name in _strings(part))
    elif isinstance(value, list):
        yield from (name for part in value for name in _strings(part))


def _changes(names: Sequence[str], include: str | None) -> tuple[Any, ...]:
    """What changes when a local file does, so that a later command of this process loads it anew."""
    statuses = [(str(file), file.stat()) for file in local_files(names, include)]
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in statuses)


@lru_cache(maxsize=4)
def _manager(include: str | None, changes: tuple[Any, ...], defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include, include_defaults=defaults)


@lru_cache(maxsize=4)
def _loaded(
    names: tuple[str, ...], include: str | None, changes: tuple[Any, ...], offline: bool
) -> LoadedTasks:
    own = [name for name in names if not _is_file(name)]
    with calm(offline=offline):
        manager = _manager(include, changes, False)
        if any(name not in manager.all_tasks for name in own):
            manager = _manager(include, changes, True)  # reads 15,000 files
        for name in own:
            if name not in manager.all_tasks:
                near = nearest(name, manager.all_tasks)
                hint = did_you_mean(name, near) if near else " List them with: lm-eval ls tasks"
                raise ConfigError(f"evaluator.tasks: lm_eval knows no task '{name}'.{hint}")
        try:
            loaded = manager.load(list(names))
        except Exception as error:  # of the library of data sets, in many kinds
            raise ConfigError(_why_not_loaded(names, error, offline)) from error
    for task in loaded["tasks"].values():
        if _is_local(task, include, names):
            _check_labels(task)
    return LoadedTasks(loaded["tasks"], loaded["groups"])


def _why_not_loaded(names: Sequence[str], error: Exception, offline: bool) -> str:
    """What went wrong while the library loaded tasks and tried their first document."""
    tasks, cause = f"evaluator.tasks={some(names, limit=3)}", _one_line(error)
    if type(error).__name__ == "UndefinedError" and (match := _UNDEFINED.search(cause)):
        return f"{tasks}: a template uses the column '{match[1]}', which the data lacks."
    if isinstance(error, IndexError):
        return f"{tasks}: the label of the first document is beyond its choices, which are counted from 0."
    hint = ""
    if offline and isinstance(error, ConnectionError):
        fetch = f"lm-eval run --model dummy --tasks {','.join(names)} --limit 1"
        hint = f" Fetch data of the hub with hub.offline=false, or: {fetch}"
    return f"{tasks}: the data cannot be loaded: {cause}.{hint}"


def _one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300).rstrip(".")


def _is_local(task: Any, include: str | None, names: Sequence[str]) -> bool:
    source = str((task.config.metadata or {}).get("config_source", ""))
    return source in names or (include is not None and Path(source).is_relative_to(include))


def _check_labels(task: Any) -> None:
    """Check the labels of a user's own task: one beyond the choices would count as a wrong answer.

    Raises:
        ConfigError: a label is out of range.
    """
    if task.config.output_type != "multiple_choice":
        return
    for number, document in enumerate(task.eval_docs):
        label, choices = task.doc_to_target(document), task.doc_to_choice(document)
        if isinstance(label, int) and not 0 <= label < len(choices):
            raise ConfigError(
                f"the task {task.task_name}: the label of document {number} is {label}, and there are "
                f"{len(choices)} choices, counted from 0. Mend the data or doc_to_target."
            )
