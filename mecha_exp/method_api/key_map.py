"""`map_keys` of a merge method: the input keys that it needs for each output key.

    @merge_method(is_conversion=True)
    class split_heads:
        @staticmethod
        def map_keys(b):
            for i in range(12):
                b[f"{i}.q", f"{i}.k", f"{i}.v"] = b.fused.keys[f"{i}.qkv"]

        def __call__(
            self, fused: Parameter(StateDict[Tensor], "x-fused"), **kwargs
        ) -> Return(Tensor, "x-split"):
            outputs, inputs = kwargs["key_relation"]
            return dict(zip(outputs, fused[inputs["fused"][0]].chunk(3)))

Several keys on the left are made together, by one call that returns all of them. On the right `&` joins
needs, `|` separates alternatives and the first with all its keys is used, and `@ meta` attaches a value to
an alternative, which the method receives as `key_relation.meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from mecha_exp.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from mecha_exp.architectures import ModelConfig

NO_CONFIGS: Mapping[str, ModelConfig | None] = {}


@dataclass(frozen=True)
class KeyRelation:
    """The output keys and the input keys of one call of a method.

    Attributes:
        outputs: the keys that it makes.
        inputs: the keys that it needs, by argument.
        meta: the value that `@` attaches to the alternative.
    """

    outputs: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]
    meta: Any = None

    def __iter__(self) -> Iterator[Any]:
        yield self.outputs
        yield self.inputs


@dataclass(frozen=True)
class Needs:
    """Alternative sets of input keys, each by argument and with its `meta`."""

    alternatives: tuple[tuple[Mapping[str, tuple[str, ...]], Any], ...]

    def __and__(self, other: Needs) -> Needs:
        return Needs(
            tuple(
                (
                    {
                        name: tuple(dict.fromkeys((*one.get(name, ()), *two.get(name, ()))))
                        for name in {**one, **two}
                    },
                    _joined(meta, more),
                )
                for one, meta in self.alternatives
                for two, more in _checked(other).alternatives
            )
        )

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.alternatives + _checked(other).alternatives)

    def __matmul__(self, meta: Any) -> Needs:
        return Needs(tuple((keys, meta) for keys, _ in self.alternatives))


def _checked(needs: Needs) -> Needs:
    if isinstance(needs, Needs):
        return needs
    raise RecipeError(
        f"map_keys: {needs!r} says no keys that are needed. Write b.<argument>.keys[key], or b.keys[key]."
    )


def _texts(keys: str | tuple[str, ...]) -> tuple[str, ...]:
    chosen = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, tuple | list) else None
    if chosen is not None and all(isinstance(key, str) for key in chosen):
        return chosen
    raise RecipeError(f"map_keys: a key is a text, or several of them, and {keys!r} is not")


def _joined(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one | other


class _Keys:
    """The keys of arguments: `keys()` lists them, `keys[k]` needs one of them and `keys[k, l]` several."""

    def __init__(self, inputs: Mapping[str, Mapping[str, Any]], where: str) -> None:
        self._inputs = inputs
        self._where = where

    def __call__(self) -> Collection[str]:
        return self._shared().keys()

    def items(self) -> Collection[tuple[str, Any]]:
        return self._shared().items()

    def __getitem__(self, keys: str | tuple[str, ...]) -> Needs:
        chosen = _texts(keys)
        for name, known in self._inputs.items():
            for key in chosen:
                if key not in known:
                    hint = did_you_mean(key, known)
                    raise RecipeError(f"map_keys: the argument '{name}' has no key '{key}'.{hint}")
        return Needs(((dict.fromkeys(self._inputs, chosen), None),))

    def _shared(self) -> Mapping[str, Any]:
        first, *others = self._inputs.values() or ({},)
        if any(other.keys() != first.keys() for other in others):
            raise RecipeError(
                f"map_keys: the arguments {', '.join(self._inputs)} have different keys, so "
                f"`{self._where}.keys()` has no meaning. Ask one of them: `b.<argument>.keys()`."
            )
        return first


class _Port:
    """One argument, or the output (`b.out`), of the method whose keys are mapped.

    Attributes:
        keys: its keys.
        model_config: its model config; None for an output and for hyperparameters.
    """

    def __init__(
        self, inputs: Mapping[str, Mapping[str, Any]], where: str, config: ModelConfig | None = None
    ) -> None:
        self.keys = _Keys(inputs, where)
        self.model_config = config

    def __getitem__(self, key: object) -> Needs:
        raise RecipeError(f"map_keys: write b.<argument>.keys[{key!r}], not b.<argument>[{key!r}]")


class KeyMapBuilder:
    """The `b` of `map_keys(b)`.

    `b.keys` are the keys of all arguments together, `b.<argument>.keys` those of one, `b.out.keys` those of
    the output. `b[outputs] = needs` declares the needs of outputs (a key, several, or `...` for every key).
    `b.<argument>.model_config` is the model config of an argument.
    """

    def __init__(
        self,
        inputs: Mapping[str, Mapping[str, Any]],
        outputs: Mapping[str, Any],
        configs: Mapping[str, ModelConfig | None] = NO_CONFIGS,
    ) -> None:
        self._inputs = inputs
        self._configs = configs
        self._outputs = outputs
        self.keys = _Keys(inputs, "b")
        self.out = _Port({"out": outputs}, "b.out")
        self.needs: dict[str, tuple[tuple[str, ...], Needs]] = {}

    def __getattr__(self, name: str) -> _Port:
        if name.startswith("_") or name not in self._inputs:
            hint = did_you_mean(name, [*self._inputs, "out", "keys"])
            raise AttributeError(f"map_keys: there is no argument '{name}'.{hint}")
        return _Port({name: self._inputs[name]}, f"b.{name}", self._configs.get(name))

    def __setitem__(self, outputs: str | tuple[str, ...] | EllipsisType, needs: Needs) -> None:
        if outputs is ...:
            for key in self._outputs:
                self[key] = needs
            return
        group, needs = _texts(outputs), _checked(needs)
        for key in group:
            if key not in self._outputs:
                raise RecipeError(
                    f"map_keys: the output has no key '{key}'.{did_you_mean(key, self._outputs)}"
                )
            if key in self.needs:
                raise RecipeError(f"map_keys: the key '{key}' is assigned twice")
            self.needs[key] = (group, needs)


class KeyMap:
    """The key relations of a method's `map_keys`, for arguments of known keys."""

    def __init__(
        self,
        map_keys: Callable[[KeyMapBuilder], None],
        inputs: Mapping[str, Mapping[str, Any]],
        outputs: Mapping[str, Any],
        configs: Mapping[str, ModelConfig | None] = NO_CONFIGS,
    ) -> None:
        builder = KeyMapBuilder(inputs, outputs, configs)
        map_keys(builder)
        self._needs = builder.needs

    def keys(self) -> Collection[str]:
        """The keys that the method makes if its arguments have every key that it may need."""
        return self._needs.keys()

    def without(self, groups: Collection[tuple[str, ...]]) -> KeyMap:
        """The map without some groups of keys that are made together."""
        rest = copy(self)
        rest._needs = {key: needs for key, needs in self._needs.items() if needs[0] not in groups}
        return rest

    def relation(self, key: str, has: Callable[[str, str], bool]) -> KeyRelation | None:
        """The first alternative for a key whose input keys all exist; None if there is none.

        Args:
            key: the key of the output.
            has: (argument, key) -> whether the argument has the key.
        """
        if key not in self._needs:
            return None
        outputs, needs = self._needs[key]
        for inputs, meta in needs.alternatives:
            if all(has(name, source) for name, keys in inputs.items() for source in keys):
                return KeyRelation(outputs, inputs, meta)
        return None
