"""Model configs from YAML: reading one with every mistake reported at once.

    identifier: llama-hf
    sizes: {layers: 32, vocabulary: 32000, hidden: 4096}    # of a family; inferred from a file
    components:
      model:
        prefix: model.
        dtype: bfloat16                                # of the keys that say nothing else
        keys:
          embed_tokens.weight: [vocabulary, hidden]
          layers.{0..layers-1}.self_attn.{q,k,v,o}_proj.weight: [hidden, hidden]
          norm.weight: {shape: [hidden], dtype: float32, optional: true, aliases: [final_norm.weight]}
        blocks:
          layers.{0..layers-1}.*: "{0..layers-1}"
          "*": BASE

docs/model-configs.md says what every field means, and `adapters` how the config of LoRA files is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import yaml

from mecha_exp.architectures.config import Component, KeyPattern, Layout, ModelConfig
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.architectures.rules import REST, Conversion, Rules
from mecha_exp.architectures.symmetries import Side, SymmetryRule
from mecha_exp.checkpoint import parse_dtype
from mecha_exp.errors import ConfigError, Problems, did_you_mean

IDENTIFIER = re.compile(r"[a-z0-9._+]+-[a-z0-9._+]+")
_SIZE_NAME = re.compile(r"[a-z_]\w*")
_CONFIG_FIELDS = ("identifier", "sizes", "components")
_ADAPTER_FIELDS = ("identifier", "adapter")
_ABOUT_FIELDS = ("base", "prefix")
_SHARED_FIELDS = ("sizes", "dtype", "keys", "blocks", "conventions", "symmetries")
_LAYOUT_FIELDS = (*_SHARED_FIELDS, "blocks_of")
_COMPONENT_FIELDS = (*_SHARED_FIELDS, "prefix", "layout", "dots", "aliases", "optional")
_SYMMETRY_FIELDS = ("head", "rows", "columns")
_KEY_FIELDS = ("shape", "dtype", "optional", "aliases")

FindLayout = Callable[[str], Layout]
FindConfig = Callable[[str], ModelConfig]


def read_config(text: str, name: str, layouts: FindLayout, configs: FindConfig) -> ModelConfig:
    """Read a config from YAML; ConfigError with everything that is wrong in it.

    Args:
        text: the YAML.
        name: how messages call it, such as its file.
        layouts: gives the layouts that components name; ConfigError for one that there is not.
        configs: gives the configs that LoRA files are for.
    """
    content = load_yaml(text, name)
    reader = _Reader(name, layouts)
    if isinstance(content, Mapping) and "adapter" in content:
        return reader.adapter(content, configs)
    return reader.config(content)


def read_layout(text: str, name: str, layouts: FindLayout, conversions: Mapping[str, Conversion]) -> Layout:
    """Read a layout from YAML and give it its conversions; ConfigError with all that is wrong in it."""
    return _Reader(name, layouts).layout(load_yaml(text, name), conversions)


def load_yaml(text: str, name: str) -> Any:
    """What YAML holds; ConfigError where it is none, or has a name twice."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_describe(error)}") from None


