"""A hyperparameter with a value for each key: by component, block or pattern, or as a curve over depth.

Recipes hold it unbound (`ByKey`). It can be evaluated once it is bound to a model, whose parts it names.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from mecha_exp.errors import RecipeError, counted, did_you_mean, some
from mecha_exp.graph.curves import Gradient, Preset, is_like_a_preset
from mecha_exp.graph.kinds import keys_selected, near_kind
from mecha_exp.numbers import is_number

if TYPE_CHECKING:
    from mecha_exp.architectures.anatomy import Anatomy

Scalar: TypeAlias = float | int | bool | str | None
Value: TypeAlias = "Scalar | tuple[Scalar, ...] | Gradient | Preset"
"""The value of a key, or a curve over the depth of the model."""

REGULAR = "re:"
"""The prefix of selectors that are regular expressions, which match anywhere in a key."""

DEFAULT, PRESET, CONVENTION, BLOCKS, PATTERNS = "default", "preset", "convention", "blocks", "patterns"
"""Names in a mapping that are not selectors."""

_KIND, _COMPONENT, _BLOCK, _KEYS = 0, 1, 2, 3


class NoValueError(RecipeError):
    """A key for which a value by key has no value."""


@dataclass(frozen=True)
class ByKey:
    """A value that depends on the key: selectors with a value each, and a default for the rest.

    A selector is the name of a component or of a block, a key or the beginning of one (`conv1` is `conv1`
    and `conv1.*`), a shell pattern of keys, blocks or components (`*.bias`, `IN*`), a regular expression
    of keys (`re:attn[12]`), or what the tensors are (`kind:matrix`, `axes:2`; see `kinds`).

    Of several selectors that hold a key, one whose keys all lie inside the other's wins. Where they only
    cross, selectors of keys win over blocks, blocks over components, and components over what tensors are;
    two of one sort that cross and disagree are an error.

    Attributes:
        patterns: (selector, value).
        default: the value of keys that no selector holds; None is an error for such keys.
        convention: the project whose names of blocks are meant; None is sd-mecha.
        anatomy: the model that it is bound to.
    """

    patterns: tuple[tuple[str, Value], ...]
    default: Value = None
    convention: str | None = None
    anatomy: Anatomy | None = field(default=None, repr=False)

    def over(self, anatomy: Anatomy) -> ByKey:
        """A copy bound to a model."""
        return replace(self, anatomy=anatomy)

    def __call__(self, key: str) -> Scalar:
        """The value for a key of the model that it is bound to.

        Raises:
            NoValueError: no selector holds the key, and there is no default.
            RecipeError: selectors disagree on the key, or the value is not bound.
        """
        value = self._choose(key)
        if isinstance(value, Gradient | Preset):
            return self._on_curve(value, key)
        return value  # type: ignore[return-value]

    def unmatched(self, keys: Iterable[str]) -> list[str]:
        """A message for each selector that holds none of the keys, as a misspelt one does.

        A model need not have all kinds of keys, and a misspelt kind is an error of its own.
        """
        key_set = set(keys)
        return [self._explain(s) for s in self._selections if s.rank != _KIND and not s.keys & key_set]

    @property
    def outside_blocks(self) -> list[str]:
        """The keys that it leaves to its default or curve though it goes by blocks, as they lie in none.

        Those are the keys that the model's config does not list and that lie in no layer, and that no
        selector holds.
        """
        curves = any(isinstance(value, Gradient | Preset) for _, value in self.words)
        if not curves and all(s.rank != _BLOCK for s in self._selections):
            return []
        held = frozenset().union(*(s.keys for s in self._selections))
        return [key for key in self._bound.unplaced if key not in held]

    @property
    def values(self) -> list[Value]:
        """Every value that some key may have; for a curve, numbers that bound its values."""
        values = [value for word, value in self.words if word != CONVENTION]
        return [
            v for value in values for v in (value.range if isinstance(value, Gradient | Preset) else [value])
        ]

    @property
    def words(self) -> list[tuple[str, Value]]:
        """The items of its mapping: `by_key(dict(words))` is an equal value."""
        others: dict[str, Value] = {DEFAULT: self.default, CONVENTION: self.convention}
        return [*self.patterns, *((word, value) for word, value in others.items() if value is not None)]

    def with_curves(self) -> ByKey:
        """A copy with lists as gradients and strings as presets, as they mean where a number is expected."""
        patterns = tuple((name, as_curve(value)) for name, value in self.patterns)
        return replace(self, patterns=patterns, default=as_curve(self.default))

    def _choose(self, key: str) -> Value:
        holding = [s for s in self._selections if key in s.keys]
        if not holding:
            if self.default is None:
                raise NoValueError(
                    f"none of {[name for name, _ in self.patterns]} holds the key '{key}', and there is no "
                    "'default'. Add a 'default'."
                )
            return self.default
        best = [s for s in holding if not any(other.beats(s) for other in holding)] or holding
        if len({repr(s.value) for s in best}) > 1:
            values = ", ".join(f"{s.name!r} = {_text(s.value)}" for s in best)
            raise RecipeError(
                f"the key '{key}' is held by {values}, which disagree, and neither lies inside the other. "
                "Add a selector for what they share."
            )
        return best[0].value

    def _on_curve(self, curve: Gradient | Preset, key: str) -> float:
        layer = self._bound.layer(key)
        if layer is not None:
            return curve.at(*layer)
        if curve.elsewhere is not None and self._bound.has_layers:
            return curve.elsewhere
        side = self._bound.side(key)
        if side is None:
            raise NoValueError(
                f"the key '{key}' lies in no layer, and its name does not tell whether it comes before or "
                f"after them, so the gradient {_text(curve)} says nothing of it. Give it a value of its own, "
                f"'{key}: 0.5', or the layers by name and a 'default'."
            )
        return curve.at(side, 2)

    @property
    def _bound(self) -> Anatomy:
        if self.anatomy is None:
            raise RecipeError(f"{self!r} has values for the keys of a model, and is used without one")
        return self.anatomy

    @cached_property
    def _selections(self) -> list[_Selection]:
        selected = self._bound.selected
        for name, _ in self.patterns:
            if name not in selected:
                selected[name] = _select(name, self._bound)
        return [_Selection(name, value, *selected[name]) for name, value in self.patterns]

    def _explain(self, selection: _Selection) -> str:
        anatomy = self._bound
        parts = {*anatomy.blocks.values(), *anatomy.components.values()}
        return (
            f"the pattern '{selection.name}' matches none of the {counted(len(anatomy.keys), 'key')} "
            f"({some(anatomy.keys, 3)}), no block and no component."
            f"{near_kind(selection.name) or did_you_mean(selection.name, parts)}"
        )


@dataclass(frozen=True)
class _Selection:
    """The keys that a selector holds in one model."""

    name: str
    value: Value
    keys: frozenset[str]
    rank: int

    def beats(self, other: _Selection) -> bool:
        if self.keys < other.keys:
            return True
        return self.rank > other.rank and not other.keys < self.keys


def _select(name: str, anatomy: Anatomy) -> tuple[frozenset[str], int]:
    """The keys of a selector and its rank: a block or a component of that name, or else keys."""
    if (of_kind := keys_selected(name, anatomy)) is not None:
        return of_kind, _KIND
    if name.startswith(REGULAR):
        return frozenset(filter(_regular(name).search, anatomy.keys)), _KEYS
    is_glob = any(c in name for c in "*?[")
    matches = re.compile(fnmatch.translate(name)).match if is_glob else name.__eq__
    of_parts = [
        (frozenset(key for key, part in parts.items() if matches(part)), rank)
        for parts, rank in ((anatomy.blocks, _BLOCK), (anatomy.components, _COMPONENT))
    ]
    of_keys = frozenset(k for k in anatomy.keys if matches(k) or (not is_glob and k.startswith(name + ".")))
    ranked = [(of_keys, _KEYS), *of_parts] if is_glob else [*of_parts, (of_keys, _KEYS)]
    return next((pair for pair in ranked if pair[0]), (frozenset(), _KEYS))


def _regular(name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix(REGULAR))
    except re.error as error:
        raise RecipeError(f"'{name}' is not a regular expression: {error}") from None


def by_key(value: Mapping[str, Any]) -> Value | ByKey:
    """A value by key from a mapping of selectors; `default` is for the keys that none of them holds.

    A nested mapping named `blocks` is merged in, so that a preset can stand beside a default, and one named
    `patterns` in it, for selectors that cannot be keys of a command line. `preset` names
    a curve, which replaces the default, and `convention` names the project whose blocks are meant; with a
    number each of them is an ordinary selector. A mapping of a default alone gives that default.
    """
    words = {str(k): v for k, v in value.items()}
    if isinstance(words.get(BLOCKS), Mapping | None):
        words |= _flat(words.pop(BLOCKS, None) or {})
    default = words.pop(DEFAULT, None)
    convention, preset = (
        None if is_number(words.get(w)) else words.pop(w, None) for w in (CONVENTION, PRESET)
    )
    if preset is not None:
        default = Preset(str(preset))
    if not words and not isinstance(default, Preset):
        return _frozen(default)
    patterns = tuple(sorted((name, _frozen(v)) for name, v in words.items()))
    return ByKey(patterns, _frozen(default), convention)


def as_curve(value: Value) -> Value:
    """A list of numbers as a gradient, the name of a preset as a preset; anything else as it is.

    Raises:
        RecipeError: no preset has that name.
    """
    if isinstance(value, tuple) and value and all(is_number(v) for v in value):
        return Gradient(tuple(float(v) for v in value))  # type: ignore[arg-type]
    return Preset(value) if isinstance(value, str) and is_like_a_preset(value) else value


def curve_words(curve: Gradient | Preset) -> Scalar | tuple[Scalar, ...]:
    """The text form of a curve: the name of a preset, the points of a gradient."""
    return curve.name if isinstance(curve, Preset) else curve.points


def _text(value: Value) -> str:
    return str(curve_words(value) if isinstance(value, Gradient | Preset) else value)


def _frozen(value: Any) -> Value:
    return tuple(value) if isinstance(value, list) else value


def _flat(blocks: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots: a command line's `blocks.model.layers=0.3` is the block `model.layers`."""
    flat: dict[str, Any] = {}
    for name, value in blocks.items():
        if isinstance(value, Mapping) and name == PATTERNS and not prefix:
            flat.update({str(selector): strength for selector, strength in value.items()})
        elif isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@dataclass(frozen=True)
