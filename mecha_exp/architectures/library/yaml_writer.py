"""Model configs as YAML: writing one as `yaml_reader` reads it."""

from __future__ import annotations

from typing import Any

import yaml

from mecha_exp.architectures.components import Component
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import KeyPattern
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.rules import Rules
from mecha_exp.architectures.symmetries import SymmetryRule


def to_yaml(model_config: ModelConfig) -> str:
    """The YAML that `from_yaml` reads as an equal config."""
    content: dict[str, Any] = {"identifier": model_config.identifier}
    if model_config.sizes:
        content["sizes"] = _Flow(model_config.sizes)
    if isinstance(model_config, AdapterConfig):
        names = {begin: list(others) for begin, others in model_config.names.items()}
        how = {"prefix": model_config.prefix} if model_config.prefix else {"names": _Flow(names)}
        content["adapter"] = _Flow(base=model_config.base.identifier, **how)
    else:
        content["components"] = {part.name: _component(part) for part in model_config.parts}
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=2**16, allow_unicode=True)


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes shapes and entries on one line."""


def _one_line(dumper: _Dumper, data: Any) -> yaml.Node:
    if isinstance(data, dict):
        return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(_Flow, _one_line)
_Dumper.add_representer(list, _one_line)


def _component(part: Component) -> dict[str, Any]:
    dtypes = [key.dtype for key in part.keys]
    usual = max(dict.fromkeys(dtypes), key=dtypes.count, default="float32")
    optional = part.optional if isinstance(part.optional, bool) else [str(p) for p in part.optional]
    content = {
        "prefix": part.prefix,
        "layout": part.layout.name if part.layout else "",
        "dots": part.dots if part.dots != "." else None,
        "aliases": dict(part.aliases),
        "optional": optional,
        "sizes": _Flow(part.sizes),
        "dtype": usual if usual != "float32" else "",
        "keys": {str(key.names): _entry(key, usual) for key in part.keys},
        "blocks": _written(part.blocks),
        "conventions": {name: _written(rules) for name, rules in part.conventions.items()},
        "symmetries": _symmetries(part.symmetries),
    }
    return {name: value for name, value in content.items() if value or (name == "dots" and value is not None)}


def _entry(key: KeyPattern, usual: str) -> Any:
    if key.dtype == usual and not key.optional and not key.aliases and key.stacked is None:
        return list(key.shape)
    entry = _Flow(shape=list(key.shape))
    if key.dtype != usual:
        entry["dtype"] = key.dtype
    if key.optional:
        entry["optional"] = True
    if key.aliases:
        entry["aliases"] = [str(alias) for alias in key.aliases]
    if key.stacked is not None:
        entry["stacked"] = key.stacked
    return entry


def _written(rules: Rules) -> dict[str, str]:
    return {str(left): str(right) for left, right in rules}


def _symmetries(rules: tuple[SymmetryRule, ...]) -> dict[str, list[_Flow]]:
    written: dict[str, list[_Flow]] = {}
    for rule in rules:
        entry = _Flow() if rule.head is None else _Flow(head=rule.head)
        for axis, name in enumerate(("rows", "columns")):
            if sides := [str(side) for side in rule.sides if side.axis == axis]:
                entry[name] = sides
        written.setdefault(str(rule.below), []).append(entry)
    return written
