"""Model configs from YAML: reading one with every mistake reported at once.

    identifier: llama-hf
    sizes: {layers: 32, vocabulary: 32000, hidden: 4096}    # of a family; inferred from a file
    components:
      model:
        prefix: model.
        dtype: bfloat16                                # of the keys that have none of their own
        keys:
          embed_tokens.weight: [vocabulary, hidden]
          layers.{0..layers-1}.self_attn.{q,k,v,o}_proj.weight: [hidden, hidden]
          norm.weight: {shape: [hidden], dtype: float32, optional: true, aliases: [final_norm.weight]}
        blocks:
          layers.{0..layers-1}.*: "{0..layers-1}"
          "*": BASE

docs/model-configs.md describes every field, and docs/lora.md the config of LoRA files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mecha_exp.architectures.components import Component, Layout
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import KeyPattern
from mecha_exp.architectures.library.fields import FieldReader, Readers, load_yaml
from mecha_exp.architectures.lora import AdapterConfig
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.architectures.rules import REST, Conversion, Rules
from mecha_exp.architectures.symmetries import Side, SymmetryRule
from mecha_exp.checkpoint import parse_dtype
from mecha_exp.errors import ConfigError, did_you_mean

_IDENTIFIER = re.compile(r"[a-z0-9._+]+-[a-z0-9._+]+")
_SIZE_NAME = re.compile(r"[a-z_]\w*")
_NOTHING = Pattern("", ())

FindLayout = Callable[[str], Layout]
FindConfig = Callable[[str], ModelConfig]


def read_config(content: Any, name: str, layouts: FindLayout, configs: FindConfig) -> ModelConfig:
    """Read a config from what YAML holds; ConfigError with everything that is wrong in it.

    Args:
        content: of the YAML.
        name: how messages call it, such as its file.
        layouts: finds the layout that a component names; ConfigError where there is none.
        configs: finds the config of the models that LoRA files are for.
    """
    reader = _Reader(name, layouts)
    if isinstance(content, Mapping) and "adapter" in content:
        return reader.adapter(content, configs)
    return reader.config(content)


def read_layout(text: str, name: str, layouts: FindLayout, conversions: Mapping[str, Conversion]) -> Layout:
    """Read a layout from YAML and add its conversions; ConfigError with everything that is wrong in it."""
    return _Reader(name, layouts).layout(name, load_yaml(text, name), conversions)


class _Reader(FieldReader):
    """Reads a config or a layout."""

    def __init__(self, name: str, layouts: FindLayout) -> None:
        super().__init__(name)
        self._find_layout = layouts
        self._sizes: dict[str, int] = {}
        """The sizes that patterns and shapes may name at this point."""
        self._used: set[str] = set()
        self._usual_dtype = "float32"
        self._key_readers: Readers = {
            "shape": self._shape,
            "dtype": self._dtype,
            "optional": self.flag,
            "aliases": self._patterns,
            "stacked": self.flag,
        }

    def config(self, content: Any) -> ModelConfig:
        """The config, or one ConfigError with every mistake."""
        readers: Readers = {
            "identifier": self._identifier,
            "sizes": self._define_sizes,
            "family": self.text,
            "components": self._components,
        }
        fields = self.fields(content, "", readers, required=("identifier", "components"))
        if "family" in fields:
            fields["sizes"] = {
                **fields.get("sizes", {}),
                **self._sizes_of(fields["family"], fields["components"]),
            }
        for size in content.get("sizes", ()) if isinstance(content, Mapping) else ():
            if size not in self._used:
                self.wrong(f"sizes.{size}", "no shape and no range uses it")
        self.problems.raise_as(ConfigError)
        return ModelConfig(fields["identifier"], fields["components"], fields.get("sizes"))

    def _sizes_of(self, name: str, parts: Iterable[Component]) -> Mapping[str, int]:
        """The sizes of the layout of a component, which make the config a family."""
        layouts = {part.name: part.layout for part in parts if part.layout is not None and part.layout.sizes}
        if name not in layouts:
            self.wrong(
                "family", f"{name!r} is not a component whose layout has sizes", did_you_mean(name, layouts)
            )
            return {}
        return layouts[name].sizes

    def adapter(self, content: Any, configs: FindConfig) -> AdapterConfig:
        """The config of LoRA files, or one ConfigError with every mistake."""
        about: Readers = {
            "base": lambda value, where: self.parsed(configs, self.text(value, where), where, None),
            "prefix": self.text,
            "names": self._module_names,
        }
        readers: Readers = {
            "identifier": self._identifier,
            "adapter": lambda value, where: self.fields(value, where, about, required=("base",)),
        }
        fields = self.fields(content, "", readers, required=readers)
        base = fields["adapter"].get("base")
        if base is not None and (not base.parts or (base.sizes and "names" not in fields["adapter"])):
            self.wrong("adapter.base", f"'{base.identifier}' has no keys of fixed shapes")
        if len({"prefix", "names"} & fields["adapter"].keys()) != 1:
            self.wrong("adapter", "it needs a 'prefix', or 'names' that say how modules begin")
        self.problems.raise_as(ConfigError)
        return AdapterConfig(fields["identifier"], **fields["adapter"])

    def _module_names(self, value: Any, where: str) -> dict[str, list[str]]:
        """How the names of modules begin, by the beginnings of keys."""
        names = {
            begin: self.texts(others, f"{where}.{begin}")
            for begin, others in self.mapping(value, where).items()
        }
        for other in (other for others in names.values() for other in others):
            if not other.endswith(("_", ".")):
                self.wrong(
                    where, f"{other!r} ends with neither '_' nor '.', which stands for the dots of keys"
                )
        return names

    def layout(self, name: str, content: Any, conversions: Mapping[str, Conversion]) -> Layout:
        """The layout, or one ConfigError with every mistake."""
        readers: Readers = {"blocks_of": self._layout, **self._shared()}
        fields = self.fields(content, "", readers, required=("keys",))
        self.problems.raise_as(ConfigError)
        return Layout(name, **{"sizes": {}, **fields}, conversions=conversions)

    def _identifier(self, value: Any, where: str) -> str:
        identifier = str(value)
        if not _IDENTIFIER.fullmatch(identifier):
            self.wrong(where, f"{identifier!r} is not 'architecture-implementation', such as 'sdxl-sgm'")
        return identifier

    def _components(self, value: Any, where: str) -> list[Component]:
        components = self.mapping(value, where)
        if not components:
            self.wrong(where, "there is none")
        sizes = self._sizes
        parts = []
        for name, entry in components.items():
            self._sizes, self._usual_dtype = sizes, "float32"
            parts.append(self._component(name, entry, f"{where}.{name}"))
        return parts

    def _component(self, name: str, value: Any, where: str) -> Component:
        readers: Readers = {
            "layout": self._inherited_layout,
            **self._shared(),
            "prefix": self.text,
            "dots": self.text,
            "aliases": self._aliases,
            "optional": self._optional,
        }
        if _is_of_keys(value, readers):
            value = {"keys": value}
        fields = self.fields(value, where, readers)
        if "layout" not in fields and not fields.get("keys"):
            self.wrong(where, "it needs 'keys', or a 'layout' that has them")
        return Component(name, **fields)

    def _shared(self) -> Readers:
        """The fields of components and layouts; those before `keys` hold for the keys."""
        return {
            "sizes": self._define_sizes,
            "dtype": self._define_dtype,
            "keys": self._keys,
            "blocks": self._rules,
            "conventions": self._conventions,
            "symmetries": self._symmetries,
        }

    def _layout(self, value: Any, where: str) -> Layout | None:
        return None if value is None else self.parsed(self._find_layout, self.text(value, where), where, None)

    def _inherited_layout(self, value: Any, where: str) -> Layout | None:
        """A component's layout, whose sizes the component may name."""
        layout = self._layout(value, where)
        if layout is not None:
            self._sizes = {**layout.sizes, **self._sizes}
            self._used |= layout.sizes.keys()
        return layout

    def _define_sizes(self, value: Any, where: str) -> dict[str, int]:
        sizes = {}
        for name, entry in self.mapping(value, where).items():
            if not _SIZE_NAME.fullmatch(name):
                self.wrong(f"{where}.{name}", "a size is named in small letters, such as 'hidden'")
            if (size := self.positive(entry, f"{where}.{name}")) is not None:
                sizes[name] = size
        self._sizes = {**self._sizes, **sizes}
        return sizes

    def _define_dtype(self, value: Any, where: str) -> None:
        self._usual_dtype = self._dtype(value, where)

    def _dtype(self, value: Any, where: str) -> str:
        dtype = self.parsed(parse_dtype, self.text(value, where), where, "")
        return str(dtype).removeprefix("torch.")

    def _keys(self, value: Any, where: str) -> tuple[KeyPattern, ...]:
        return tuple(self._key(*entry) for entry in self.patterned(value, where))

    def _key(self, name: str, value: Any, where: str) -> KeyPattern:
        if isinstance(value, list):
            fields: dict[str, Any] = {"shape": self._shape(value, f"{where}.shape")}
        else:
            fields = self.fields(value, where, self._key_readers, required=("shape",))
        key = KeyPattern(self._pattern(name, where), **{"shape": (), "dtype": self._usual_dtype, **fields})
        if key.stacked and len(key.shape) < 2:
            shape = list(key.shape)
            self.wrong(
                where, f"{shape} cannot be a stack, whose first axis counts experts of one axis or more"
            )
        for alias in key.aliases:
            self._check_pairs(key.names, alias, f"{where}.aliases")
        return key

    def _shape(self, value: Any, where: str) -> tuple[int | str, ...]:
        shape = self.listed(value, where, "sizes such as [768, 768]")
        for size in shape:
            if isinstance(size, str):
                self._use((size,), where)
            elif type(size) is not int or size < 0:
                self.wrong(where, f"{size!r} is not a size: expected a number or the name of a size")
        return tuple(shape)

    def _aliases(self, value: Any, where: str) -> dict[str, str]:
        return {begin: self.text(other, place) for begin, other, place in self.patterned(value, where)}

    def _optional(self, value: Any, where: str) -> bool | tuple[Pattern, ...]:
        return self._patterns(value, where) if isinstance(value, list) else self.flag(value, where)

    def _conventions(self, value: Any, where: str) -> dict[str, Rules]:
        return {
            name: self._rules(rules, f"{where}.{name}") for name, rules in self.mapping(value, where).items()
        }

    def _rules(self, value: Any, where: str) -> Rules:
        if isinstance(value, str):  # the whole component is one block
            value = {REST: value}
        return tuple(self._rule(*entry) for entry in self.patterned(value, where))

    def _rule(self, left: str, right: Any, where: str) -> tuple[Pattern, Pattern]:
        rule = self._pattern(left, where), self._pattern(str(right), where)
        if REST in left[:-1]:
            self.wrong(where, "'*' may stand at the end only")
        self._check_pairs(*rule, where)
        return rule

    def _symmetries(self, value: Any, where: str) -> tuple[SymmetryRule, ...]:
        rules: list[SymmetryRule] = []
        for name, entries, place in self.patterned(value, where):
            below = self._pattern(name, place)
            listed = self.listed(entries, place, "rules such as {rows: fc1.weight}")
            rules += [self._symmetry(below, entry, f"{place}[{i}]") for i, entry in enumerate(listed)]
        return tuple(rules)

    def _symmetry(self, below: Pattern, value: Any, where: str) -> SymmetryRule:
        readers: Readers = {
            "head": lambda head, place: None if head is None else self.positive(head, place),
            "rows": partial(self._sides, axis=0),
            "columns": partial(self._sides, axis=1),
        }
        fields = self.fields(value, where, readers)
        sides = (*fields.get("rows", ()), *fields.get("columns", ()))
        head = fields.get("head")
        if head is not None and len(sides) != 2:
            self.wrong(where, f"a rule with 'head' has two sides, and this one has {len(sides)}")
        elif not sides:
            self.wrong(where, "it needs 'rows' or 'columns'")
        return SymmetryRule(below, sides, head)

    def _sides(self, value: Any, where: str, axis: int) -> list[Side]:
        texts = self.texts([value] if isinstance(value, str) else value, where)
        parse = partial(Side.parse, axis=axis)
        sides = [self.parsed(parse, text, where, Side(_NOTHING, axis)) for text in texts]
        for side in sides:
            self._use(side.names.sizes, where)
        return sides

    def _patterns(self, value: Any, where: str) -> tuple[Pattern, ...]:
        return tuple(self._pattern(text, where) for text in self.texts(value, where))

    def _pattern(self, text: str, where: str) -> Pattern:
        pattern = self.parsed(Pattern.parse, text, where, _NOTHING)
        self._use(pattern.sizes, where)
        return pattern

    def _check_pairs(self, left: Pattern, right: Pattern, where: str) -> None:
        if (left.sizes | right.sizes) <= self._sizes.keys():  # unknown sizes are noted already
            self.parsed(lambda _: list(left.pairs(right, self._sizes)), "", where, None)

    def _use(self, sizes: Iterable[str], where: str) -> None:
        for name in sizes:
            self._used.add(name)
            if name not in self._sizes:
                hint = did_you_mean(name, self._sizes) or " Add it under 'sizes'."
                self.wrong(where, f"there is no size {name!r}", hint)


def _is_of_keys(value: Any, readers: Readers) -> bool:
    """Whether a component is written as in sd-mecha: its keys and no word around them."""
    entries = value.values() if isinstance(value, Mapping) else ()
    are_keys = all(isinstance(entry, Mapping) and "shape" in entry for entry in entries)
    return bool(entries) and are_keys and not any(word in readers for word in value)