class _Reader:
    """Turns what YAML holds into a config or a layout, and notes every mistake with its place."""

    def __init__(self, name: str, layouts: FindLayout) -> None:
        self._name = name
        self._find_layout = layouts
        self._problems = Problems()
        self._sizes: dict[str, int] = {}
        self._used: set[str] = set()

    def config(self, content: Any) -> ModelConfig:
        """The config, or one ConfigError with every mistake."""
        fields = self._mapping(content, "", _CONFIG_FIELDS, required=("identifier", "components"))
        identifier = self._identifier(fields)
        sizes = self._sizes = self._read_sizes(fields.get("sizes", {}), "sizes")
        components = self._mapping(fields.get("components", {}), "components")
        if "components" in fields and not components:
            self._wrong("components", "there is none")
        parts = [self._component(name, value, sizes) for name, value in components.items()]
        for size in sizes.keys() - self._used:
            self._wrong(f"sizes.{size}", "no shape and no range uses it")
        self._problems.raise_as(ConfigError)
        return ModelConfig(identifier, parts, sizes)

    def adapter(self, content: Any, configs: FindConfig) -> AdapterConfig:
        """The config of LoRA files, or one ConfigError with every mistake."""
        fields = self._mapping(content, "", _ADAPTER_FIELDS, required=_ADAPTER_FIELDS)
        identifier = self._identifier(fields)
        about = self._mapping(fields["adapter"], "adapter", _ABOUT_FIELDS, required=_ABOUT_FIELDS)
        prefix = self._text(about.get("prefix", ""), "adapter.prefix")
        base = None
        try:
            base = configs(self._text(about.get("base", ""), "adapter.base"))
        except ConfigError as error:
            self._wrong("adapter.base", str(error))
        if base is not None and (base.sizes or not base.parts):
            self._wrong("adapter.base", f"'{base.identifier}' has no keys of fixed shapes")
        self._problems.raise_as(ConfigError)
        assert base is not None
        return AdapterConfig(identifier, base, prefix)

    def layout(self, content: Any, conversions: Mapping[str, Conversion]) -> Layout:
        """The layout, or one ConfigError with every mistake."""
        fields = self._mapping(content, "", _LAYOUT_FIELDS, required=("keys",))
        self._sizes = self._read_sizes(fields.get("sizes", {}), "sizes")
        layout = Layout(
            name=self._name,
            keys=self._keys(fields, ""),
            sizes=self._sizes,
            blocks=self._rules(fields.get("blocks", {}), "blocks"),
            conventions=self._conventions(fields, ""),
            blocks_of=self._layout(fields.get("blocks_of"), "blocks_of"),
            conversions=conversions,
            symmetries=self._symmetries(fields, ""),
        )
        self._problems.raise_as(ConfigError)
        return layout

    def _identifier(self, fields: Mapping[str, Any]) -> str:
        identifier = str(fields.get("identifier", ""))
        if "identifier" in fields and not IDENTIFIER.fullmatch(identifier):
            self._wrong(
                "identifier", f"{identifier!r} is not 'architecture-implementation', such as 'sdxl-sgm'"
            )
        return identifier

    def _component(self, name: str, value: Any, sizes: Mapping[str, int]) -> Component:
        where = f"components.{name}"
        fields = self._mapping(value, where, _COMPONENT_FIELDS)
        layout = self._layout(fields.get("layout"), f"{where}.layout")
        own = self._read_sizes(fields.get("sizes", {}), f"{where}.sizes")
        known = layout.sizes if layout else {}
        self._sizes = {**known, **sizes, **own}
        self._used |= known.keys()
        if layout is None and not fields.get("keys"):
            self._wrong(where, "it needs 'keys', or a 'layout' that has them")
        return Component(
            name=name,
            prefix=self._text(fields.get("prefix", ""), f"{where}.prefix"),
            keys=self._keys(fields, where),
            layout=layout,
            dots=self._text(fields.get("dots", "."), f"{where}.dots"),
            aliases=self._aliases(fields.get("aliases", {}), f"{where}.aliases"),
            optional=self._optional(fields.get("optional", False), f"{where}.optional"),
            sizes=own,
            blocks=self._rules(fields.get("blocks", {}), f"{where}.blocks"),
            conventions=self._conventions(fields, where),
            symmetries=self._symmetries(fields, where),
        )

    def _keys(self, fields: Mapping[str, Any], where: str) -> tuple[KeyPattern, ...]:
        place = f"{where}.".lstrip(".")
        dtype = self._dtype(fields.get("dtype", "float32"), f"{place}dtype")
        keys = self._mapping(fields.get("keys", {}), f"{place}keys")
        return tuple(self._key(key, entry, dtype, f"{place}keys[{key!r}]") for key, entry in keys.items())

    def _conventions(self, fields: Mapping[str, Any], where: str) -> dict[str, Rules]:
        place = f"{where}.conventions".lstrip(".")
        conventions = self._mapping(fields.get("conventions", {}), place)
        return {name: self._rules(rules, f"{place}.{name}") for name, rules in conventions.items()}

    def _symmetries(self, fields: Mapping[str, Any], where: str) -> tuple[SymmetryRule, ...]:
        place = f"{where}.symmetries".lstrip(".")
        rules = []
        for below, entries in self._mapping(fields.get("symmetries", {}), place).items():
            here = f"{place}[{below!r}]"
            pattern = self._pattern(below, here)
            if not isinstance(entries, list):
                self._wrong(here, f"expected a list of rules such as {{rows: fc1.weight}}, got {entries!r}")
                continue
            rules += [
                self._symmetry(pattern, entry, f"{here}[{number}]") for number, entry in enumerate(entries)
            ]
        return tuple(rules)

    def _symmetry(self, below: Pattern, entry: Any, where: str) -> SymmetryRule:
        fields = self._mapping(entry, where, _SYMMETRY_FIELDS)
        sides = [
            self._side(text, axis, f"{where}.{name}")
            for axis, name in enumerate(("rows", "columns"))
            for text in self._one_or_more(fields.get(name, []), f"{where}.{name}")
        ]
        head = fields.get("head")
        if head is not None and (type(head) is not int or head < 1):
            self._wrong(f"{where}.head", f"expected a positive number, got {head!r}")
        elif head is not None and len(sides) != 2:
            self._wrong(where, f"a rule with 'head' has two sides, and this one has {len(sides)}")
        elif not sides:
            self._wrong(where, "it needs 'rows' or 'columns'")
        return SymmetryRule(below, tuple(sides), head)

    def _side(self, text: str, axis: int, where: str) -> Side:
        try:
            side = Side.parse(text, axis)
        except ConfigError as error:
            self._wrong(where, str(error))
            return Side(Pattern("", ()), axis)
        for size in side.names.sizes:
            self._use_size(size, where)
        return side

    def _one_or_more(self, value: Any, where: str) -> tuple[str, ...]:
        return self._texts([value] if isinstance(value, str) else value, where)

    def _layout(self, value: Any, where: str) -> Layout | None:
        if value is None:
            return None
        try:
            return self._find_layout(self._text(value, where))
        except ConfigError as error:
            self._wrong(where, str(error))
            return None

    def _read_sizes(self, value: Any, where: str) -> dict[str, int]:
        sizes = {}
        for name, size in self._mapping(value, where).items():
            if not _SIZE_NAME.fullmatch(name):
                self._wrong(f"{where}.{name}", "a size is named in small letters, such as 'hidden'")
            if type(size) is not int or size < 1:
                self._wrong(f"{where}.{name}", f"expected a positive number, got {size!r}")
            else:
                sizes[name] = size
        return sizes

    def _aliases(self, value: Any, where: str) -> dict[str, str]:
        aliases = self._mapping(value, where)
        return {begin: self._text(other, f"{where}[{begin!r}]") for begin, other in aliases.items()}

    def _optional(self, value: Any, where: str) -> bool | tuple[Pattern, ...]:
        if isinstance(value, list):
            return tuple(self._pattern(text, where) for text in self._texts(value, where))
        return self._flag(value, where)

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
            value = {REST: value}
        rules = []
        for left, right in self._mapping(value, where).items():
            place = f"{where}[{left!r}]"
            rule = self._pattern(left, place), self._pattern(str(right), place)
            if REST in left[:-1]:
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
