"""The modules of a model, which `modules:` in a configuration of mergekit merges each in its own way.

Source: mergekit 0.1.5, `_data/architectures/*.json` for the names of modules that it knows, and
`architecture/auto.py` for all other models: a module is named by what stands before the number of its layers,
and `default` has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from mecha_exp.errors import ConfigError, did_you_mean, some

_PROJECTOR = r"(model\.)?(multi_modal_projector|visual\.(merger|deepstack_merger_list))\."
_KNOWN = {
    "text_decoder": r"(model\.)?language_model\.|lm_head\.|model\.(embed_tokens|layers|norm)\.",
    "multi_modal_projector": _PROJECTOR,
    "vision_tower": rf"(?!{_PROJECTOR})(model\.)?(vision_tower|visual)\.",
    "vision_model": r"(model\.)?vision_model\.",
    "encoder": r"(model\.)?encoder\.",
    "decoder": r"(model\.)?decoder\.",
    "shared": r"(shared|lm_head)\.",
}
"""The beginnings of the keys of each module that has a name in mergekit."""

_RENAMED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("visual.", "model.visual."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
"""Beginnings of keys in files, and in the layout of transformers, in which mergekit 0.1.5 names modules."""

_DEFAULT = "default"

_Value = TypeVar("_Value")


def module_of_each(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """The module of each key of a model.

    Args:
        names: the modules of a configuration.
        keys: those of the model.

    Raises:
        ConfigError: a module has no keys, or a key is of no module or of several.
    """
    patterns = {name: _KNOWN.get(name, rf"{re.escape(name)}(?!\w)") for name in names if name != _DEFAULT}
    found = {
        key: [name for name in patterns if any(re.match(patterns[name], k) for k in (key, _today(key)))]
        for key in keys
    }
    if _DEFAULT in names:
        found = {key: modules or [_DEFAULT] for key, modules in found.items()}
    held = {name for modules in found.values() for name in modules}
    for name in names:
        if name not in held:
            known = [
                *(n for n, pattern in _KNOWN.items() if any(re.match(pattern, key) for key in keys)),
                _DEFAULT,
            ]
            raise ConfigError(
                f"modules.{name}: the models have no keys of it. A module is {', '.join(known)}, or what "
                f"stands before the numbers of layers in their keys.{did_you_mean(name, known)}"
            )
    if without := [key for key, modules in found.items() if not modules]:
        raise ConfigError(
            f"modules: {some(without, 3)} of the models are in no module, and mergekit would leave them out. "
            f"'{_DEFAULT}' is the module of all that no other one has."
        )
    if twice := next((key for key, modules in found.items() if len(modules) > 1), None):
        raise ConfigError(f"modules: '{twice}' is of {' and '.join(found[twice])}. A key has one module.")
    return {key: modules[0] for key, modules in found.items()}


def _today(key: str) -> str:
    """The name that transformers has for a key of a vision-language model since version 4.52."""
    for old, new in _RENAMED:
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def selectors_of(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Selectors of values by key that give each key its value: as few beginnings of keys as there can be."""
    return dict(_selected(values, ""))


def _selected(values: Mapping[str, _Value], prefix: str) -> Iterator[tuple[str, _Value]]:
    first = next(iter(values.values()))
    if len(values) == 1:
        yield from values.items()
        return
    if prefix and all(value == first for value in values.values()):
        yield f"{prefix}.*", first  # a pattern of keys: without the star it might be the name of a block
        return
    below: dict[str, dict[str, _Value]] = {}
    for key, value in values.items():
        word = key[len(prefix) :].lstrip(".").partition(".")[0]
        below.setdefault(f"{prefix}.{word}" if prefix else word, {})[key] = value
    for each, inner in below.items():
        if each in inner:  # a key that is also what others begin with
            yield each, inner.pop(each)
        if inner:
            yield from _selected(inner, each)
