"""Reads the provenance of a result from its folder, from MLflow, or from the header of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import Checkpoint, is_file_name
from mecha_exp.documents import read_bytes
from mecha_exp.engine.provenance import KEY, Origin
from mecha_exp.errors import ConfigError, prefixed
from mecha_exp.lab.content_hash import content_of
from mecha_exp.recipe.files import METADATA_KEY
from mecha_exp.runs.query import Run, find_run
from mecha_exp.runs.record import FAILED, RECIPE_FILE, RUN_FILE, Record, read_settings
from mecha_exp.sources.search import folders_of
from mecha_exp.tracking import Store
from mecha_exp.tracking.database import SQLITE

_FORMAT = {"format": "pt"}


@dataclass(frozen=True)
class Original:
    """A result and its provenance.

    Attributes:
        name: the name of the result.
        source: where its provenance was read.
        recipe: the recipe as text, with the original paths of its inputs.
        inputs: the SHA-256 of each input, in the order of the recipe's models, as far as they are known.
        config: the engine and output settings, plugins and evaluators.
        metadata: the metadata of the model's file.
        versions: the versions of packages, the commit, and the machine's features.
        methods: the hash of each merge method's code, if known.
        sha256: the hash of the model's bytes, if a model was kept.
        model: the path of the model, if it still exists.
        metrics: the evaluators' numbers, for a result whose model was not kept.
        folder: of the run, if it was read from one.
        is_folder: whether the model was kept as a folder.
    """

    name: str
    source: str
    recipe: str
    inputs: Sequence[str]
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    sha256: str | None = None
    model: Path | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None
    is_folder: bool = False

    @property
    def folders(self) -> list[Path]:
        """The folders that the configuration searched for models."""
        return folders_of(self.config)


def read_original(word: str, folders: Sequence[Path], uri: str, scratch: Path) -> Original:
    """Read the original that a word names: the file of a merged model, or a run.

    Args:
        word: a path, or a word for `find_run`.
        folders: the folders to search for runs.
        uri: the MLflow store to search for other runs.
        scratch: an empty folder for the files of an MLflow run.

    Raises:
        ConfigError: there is no such run or model, or it has no provenance.
    """
    path = Path(word)
    if path.is_file():
        return _of_model(path)
    try:
        run = find_run(word, folders)
    except ConfigError:
        if not _is_run_id(word) or (uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file()):
            raise
        folder = Store(uri, "mecha_exp").fetch(word, scratch / "record")
        if not (folder / RUN_FILE).is_file():
            raise ConfigError(
                f"the MLflow run {word} was not logged by mecha_exp: it has no {RUN_FILE}."
            ) from None
        return _of_run(Run(folder, Record.load(folder)), f"the MLflow run {word}")
    return _of_run(run, str(run.folder))


def _of_run(run: Run, source: str) -> Original:
    record = run.record
    if record.status == FAILED:
        raise ConfigError(f"{record.name} failed, so there is nothing to make again: {record.error}")
    try:
        recipe = read_bytes(run.folder / RECIPE_FILE).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.folder} does not say how it was made: {RECIPE_FILE}: {error}.") from None
    model = Path(record.model) if record.model else None
    present = model if model is not None and model.is_file() else None
    with prefixed(f"{run.folder / RUN_FILE}: origin: "):
        origin = Origin.read(record.origin)
    metadata = _metadata_of(present) if present else _metadata(recipe, record)
    return Original(
        name=record.name,
        source=source,
        recipe=metadata.get(METADATA_KEY, recipe),
        inputs=origin.inputs or [v for k, v in record.tags.items() if k.startswith("fingerprint/")],
        config=read_settings(run.folder),
        metadata=metadata,
        versions=record.environment,
        methods=origin.methods,
        sha256=record.model_sha256,
        model=present,
        metrics=record.metrics,
        folder=run.folder,
        is_folder=model is not None and not is_file_name(model),
    )


def _metadata(recipe: str, record: Record) -> dict[str, str]:
    """The header of a model that no longer exists."""
    origin = {KEY: Origin.read(record.origin).text()} if record.origin else {}
    return {**_FORMAT, METADATA_KEY: recipe, **origin}


def _of_model(path: Path) -> Original:
    metadata, origin = _metadata_of(path), Origin.of_file(path)
    if METADATA_KEY not in metadata:
        raise ConfigError(f"{path} does not say how it was made: it has no '{METADATA_KEY}' in its header.")
    settings = origin or Origin()
    return Original(
        name=path.name,
        source="the model's own header" + ("" if origin else f", which has no {KEY}: with default settings"),
        recipe=metadata[METADATA_KEY],
        inputs=settings.inputs,
        config={"engine": dict(settings.engine), "output": dict(settings.output)},
        metadata=metadata,
        versions={f"version/{name}": version for name, version in settings.versions.items()},
        methods=settings.methods,
        sha256=content_of(path),
        model=path,
    )


def _metadata_of(path: Path) -> dict[str, str]:
    with Checkpoint(path) as file:
        return dict(file.metadata)


def _is_run_id(word: str) -> bool:
    return len(word) == 32 and all(c in "0123456789abcdef" for c in word)
