"""Model configs as YAML: reading one with every mistake reported at once, and writing one.

identifier: llama-hf
sizes: {layers: 32, vocab: 32000, hidden: 4096}    # of a family; inferred from a file
components:
  model:
    prefix: model.
    dtype: bfloat16                                # of the keys that say nothing else
    keys:
      embed_tokens.weight: [vocab, hidden]
      layers.{0..layers-1}.self_attn.{q,k,v,o}_proj.weight: [hidden, hidden]
      norm.weight: {shape: [hidden], dtype: float32, optional: true, aliases: [final_norm.weight]}
    blocks:
      layers.{0..layers-1}.*: "{0..layers-1}"
      "*": BASE
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from mecha_exp.architectures.blocks import EVERYTHING
from mecha_exp.architectures.config import Component, KeyPattern, ModelConfig
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.checkpoint import parse_dtype
from mecha_exp.errors import ConfigError, Problems, did_you_mean

IDENTIFIER = re.compile(r"[a-z0-9._+]+-[a-z0-9._+]+")
_SIZE_NAME = re.compile(r"[a-z_]\w*")
_CONFIG_FIELDS = ("identifier", "sizes", "components")
_COMPONENT_FIELDS = ("prefix", "aliases", "optional", "layout", "dtype", "keys", "blocks", "conventions")
_KEY_FIELDS = ("shape", "dtype", "optional", "aliases")

Rules = tuple[tuple[Pattern, Pattern], ...]


def from_yaml(text: str, name: str = "the model config") -> ModelConfig:
    """Read a config from YAML.

    Args:
        text: the YAML.
        name: how messages call it, such as its file.

    Raises:
        ConfigError: it lists everything that is wrong, and where.
    """
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_describe(error)}") from None
    return _Reader(name).read(content)


def to_yaml(config: ModelConfig) -> str:
    """The YAML that `from_yaml` reads as an equal config."""
    content: dict[str, Any] = {"identifier": config.identifier}
    if config.sizes:
        content["sizes"] = _Flow(config.sizes)
    content["components"] = {part.name: _component(part) for part in config.parts}
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=2**16, allow_unicode=True)


class _Reader:
    """Turns what YAML holds into a config, and notes every mistake with its place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._problems = Problems()
        self._sizes: dict[str, int] = {}
        self._used: set[str] = set()

    def read(self, content: Any) -> ModelConfig:
        """The config, or one ConfigError with every mistake."""
        fields = self._mapping(content, "", _CONFIG_FIELDS, required=("identifier", "components"))
        identifier = fields.get("identifier", "")
        if "identifier" in fields and not IDENTIFIER.fullmatch(str(identifier)):
            self._wrong(
                "identifier", f"{identifier!r} is not 'architecture-implementation', such as 'sdxl-sgm'"
            )
        self._read_sizes(fields.get("sizes", {}))
        components = self._mapping(fields.get("components", {}), "components")
        if "components" in fields and not components:
            self._wrong("components", "there is none")
        parts = [self._component(name, value) for name, value in components.items()]
        for size in self._sizes.keys() - self._used:
            self._wrong(f"sizes.{size}", "no shape and no range uses it")
        self._problems.raise_as(ConfigError)
        return ModelConfig(str(identifier), parts, self._sizes)

    def _read_sizes(self, value: Any) -> None:
        for name, size in self._mapping(value, "sizes").items():
            where = f"sizes.{name}"
            if not _SIZE_NAME.fullmatch(name):
                self._wrong(where, "a size is named in small letters, such as 'hidden'")
            if type(size) is not int or size < 1:
                self._wrong(where, f"expected a positive number, got {size!r}")
            else:
                self._sizes[name] = size

    def _component(self, name: str, value: Any) -> Component:
        where = f"components.{name}"
        fields = self._mapping(value, where, _COMPONENT_FIELDS, required=("keys",))
        dtype = self._dtype(fields.get("dtype", "float32"), f"{where}.dtype")
        keys = self._mapping(fields.get("keys", {}), f"{where}.keys")
        if "keys" in fields and not keys:
            self._wrong(f"{where}.keys", "there is none")
        conventions = self._mapping(fields.get("conventions", {}), f"{where}.conventions")
        return Component(
            name=name,
            prefix=self._text(fields.get("prefix", ""), f"{where}.prefix"),
            keys=tuple(self._key(key, entry, dtype, f"{where}.keys[{key!r}]") for key, entry in keys.items()),
            aliases=self._texts(fields.get("aliases", []), f"{where}.aliases"),
            optional=self._flag(fields.get("optional", False), f"{where}.optional"),
            layout=self._text(fields["layout"], f"{where}.layout") if "layout" in fields else None,
            blocks=self._rules(fields.get("blocks", {}), f"{where}.blocks"),
            conventions={
                name: self._rules(rules, f"{where}.conventions.{name}") for name, rules in conventions.items()
            },
        )

    def _key(self, name: str, value: Any, dtype: str, where: str) -> KeyPattern:
        entry = {"shape": value} if isinstance(value, list) else value
        fields = self._mapping(entry, where, _KEY_FIELDS, required=("shape",))
        names = self._pattern(name, where)
        aliases = [
            self._pattern(alias, f"{where}.aliases")
            for alias in self._texts(fields.get("aliases", []), f"{where}.aliases")
        ]
        for alias in aliases:
            self._check_pairs(names, alias, f"{where}.aliases")
        return KeyPattern(
            names=names,
            shape=self._shape(fields.get("shape", []), f"{where}.shape"),
            dtype=self._dtype(fields["dtype"], f"{where}.dtype") if "dtype" in fields else dtype,
            optional=self._flag(fields.get("optional", False), f"{where}.optional"),
            aliases=tuple(aliases),
        )

    def _shape(self, value: Any, where: str) -> tuple[int | str, ...]:
        if not isinstance(value, list):
            self._wrong(where, f"expected a list of sizes such as [768, 768], got {value!r}")
            return ()
        for size in value:
            if isinstance(size, str):
                self._use_size(size, where)
            elif type(size) is not int or size < 0:
                self._wrong(where, f"{size!r} is no size: expected a number or the name of a size")
        return tuple(value)

    def _rules(self, value: Any, where: str) -> Rules:
        if isinstance(value, str):  # the whole component is one block
            value = {EVERYTHING: value}
        rules = []
        for left, right in self._mapping(value, where).items():
            place = f"{where}[{left!r}]"
            rule = self._pattern(left, place), self._pattern(str(right), place)
            if EVERYTHING in left[:-1]:
                self._wrong(place, "'*' may stand at the end only")
            self._check_pairs(*rule, place)
            rules.append(rule)
        return tuple(rules)

    def _pattern(self, text: str, where: str) -> Pattern:
        try:
            pattern = Pattern.parse(text)
        except ConfigError as error:
            self._wrong(where, str(error))
            return Pattern("", ())
        for size in pattern.sizes:
            self._use_size(size, where)
        return pattern

    def _check_pairs(self, left: Pattern, right: Pattern, where: str) -> None:
        if not (left.sizes | right.sizes) <= self._sizes.keys():
            return  # said already
        try:
            list(left.pairs(right, self._sizes))
        except ConfigError as error:
            self._wrong(where, str(error))

    def _use_size(self, name: str, where: str) -> None:
        self._used.add(name)
        if name not in self._sizes:
            hint = did_you_mean(name, self._sizes) or " Add it under 'sizes'."
            self._wrong(where, f"there is no size {name!r}", hint)

    def _dtype(self, value: Any, where: str) -> str:
        try:
            return str(parse_dtype(self._text(value, where))).removeprefix("torch.")
        except ConfigError as error:
            self._wrong(where, str(error))
            return ""

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self._wrong(where, f"expected a text, got {value!r}")
        return str(value)

    def _texts(self, value: Any, where: str) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return tuple(value)
        self._wrong(where, f"expected a list of texts, got {value!r}")
        return ()

    def _flag(self, value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            self._wrong(where, f"expected true or false, got {value!r}")
        return value is True

    def _mapping(
        self, value: Any, where: str, known: tuple[str, ...] = (), required: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The entries of a mapping whose names are `known`, if any are; complaints for the rest."""
        if not isinstance(value, Mapping):
            self._wrong(where, f"expected a mapping, got {value!r}")
            return {}
        for name in value:
            if not isinstance(name, str):
                self._wrong(where, f"the name {name!r} is not a text: write it in quotes")
            elif known and name not in known:
                self._wrong(f"{where}.{name}".lstrip("."), "unknown field", did_you_mean(name, known))
        for name in required:
            if name not in value:
                self._wrong(f"{where}.{name}".lstrip("."), "it is missing")
        return {name: entry for name, entry in value.items() if isinstance(name, str)}

    def _wrong(self, where: str, what: str, hint: str = "") -> None:
        place = f"{where}: " if where else ""
        stop = "" if what.endswith((".", "?")) else "."
        self._problems.add(f"{self._name}: {place}{what}{stop}{hint}")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML in which the same name twice is a mistake: plain YAML lets the last one win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping whose names are all different."""
        seen: set[str] = set()
        for name, _ in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{name.value!r} is there twice", problem_mark=name.start_mark
                )
            seen.add(getattr(name, "value", ""))
        return dict(super().construct_mapping(node, deep))


def _describe(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}."


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
    usual = max(dict.fromkeys(dtypes), key=dtypes.count)
    content: dict[str, Any] = {"prefix": part.prefix} if part.prefix else {}
    if part.aliases:
        content["aliases"] = list(part.aliases)
    if part.optional:
        content["optional"] = True
    if part.layout is not None:
        content["layout"] = part.layout
    content["dtype"] = usual
    content["keys"] = {str(key.names): _entry(key, usual) for key in part.keys}
    if part.blocks:
        content["blocks"] = _written(part.blocks)
    if part.conventions:
        content["conventions"] = {name: _written(rules) for name, rules in part.conventions.items()}
    return content


def _entry(key: KeyPattern, usual: str) -> Any:
    if key.dtype == usual and not key.optional and not key.aliases:
        return list(key.shape)
    entry = _Flow(shape=list(key.shape))
    if key.dtype != usual:
        entry["dtype"] = key.dtype
    if key.optional:
        entry["optional"] = True
    if key.aliases:
        entry["aliases"] = [str(alias) for alias in key.aliases]
    return entry


def _written(rules: Rules) -> dict[str, str]:
    return {str(left): str(right) for left, right in rules}
