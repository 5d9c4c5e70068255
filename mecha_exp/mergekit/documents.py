"""The YAML documents of mergekit, and the values in them by dotted path."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from mecha_exp.documents import MAX_YAML, DocumentError, parse_yaml_documents, read_bytes
from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean
from mecha_exp.mergekit.methods import IGNORED, METHODS, NO_EFFECT, OTHER
from mecha_exp.mergekit.reader import Configuration
from mecha_exp.mergekit.references import MODEL_WORDS

_FREE = ("merge_method", "base_model", "dtype", "out_dtype", "chat_template")
_FIXED = ("name", "tokenizer")
_SHARED_PLACE = re.compile(r"(slices\.(?P<slice>\d+)\.)?parameters\.(?P<name>\w+)(\.|$)")
"""The path of a parameter of the whole configuration, or of one of its slices."""


def load_documents(path: Path) -> list[dict[str, Any]]:
    """Read the documents of a YAML file; several are the merges of mergekit-multi.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has a word twice, or a document is not a mapping.
    """
    try:
        documents = parse_yaml_documents(read_bytes(path, MAX_YAML), MODEL_WORDS)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except DocumentError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    documents = [document for document in documents if document is not None]
    for document in documents or [None]:
        if not isinstance(document, dict):
            raise ConfigError(
                f"{path}: expected a configuration of mergekit, which is a mapping with 'merge_method', got "
                f"{brief(document)}."
            )
    return documents


def by_name(documents: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The documents of a file by the names that they give their merges; the output may have none, and is "".

    Raises:
        ConfigError: two have one name, or more than one has none.
    """
    named: dict[str, Mapping[str, Any]] = {}
    for document in documents:
        name = str(document.get("name") or "")
        if name in named:
            who = f"two documents have the name {name!r}" if name else "two documents have no name"
            raise ConfigError(f"{who}. Each merge that another one names has a 'name' of its own.")
        named[name] = document
    return named


def in_order(configurations: Mapping[str, Configuration]) -> list[str]:
    """The names of documents, each after those whose merges it names; the last is the output.

    Raises:
        ConfigError: documents name each other in a circle, or there are merges that no other names.
    """
    named = {
        name: [r.path for r in configuration.references if r.path in configurations]
        for name, configuration in configurations.items()
    }
    used = {other for others in named.values() for other in others}
    last = [name for name in named if name not in used]
    if len(last) > 1:
        listed = ", ".join(repr(name) if name else "one without a name" for name in last)
        raise ConfigError(
            f"no document names the merges of {len(last)} documents: {listed}. One of them is the output; "
            "put the others into files of their own."
        )
    try:
        return list(TopologicalSorter(named).static_order())
    except CycleError as error:
        raise ConfigError(
            f"the documents name each other in a circle: {' -> '.join(error.args[1])}."
        ) from None


def paths_in(path: Path) -> list[str]:
    """The dotted paths of all values in a file, as `paths_of`; those of a document with a name begin with it.

    Raises:
        ConfigError: as `load_documents`.
    """
    documents = load_documents(path)
    if len(documents) == 1:
        return paths_of(documents[0])
    return [
        f"{name}.{value}" if name else value
        for name, document in by_name(documents).items()
        for value in paths_of(document)
    ]


