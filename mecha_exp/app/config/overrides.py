"""Overrides: parsing the words of a command line, and setting their values in a configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mecha_exp.app.words.plain_data import as_written
from mecha_exp.app.words.quotes import TOO_DEEP
from mecha_exp.errors import ConfigError, brief


@functools.lru_cache(maxsize=10_000)
def parse_override(word: str) -> Override:
    """Parse a word of the command line; cached, because points share most of their words.

    Raises:
        OverrideParseException: the word is not an override.
    """
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader() if hydra.is_initialized() else None  # which lists what `glob(...)` means
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([word])[0]
    except RecursionError:
        raise OverrideParseException(word, TOO_DEEP) from None


def unchecked(override: Override) -> Override:
    """An override that is set under any key, since the names are checked later; `~key` sets None."""
    return replace(override, type=OverrideType.FORCE_ADD, package=None)


def decides_files(override: Override, groups: Set[str]) -> bool:
    """Whether an override chooses files, so that it does more than set a value."""
    name = override.key_or_group
    return name in groups or "/" in name or override.is_hydra_override()


def set_values(config: DictConfig, overrides: Iterable[Override]) -> None:
    """Set the values of overrides in a configuration: `key=` of one that is there, `+key=` new, `~key` none.

    Raises:
        ConfigError: a key leads into a value that has no parts, or does not take such a value.
        ConfigCompositionException: what is to be removed is not there, or what is to be added is.
    """
    for override in overrides:
        try:
            _set(config, override)
        except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
            message = brief(str(error).splitlines()[0])
            raise ConfigError(f"{override.input_line}: {message}.") from None


def _set(config: DictConfig, override: Override) -> None:
    key, value = override.key_or_group, override.value()
    if override.package is not None:
        raise ConfigCompositionException(f"{override.input_line}: there is no group {key}.")
    if override.is_delete():
        _remove(config, override)
        return
    is_new = override.is_add() or override.is_force_add()
    if override.is_add() and not isinstance(value, dict | list) and _value_at(config, key) is not None:
        raise ConfigCompositionException(
            f"{override.input_line}: {key} is there already. Type {key}=... or ++{key}=..."
        )
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=is_new)
    except (ConfigAttributeError, ConfigKeyError):
        raise ConfigCompositionException(f"{key} is not there. To add it, type +{key}=...") from None


def _remove(config: DictConfig, override: Override) -> None:
    key, value = override.key_or_group, override.value()
    before = _value_at(config, key)
    if before is None:
        raise ConfigCompositionException(f"{override.input_line}: {key} is not there.")
    if value is not None and value != before:
        raise ConfigCompositionException(f"{override.input_line}: {key} is {before}.")
    place, _, name = key.rpartition(".")
    with open_dict(config):
        del (OmegaConf.select(config, place) if place else config)[name]


def _value_at(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key, throw_on_missing=False)


def note_task(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Note in Hydra's part which overrides a configuration has, without those of that part itself."""
    task = [o for o in overrides if not o.is_hydra_override()]
    _replace(config.hydra.overrides.task, [str(o.input_line) for o in task])
    settings = config.hydra.job  # looking it up again takes as long as setting a value
    naming = settings.config.override_dirname
    lines = [str(o.input_line) for o in task if o.key_or_group not in naming.exclude_keys]
    named = sorted(line for line in lines if "override_dirname" not in line)  # it cannot hold itself
    settings.override_dirname = naming.item_sep.join(named).replace("=", naming.kv_sep)


def _replace(texts: ListConfig, new_texts: Sequence[str]) -> None:
    """Replace the texts of a list where they differ: most are those of the point before."""
    before = as_written(texts)
    for index, (old, new) in enumerate(zip(before, new_texts, strict=False)):
        if old != new:
            texts[index] = new
    texts.extend(new_texts[len(before) :])
    for _ in before[len(new_texts) :]:
        texts.pop()