class BlockValue:
    """The values of one block of a model: one, or several by pattern of keys.

    Attributes:
        keys: how many of the model's keys lie in the block.
        values: the different values, ascending.
    """

    component: str
    block: str
    keys: int
    values: tuple[Scalar, ...]


def effective_values(value: ByKey) -> list[BlockValue]:
    """The values of a bound value by key, block by block, in the order of the model."""
    assert value.anatomy is not None
    anatomy = value.anatomy
    by_part: dict[tuple[str, str], list[Scalar]] = {}
    for key in anatomy.keys:
        part = (anatomy.components[key], anatomy.blocks[key])
        by_part.setdefault(part, []).append(value(key))
    order = {block: i for i, block in enumerate(anatomy.order)}
    return [
        BlockValue(component, block, len(values), tuple(sorted(set(values), key=_order)))
        for (component, block), values in sorted(by_part.items(), key=lambda item: order[item[0][1]])
    ]


def table(value: ByKey) -> list[tuple[Scalar, list[str]]]:
    """The keys of each value of a bound value by key, in the order of the model.

    A key for which it has no value is listed under None. What selectors hold is looked up once for each
    group of keys that the same selectors hold, so that a long sweep over blocks costs little.
    """
    assert value.anatomy is not None
    keys_of: dict[Scalar, list[str]] = {}
    number_of: dict[tuple[frozenset[int], object], Scalar] = {}
    holders = [s.keys for s in value._selections]
    for key, group in value.anatomy.groups(tuple(name for name, _ in value.patterns), holders):
        if group not in number_of:
            try:
                number_of[group] = value(key)
            except NoValueError:
                number_of[group] = None
        keys_of.setdefault(number_of[group], []).append(key)
    return list(keys_of.items())


def _order(value: Scalar) -> tuple[bool, Any]:
    return isinstance(value, str), value if value is not None else 0