def values_by_document(
    named: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The values for each document, by their paths in it.

    Args:
        named: the documents by name.
        values: by dotted path, which begins with the name of a document that has one.

    Raises:
        ConfigError: a path begins with the name of none of them.
    """
    own: dict[str, dict[str, Any]] = {name: {} for name in named}
    for path, value in values.items():
        name = next((name for name in named if name and path.startswith(f"{name}.")), "")
        if name not in own:
            known = ", ".join(map(repr, named))
            raise ConfigError(f"{path}: begins with the name of no document. There are {known}.")
        own[name][path.removeprefix(f"{name}.") if name else path] = value
    return own


def paths_of(config: Mapping[str, Any]) -> list[str]:
    """The dotted paths of all values that a configuration has or may have, but for tokenizers and names."""
    method = METHODS.get(str(config.get("merge_method")))
    names = [*method.parameters, NO_EFFECT] if method else []

    def below(place: Any, path: str) -> Iterator[str]:
        if isinstance(place, Mapping) and "value" in place:
            yield f"{path}value"
        elif isinstance(place, Mapping):
            holds_parameters = bool(place.keys() & {"model", "sources", "merge_method"})
            more = ["parameters"] if holds_parameters and "parameters" not in place else []
            for word in (*place, *more):
                value = place.get(word, {})
                has_more = word == "parameters" and isinstance(value, Mapping)
                inner = {**dict.fromkeys(names), **value} if has_more else value
                yield from below(inner, f"{path}{word}.")
        elif isinstance(place, list) and place and all(isinstance(entry, Mapping) for entry in place):
            for number, entry in enumerate(place):
                yield from below(entry, f"{path}{number}.")
        else:
            yield path.removesuffix(".")

    return [path for path in below({**dict.fromkeys(_FREE), **config}, "") if not path.startswith(_FIXED)]


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of a configuration with other values at dotted paths, such as `models.0.parameters.weight`.

    Raises:
        ConfigError: a path leads nowhere.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    for path, value in values.items():
        *parents, last = path.split(".")
        place: Any = changed
        for word in parents:
            place = _below(place, word, path)
        if isinstance(place, list):
            _below(place, last, path)
            place[int(last)] = value
        elif isinstance(place, dict):
            place[last] = value
        else:
            raise ConfigError(f"{path}: what stands above {last!r} is {brief(place)}, which has no parts.")
    return changed


def check_effect(configuration: Configuration, paths: Iterable[str]) -> None:
    """Check that values change something: each input may override them, and the base has no parameters.

    Args:
        configuration: with the values.
        paths: theirs.

    Raises:
        ConfigError: those that change nothing.
    """
    problems = Problems()
    for path in paths:
        match = _SHARED_PLACE.match(path)
        if _is_of_base(configuration, path):
            problems.add(
                f"{path}: {configuration.method_name} has no parameters of the base model, so that it would "
                "change nothing. Give one to the other models."
            )
        if path.partition("parameters.")[2].partition(".")[0] in configuration.method.without_effect:
            problems.add(f"{path}: {configuration.method_name} makes nothing sparse, so it changes nothing.")
        if match and _is_overridden(configuration, match["name"], match["slice"]):
            problems.add(
                f"{path}: each model has a value of its own, which counts before this one, so that it would "
                f"change nothing. Give those, as models.0.parameters.{match['name']}, or remove them."
            )
    problems.raise_as(ConfigError)


def _is_of_base(configuration: Configuration, path: str) -> bool:
    """Whether a value is a parameter of the base, of a method that has none for it."""
    place, parameters, _ = path.partition(".parameters.")
    where = re.sub(r"\.(\d+)", r"[\1]", place)
    return bool(parameters and configuration.method.base != IGNORED) and any(
        entry.where == where and entry.reference == part.base
        for part in configuration.slices
        for entry in part.inputs
    )


def _is_overridden(configuration: Configuration, name: str, number: str | None) -> bool:
    """Whether all that a parameter of the whole, or of a slice, would count for has a value of its own."""
    parameter = configuration.method.parameters.get(name)
    own = [
        (name in entry.settings and entry.settings[name].is_for_all)
        or (number is None and name in part.settings and part.settings[name].is_for_all)
        for part in configuration.slices
        if number is None or part.where == f"slices[{number}]"
        for entry in part.inputs
        if parameter is not None and not (parameter.scope == OTHER and entry.reference == part.base)
    ]
    return bool(own) and all(own)


def _below(place: Any, word: str, path: str) -> Any:
    """What a word of a path leads to; absent parameters are made."""
    if isinstance(place, list):
        if not word.isdecimal() or int(word) >= len(place):
            raise ConfigError(
                f"{path}: expected a number below {len(place)} for one of the list, got {word!r}."
            )
        return place[int(word)]
    if isinstance(place, dict) and word == "parameters":
        return place.setdefault(word, {})
    if not isinstance(place, dict) or word not in place:
        known = map(str, place) if isinstance(place, dict) else ()
        raise ConfigError(f"{path}: there is no {word!r}.{did_you_mean(word, known)}")
    return place[word]
