"""Builds the recipe graph of a configuration of mergekit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, Problems, prefixed
from mecha_exp.graph.by_key import DEFAULT
from mecha_exp.graph.literals import node_by_key
from mecha_exp.graph.nodes import Node
from mecha_exp.lab.points import SEED_PATH
from mecha_exp.mergekit.documents import (
    by_name,
    check_effect,
    in_order,
    load_documents,
    paths_in,
    values_by_document,
    with_values,
)
from mecha_exp.mergekit.methods import METHODS, SEED
from mecha_exp.mergekit.mixtures.reader import Mixture, is_mixture, read_mixture
from mecha_exp.mergekit.mixtures.recipe import mixture_recipe
from mecha_exp.mergekit.modules import module_of_each, selectors_of
from mecha_exp.mergekit.reader import Configuration, read_configuration
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.mergekit.slice_node import SliceBuilder
from mecha_exp.mergekit.slices import spans_of
from mecha_exp.mergekit.tokenizers import tokenizer_files_of
from mecha_exp.mergekit.vocabulary import Vocabulary
from mecha_exp.recipe.foreign import ForeignRecipe, RecipeReader, value_at
from mecha_exp.sources import search_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merge(ForeignRecipe):
    """A merge that a configuration asks for.

    Attributes:
        first: its first input, whose config.json the output gets; None of mixtures.
        slices: what it is made of.
    """

    first: StoredModel | None = None
    slices: Sequence[SliceBuilder] = ()

    def as_model(self, name: str) -> StoredModel:
        """The merge as an input of another: its graph, rounded to the dtype in which it would be written.

        Raises:
            ConfigError: its keys would be written in several dtypes.
        """
        assert self.first is not None
        infos = {key: info for part in reversed(self.slices) for key, info in part.infos().items()}
        dtypes = sorted({info.dtype for info in infos.values() if is_arithmetic(info.dtype)})
        if len(dtypes) > 1:
            raise ConfigError(f"dtype: its keys have {' and '.join(dtypes)}. Say one of them: dtype: float32")
        recipe = self.recipe
        if dtypes and dtypes[0] not in ("F32", "F64"):
            recipe = recipe.to(dtype=str(torch_dtype(dtypes[0])).removeprefix("torch."))
        return StoredModel(name, self.first.path, infos, recipe=recipe, small_files=self.small_files)


def from_mergekit(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    model_dirs: Sequence[str | os.PathLike[str]] = (),
    offline: bool = True,
) -> Node:
    """The recipe of a configuration of mergekit 0.1.5: merged, it gives what `mergekit-yaml` gives.

    Parameters are found in mergekit's precedence (input, slice, whole), with gradients over the layers and
    filters, and become values by key. Arithmetic is float32 whatever `dtype` says, which is the dtype of the
    output. Only the headers of the models are read. Of several documents, which name each other's merges, it
    is the one that no other names; of a mixture of experts the gates are tensors in memory. A recipe has no
    place for a tokenizer, a chat template or the config.json of a mixture: `python -m mecha_exp merge
    CONFIG.yml OUTPUT` writes those that the configuration asks for.

    Args:
        config: the path of a YAML file, or its content.
        values: what takes the place of values in it, by dotted path: `{"models.0.parameters.weight": 0.3}`;
            the name of a document comes first, if it has one.
        model_dirs: where models are looked for, after the current folder.
        offline: whether models of the hub must be in its cache already.

    Raises:
        ConfigError: all unknown words, methods and values, or what is not supported, with the reason.
        CheckpointError: a model is not there, or its layers cannot be told where a gradient needs them.

    >>> merge(from_mergekit("ties.yml"), "merged")
    """
    merge = read_merge(config, values, [Path(folder) for folder in model_dirs], offline)
    for note in merge.notes:
        log.warning(note)
    return merge.recipe


def read_merge(
    config: str | os.PathLike[str] | Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
    folders: Sequence[Path] = (),
    offline: bool = True,
) -> Merge:
    """The merge of a configuration; arguments and errors as of `from_mergekit`."""
    if isinstance(config, Mapping):
        changed = with_values(config, values or {})
        if is_mixture(changed):
            merge = _build_mixture(read_mixture(changed), folders, offline)
        else:
            configuration = read_configuration(changed)
            check_effect(configuration, values or {})
            merge = build(configuration, folders, offline)
        return replace(merge, config=changed)
    path = Path(config)
    documents = load_documents(path)
    with prefixed(f"{path}: ", MechaError):
        if len(documents) == 1:
            return read_merge(documents[0], values, folders, offline)
        return _merge_of_documents(documents, values or {}, folders, offline)


def _merge_of_documents(
    documents: Sequence[Mapping[str, Any]], values: Mapping[str, Any], folders: Sequence[Path], offline: bool
) -> Merge:
    """The merge of the last of several documents, with the graphs of those that it names in their places."""
    named = by_name(documents)
    configurations = {}
    problems = Problems()
    for name, own in values_by_document(named, values).items():
        with problems.collected(ConfigError), _of_document(name):
            configurations[name] = read_configuration(with_values(named[name], own))
            check_effect(configurations[name], own)
    problems.raise_as(ConfigError)
    merges: dict[str, StoredModel] = {}
    *before, last = in_order(configurations)
    for name in before:
        with _of_document(name):
            merges[name] = build(configurations[name], folders, offline, merges).as_model(name)
    notes = tuple(note for configuration in configurations.values() for note in configuration.notes)
    with _of_document(last):
        return replace(build(configurations[last], folders, offline, merges), notes=notes)


def _of_document(name: str) -> AbstractContextManager[None]:
    """Name the document in errors."""
    return prefixed(f"document {name!r}: " if name else "", MechaError)


def _build_mixture(mixture: Mixture, folders: Sequence[Path], offline: bool) -> Merge:
    """The merge of dense models into one of experts."""
    models = find_models(mixture.references, folders, offline, {})
    return Merge(
        *mixture_recipe(mixture, models), in_memory="a mixture of experts, whose gates are made in memory"
    )


def build(
    configuration: Configuration,
    folders: Sequence[Path],
    offline: bool,
    merges: Mapping[str, StoredModel] | None = None,
) -> Merge:
    """The merge of a configuration that is read.

    Args:
        configuration: what is merged.
        folders: where models are looked for.
        offline: whether models of the hub must be in its cache already.
        merges: those of other documents, which it names as models.
    """
    models = find_models(configuration.references, folders, offline, merges or {})
    spans = spans_of(configuration, models) if configuration.is_sliced else [{}]
    vocabulary = Vocabulary.of(configuration, models)
    if configuration.slices[0].module is not None:
        slices, recipe = _of_modules(configuration, models, vocabulary)
    else:
        slices = [
            SliceBuilder(configuration, part, models, span, vocabulary)
            for part, span in zip(configuration.slices, spans, strict=True)
        ]
        recipe = reduce(lambda above, below: above | below, [part.node() for part in slices])
    if configuration.dtype is not None:
        recipe = recipe.to(dtype=configuration.dtype)
    first = models[configuration.slices[0].inputs[0].reference]
    small_files = tokenizer_files_of(configuration, models, vocabulary, first)
    return Merge(recipe, small_files, first=first, slices=slices, notes=configuration.notes)


def _of_modules(
    configuration: Configuration, models: Mapping[Reference, StoredModel], vocabulary: Vocabulary | None
) -> tuple[list[SliceBuilder], Node]:
    """The merges of the modules of models, and the choice by key between them."""
    keys = list(dict.fromkeys(key for r in configuration.inputs for key in models[r].infos))
    module_of = module_of_each([str(part.module) for part in configuration.slices], keys)
    slices = {}
    for part in configuration.slices:
        own = {key for key, module in module_of.items() if module == part.module}
        inside = {reference: model.only(own) for reference, model in models.items()}
        tokens = vocabulary if any(model.token_axes for model in inside.values()) else None
        slices[str(part.module)] = SliceBuilder(configuration, part, inside, {}, tokens)
    if len(slices) == 1:
        return [*slices.values()], next(iter(slices.values())).node()
    nodes = {name: part.node() for name, part in slices.items()}
    names = selectors_of(module_of)
    most = max(nodes, key=[*module_of.values()].count)
    chosen = {selector: nodes[name] for selector, name in names.items() if name != most}
    return [*slices.values()], node_by_key({**chosen, DEFAULT: nodes[most]})


def find_models(
    references: Sequence[Reference],
    folders: Sequence[Path],
    offline: bool,
    merges: Mapping[str, StoredModel],
) -> dict[Reference, StoredModel]:
    """Find all models of a configuration, or raise one CheckpointError that names those that are missing."""
    searched = [*folders, *search_path.get_all()]
    models: dict[Reference, StoredModel] = {}
    problems = Problems()
    for reference in references:
        if reference.path in merges and reference.lora:
            raise ConfigError(
                f"{reference}: {reference.path} is a merge of this file, and an adapter is added to a model "
                "that is read. Add it to the model that it was trained on."
            )
        if reference.path in merges:
            models[reference] = merges[reference.path]
            continue
        with problems.collected(CheckpointError):
            models[reference] = StoredModel.find(reference, searched, offline)
    problems.raise_as(CheckpointError)
    return models


class ConfigurationReader(RecipeReader):
    """Reads configurations of mergekit: `recipe=mergekit`, and files of YAML that are merged."""

    suffixes = (".yml", ".yaml")
    command = "mergekit-yaml"
    options: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("--cuda", "--gpu-rich", "--multi-gpu", "--read-to-gpu"), "engine.device=cuda"),
        "--device": "engine.device=cuda",
        "--lora-merge-cache": "adapters are added while they are read, without a copy on a disk",
        "--no-write-model-card": "--no-card",
        "--num-threads": "--workers",
        "--out-shard-size": "--shard-size",
        "--random-seed": "-p parameters.seed",
        **dict.fromkeys(
            (
                *("--allow-crimes", "--async-write", "--copy-tokenizer", "--lazy-unpickle"),
                *("--low-cpu-memory", "--safe-serialization", "--trust-remote-code", "--write-model-card"),
            ),
            "leave it out",
        ),
    }

    def read(self, path: Path, values: Mapping[str, Any], folders: Sequence[Path], offline: bool) -> Merge:
        """The merge of a configuration."""
        return read_merge(path, values, folders, offline)

    def paths(self, path: Path) -> Sequence[str]:
        """The dotted paths of its values, which begin with the name of a document that has one."""
        return paths_in(path)

    def check_names(self, path: Path, reserved: Iterable[str]) -> None:
        """Check that no document is named like a value of the bench, which it would be taken for."""
        documents = load_documents(path)
        clashes = sorted(by_name(documents).keys() & set(reserved)) if len(documents) > 1 else []
        if clashes:
            raise ConfigError(
                f"{path}: a document has the name {clashes[0]!r}, which has a meaning of its own here: "
                f"{clashes[0]}.dtype would be read as both. Give it another name."
            )

    def base(self, path: Path, values: Mapping[str, Any]) -> str | None:
        """The base model; several documents in one file have none in common."""
        documents = load_documents(path)
        named = values.get("base_model") or documents[0].get("base_model")
        return named if isinstance(named, str) and len(documents) == 1 else None

    def seed(self, path: Path, values: Mapping[str, Any]) -> int | None:
        """The seed of the random masks; a file of several documents has one for each, and none of its own."""
        documents = load_documents(path)
        if len(documents) > 1:
            return None
        config = with_values(documents[0], values)
        method = METHODS.get(str(config.get("merge_method")))
        if method is None or SEED not in method.parameters:
            return None
        seed = value_at(config, SEED_PATH)
        return seed if isinstance(seed, int) else 0
