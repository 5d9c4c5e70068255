"""The registry of model configs: the built-in ones, which are read at their first use, and a user's."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mecha_exp.architectures.components import Layout
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import HasShape
from mecha_exp.architectures.library.fields import load_yaml
from mecha_exp.architectures.library.prefilter import Outlines, outline_of, outlines_of, plausible
from mecha_exp.architectures.library.yaml_reader import read_config, read_layout
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.rules import Conversion
from mecha_exp.errors import ConfigError, did_you_mean

CONVERSIONS = "conversions"
_REGISTERED: dict[str, ModelConfig] = {}


def from_yaml(yaml_config: str, name: str = "the model config") -> ModelConfig:
    """Read a config from YAML; docs/model-configs.md describes the format.

    Args:
        yaml_config: the text.
        name: how messages call it, such as its file.

    Raises:
        ConfigError: everything that is wrong, each with its place.
    """
    return read_config(load_yaml(yaml_config, name), name, find_layout, resolve)


def register(config: ModelConfig) -> ModelConfig:
    """Register a config for `resolve` and `detect`; an equal one may be registered again.

    Raises:
        ConfigError: the identifier is taken, two components share a key, or a symmetry fits no keys.
    """
    known = _REGISTERED.get(config.identifier, config)
    same = known == config and (known.parts, known.sizes) == (config.parts, config.sizes)
    if config.identifier in _builtin() or not same:
        raise ConfigError(f"there is a model config {config.identifier!r} already: name this one otherwise.")
    config.symmetries()
    return _REGISTERED.setdefault(config.identifier, config)


@contextmanager
def isolated() -> Iterator[None]:
    """Know only the built-in configs at the beginning of the block, and after it those of before."""
    before = dict(_REGISTERED)
    _REGISTERED.clear()
    try:
        yield
    finally:
        _REGISTERED.clear()
        _REGISTERED.update(before)


def resolve(identifier: str) -> ModelConfig:
    """The config of an identifier, or of an architecture that has only one: `llama`, `flux`.

    Raises:
        ConfigError: no config has the name, or the architecture has several.
    """
    known = {**_builtin(), **_REGISTERED}
    formats = [name for name in known if name.partition("-")[0] == identifier]
    own = f"{identifier}-{identifier}"  # `flux` is `flux-flux`, whatever other formats there are
    name = formats[0] if len(formats) == 1 else own if own in known else identifier
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in _builtin():
        return _load(name)
    if formats:
        raise ConfigError(
            f"{identifier!r} has several model configs: {', '.join(sorted(formats))}. Name one."
        )
    hint = did_you_mean(identifier, known)
    raise ConfigError(
        f"unknown model config {identifier!r}.{hint} 'python -m mecha_exp info' lists all of them."
    )


def registered() -> tuple[tuple[str, int], ...]:
    """What tells two states of the registry apart: the configs of users, each with its object's number."""
    return tuple(sorted((name, id(config)) for name, config in _REGISTERED.items()))


def get_all() -> list[ModelConfig]:
    """Every known config of models, by identifier."""
    return [config for config in _known() if not isinstance(config, AdapterConfig)]


def get_all_adapters() -> list[AdapterConfig]:
    """Every known config of LoRA files, by identifier."""
    return [config for config in _known() if isinstance(config, AdapterConfig)]


def plausible_configs(keys: Mapping[str, HasShape]) -> list[ModelConfig]:
    """The known configs that a file may fit, by its keys and shapes; the others are not read."""
    outlines = {**_builtin_outlines(), **{name: outline_of(config) for name, config in _REGISTERED.items()}}
    return [resolve(name) for name in plausible(keys, outlines)]


def _known() -> list[ModelConfig]:
    return [resolve(identifier) for identifier in sorted({*_builtin(), *_REGISTERED})]


@cache
def find_layout(name: str) -> Layout:
    """The built-in layout of a name; ConfigError where there is none."""
    try:
        path = _layouts()[name]
    except KeyError:
        raise ConfigError(f"there is no layout {name!r}.{did_you_mean(name, _layouts())}") from None
    return read_layout(path.read_text(encoding="utf-8"), name, find_layout, conversions().get(name, {}))


@cache
def _builtin() -> dict[str, Path | dict[str, Any]]:
    """The file of each built-in config by identifier, or what a list of several configs says of it."""
    files = {path.stem: path for path in builtin_folder().glob("*.yaml")}
    return {**files, **dict(_transformers()), **dict(_adapters())}


def _transformers() -> Iterator[tuple[str, dict[str, Any]]]:
    for prefix, layouts in _list("transformers").items():
        for identifier, layout in layouts.items():
            diffuser = {"prefix": prefix, "aliases": {prefix: ""}, "layout": layout}
            yield identifier, {"family": "diffuser", "components": {"diffuser": diffuser}}


def _adapters() -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in _list("adapters"):
        about = {name: entry[name] for name in ("prefix", "names") if name in entry}
        for base in entry["bases"]:
            yield f"{base}{entry['suffix']}", {"adapter": {"base": base, **about}}


def _list(name: str) -> Any:
    """A list of several configs: those that differ in a word or two."""
    path = builtin_folder() / "lists" / f"{name}.yaml"
    return load_yaml(path.read_text(encoding="utf-8"), path.name)


@cache
def _builtin_outlines() -> Outlines:
    texts = builtin_folder().rglob("*.yaml")
    return outlines_of(texts, lambda: map(_load, _builtin()))


@cache
def _layouts() -> dict[str, Path]:
    paths = (builtin_folder() / "layouts").glob("*.yaml")
    return {path.stem: path for path in paths if path.stem != CONVERSIONS}


def builtin_folder() -> Path:
    """The folder of the built-in configs."""
    return Path(str(importlib.resources.files("mecha_exp.model_configs")))


def small_files(identifier: str) -> dict[str, Path]:
    """The files beside the weights of a built-in config, such as `unet/config.json`, by relative path."""
    folder = builtin_folder() / "files" / identifier
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.json"))}


@cache
def _load(identifier: str) -> ModelConfig:
    known = _builtin()[identifier]
    if isinstance(known, Path):
        return from_yaml(known.read_text(encoding="utf-8"), known.name)
    return read_config({"identifier": identifier, **known}, identifier, find_layout, resolve)


@cache
def conversions() -> dict[str, dict[str, Conversion]]:
    """The conversions between layouts, by the name of the source and then of the target."""
    path = builtin_folder() / "layouts" / f"{CONVERSIONS}.yaml"
    by_layouts: dict[str, dict[str, Conversion]] = {}
    for names, rules in load_yaml(path.read_text(encoding="utf-8"), path.name).items():
        source, target = names.split(" -> ")
        by_layouts.setdefault(source, {})[target] = Conversion.parse(rules)
    return by_layouts
