"""The inputs of a merge as its card names them: where they come from, what they hold, their licences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint import Template
from mecha_exp.checkpoint.hub import in_hub_cache
from mecha_exp.checkpoint.remote import RemoteFile, address_of, fetch_small_files, is_stand_in
from mecha_exp.checkpoint.remote.address import parse_hub
from mecha_exp.graph.nodes import InMemory, ModelNode, Node, models_of
from mecha_exp.lab.content_hash import contents_of, files_of, is_hash
from mecha_exp.publishing.licences import Licence, licence_of
from mecha_exp.sources.search import find_model

_HUB = "hf://"


@dataclass(frozen=True)
class Input:
    """A model that was merged.

    Attributes:
        name: for people: the name on the hub, or that of the file or folder.
        repository: the name on the hub, if the model comes from there or from its cache.
        commit: of the repository.
        sha256: of its content; empty for a model in memory, and for one elsewhere whose store gives none.
        licence: None where nothing says it.
        folder: with the small files of the model, if there is one.
    """

    name: str
    repository: str = ""
    commit: str = ""
    sha256: str = ""
    licence: Licence | None = None
    folder: Path | None = None


def inputs_of(
    recipe: Node, folders: Sequence[Path] = (), contents: Mapping[Path, str] | None = None
) -> list[Input]:
    """The inputs of a recipe, each once, in the order of its arguments; tensors that its reader made are not.

    Args:
        folders: where models are looked for, after the current folder.
        contents: of the files by path, where they are known; see `content_of`.

    Raises:
        CheckpointError: a model does not exist or cannot be read.
    """
    models = [model for model in models_of(recipe) if not _is_made(model)]
    paths = {model: find_model(model.source, folders) for model in models if isinstance(model.source, str)}
    hashes = contents_of(paths.values()) if contents is None else contents
    inputs = [
        _of_file(paths[model], hashes.get(paths[model], "")) if model in paths else _in_memory(model)
        for model in models
    ]
    return list(dict.fromkeys(inputs))


def _is_made(model: ModelNode) -> bool:
    return isinstance(model.source, InMemory) and model.source.is_made


def _in_memory(model: ModelNode) -> Input:
    assert isinstance(model.source, InMemory)
    return Input(model.source.name)


def _of_file(path: Path, content: str) -> Input:
    template = Template.at(path, dict)
    folder = template.folder if template else None
    if folder:
        fetch_small_files(folder)
    repository, commit = _repository(path)
    licence = licence_of(folder) if folder else None
    sha256 = content if is_hash(content) else ""
    return Input(repository or path.absolute().name, repository, commit, sha256, licence, folder)


def _repository(path: Path) -> tuple[str, str]:
    """The name on the hub and the commit of a model there or in the hub's cache; empty for any other path."""
    if (address_of(path) or "").startswith(_HUB):
        hub = parse_hub(RemoteFile(next(filter(is_stand_in, files_of(path)))).name)
        return hub.repository, hub.revision or ""
    cached = in_hub_cache(path)
    return (cached.repository, cached.commit) if cached else ("", "")
