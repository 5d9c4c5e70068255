"""Reads the format of mergekit's configurations: what is merged with what, by which method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mecha_exp.errors import ConfigError, brief, did_you_mean
from mecha_exp.mergekit.methods import INPUT, METHODS, NO_EFFECT, OTHER, SHARED, Method
from mecha_exp.mergekit.references import Reference, read_reference
from mecha_exp.mergekit.settings import FLAG, Settings, check_known, read_settings
from mecha_exp.mergekit.tokenizer_settings import TokenizerSettings, read_tokenizer
from mecha_exp.numbers import is_whole

WHOLE = (0, -1)
"""The layers of a model that is merged as a whole."""

AUTO = "auto"
"""The chat template that most models have."""

_SECTIONS = ("models", "slices", "modules")
_WORDS = (
    *_SECTIONS,
    "merge_method",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
    "name",
)
_OF_MIXTURES = ("experts", "gate_mode", "experts_per_token")
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Input:
    """A model, or some of its layers, as an input of a merge.

    Attributes:
        reference: the model.
        layers: the first layer and the one after the last; `WHOLE` for all.
        settings: its own parameters.
        where: its place in the configuration, for messages.
    """

    reference: Reference
    layers: tuple[int, int]
    settings: Settings
    where: str


@dataclass(frozen=True)
class Slice:
    """Inputs that are merged with each other.

    Attributes:
        inputs: in the order of the configuration.
        base: the base model, or None.
        settings: the parameters of the slice.
        where: its place in the configuration, for messages.
    """

    inputs: tuple[Input, ...]
    base: Reference | None
    settings: Settings
    where: str


@dataclass(frozen=True)
class Configuration:
    """A configuration of mergekit.

    Attributes:
        method_name, method: the merge method.
        slices: what is merged; the layers of the output in their order.
        is_sliced: whether the slices are ranges of layers, and not whole models.
        settings: the parameters for all slices.
        dtype: of the output; None is that of the inputs.
        tokenizer: what is said about the tokens of the output, or None.
        chat_template: the template as text, `auto` for the one that most models have, or None.
        base: the base model of the whole configuration.
    """

    method_name: str
    method: Method
    slices: tuple[Slice, ...]
    is_sliced: bool
    settings: Settings
    dtype: str | None
    tokenizer: TokenizerSettings | None
    chat_template: str | None
    base: Reference | None

    @property
    def inputs(self) -> list[Reference]:
        """Every model that is merged, in the order of the configuration."""
        return list(dict.fromkeys(entry.reference for part in self.slices for entry in part.inputs))

    @property
    def references(self) -> list[Reference]:
        """Every model that is named, the base first."""
        bases = [part.base for part in self.slices if part.base]
        donors = self.tokenizer.references if self.tokenizer else []
        return list(dict.fromkeys([*bases, *self.inputs, *donors]))


def read_configuration(config: Mapping[str, Any]) -> Configuration:
    """Read the content of a configuration.

    Raises:
        ConfigError: an unknown word or method, a missing base model, or something that is not supported.
    """
    _check_words(config)
    name = config.get("merge_method")
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"merge_method: unknown method {name!r}.{did_you_mean(str(name), METHODS)}")
    reader = _Reader(name, METHODS[name])
    base = _reference(config.get("base_model"), "base_model")
    is_sliced = "slices" in config
    slices = tuple(reader.slices(config["slices"], base)) if is_sliced else (reader.whole(config, base),)
    return Configuration(
        name,
        METHODS[name],
        slices,
        is_sliced,
        reader.settings(config.get("parameters"), "parameters"),
        output_dtype(config),
        read_tokenizer(config),
        _chat_template(config.get("chat_template")),
        base,
    )


class _Reader:
    """Reads the parts of a configuration that depend on its merge method."""

    def __init__(self, name: str, method: Method) -> None:
        self._name = name
        self._method = method

    def settings(self, config: Any, where: str, scopes: tuple[str, ...] | None = None) -> Settings:
        """A section of parameters; only those of some scopes have a meaning for a single input."""
        kinds = {name: p.kind for name, p in self._method.parameters.items()}
        settings = read_settings(config, {**kinds, NO_EFFECT: FLAG}, where, self._name)
        for name in settings:
            scope = INPUT if name == NO_EFFECT else self._method.parameters[name].scope
            if scopes and scope not in scopes:
                has = "one value for all inputs" if scope == SHARED else "no value for the base model"
                raise ConfigError(
                    f"{where}.{name}: {self._name} has {has}, and mergekit would ignore this one. Move it to "
                    "the parameters of the whole, or remove it."
                )
        return settings

    def whole(self, config: Mapping[str, Any], base: Reference | None) -> Slice:
        """The one slice of whole models; the base is added if it is not among them."""
        models = config["models"]
        inputs = [
            self._input(m, f"models[{i}]", base, WHOLE) for i, m in enumerate(read_entries(models, "models"))
        ]
        if base is not None and base not in [entry.reference for entry in inputs]:
            inputs.append(Input(base, WHOLE, {}, "base_model"))
        return self._checked(Slice(tuple(inputs), base, {}, "models"))

    def slices(self, config: Any, base: Reference | None) -> Iterator[Slice]:
        """The slices of layers."""
        for number, entry in enumerate(read_entries(config, "slices")):
            where = f"slices[{number}]"
            check_known(entry, ("sources", "base_model", "parameters", "residual_weight"), where)
            if entry.get("residual_weight") is not None:
                raise ConfigError(f"{where}.residual_weight: mergekit reads it nowhere. Remove it.")
            own = _reference(entry.get("base_model"), f"{where}.base_model") or base
            inputs = tuple(
                self._input(source, f"{where}.sources[{i}]", own, None)
                for i, source in enumerate(read_entries(entry.get("sources"), f"{where}.sources"))
            )
            settings = self.settings(entry.get("parameters"), f"{where}.parameters")
            yield self._checked(Slice(inputs, own, settings, where))

    def _input(
        self, config: Mapping[str, Any], where: str, base: Reference | None, layers: tuple[int, int] | None
    ) -> Input:
        check_known(config, ("model", "parameters", *(() if layers else ("layer_range",))), where)
        reference = _reference(config.get("model"), f"{where}.model")
        if reference is None:
            raise ConfigError(f"{where}: names no 'model'.")
        scopes = (INPUT,) if reference == base and self._method.base != "ignored" else (INPUT, OTHER)
        settings = self.settings(config.get("parameters"), f"{where}.parameters", scopes)
        return Input(reference, layers or _layer_range(config.get("layer_range"), where), settings, where)

    def _checked(self, part: Slice) -> Slice:
        """A slice with its base first, if its inputs are as many as the method takes."""
        references = [entry.reference for entry in part.inputs]
        repeated = next((r for r in references if references.count(r) > 1), None)
        if repeated:
            raise ConfigError(f"{part.where}: {repeated} is there twice. An input is named once.")
        base = part.base if self._method.base != "ignored" else None
        if base is None and self._method.base == "required":
            raise ConfigError(
                f"{part.where}: {self._name} needs a base model. Name it: base_model: ORG/MODEL"
            )
        if base is not None and base not in references:
            raise ConfigError(f"{part.where}: the base model {base} is not among the sources. Add it.")
        others = len(references) - (base is not None)
        self._check_count(part.where, "inputs", len(references), self._method.counts)
        self._check_count(part.where, "inputs beside the base", others, self._method.others)
        return replace(
            part, inputs=tuple(sorted(part.inputs, key=lambda entry: entry.reference != part.base))
        )

    def _check_count(self, where: str, what: str, count: int, limits: tuple[int, int | None]) -> None:
        fewest, most = limits
        if count < fewest or (most is not None and count > most):
            expected = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
            what = what.replace("inputs", "input", 1) if fewest == 1 else what
            raise ConfigError(f"{where}: {self._name} takes {expected} {what}, got {count}.")


def _check_words(config: Mapping[str, Any]) -> None:
    """See that the words of a configuration are known, and say which are left out on purpose."""
    if any(word in config for word in _OF_MIXTURES):
        raise ConfigError(
            "this has words of a mixture of experts (mergekit-moe), whose configuration has a file of its "
            "own, with 'experts' and 'base_model'."
        )
    if config.get("modules") is not None:
        raise ConfigError(
            "modules: parts of a model with settings of their own are not read here. Say them with 'models' "
            "and filters by the names of keys."
        )
    check_known(config, _WORDS, "configuration")
    present = [word for word in _SECTIONS if config.get(word)]
    if len(present) != 1:
        raise ConfigError(f"expected exactly one of 'models' and 'slices', got {present or 'none of them'}.")


def read_entries(config: Any, where: str) -> list[Mapping[str, Any]]:
    """The mappings of a list, of which there is one at least.

    Raises:
        ConfigError: it is not such a list.
    """
    if not isinstance(config, list) or not config or not all(isinstance(e, Mapping) for e in config):
        raise ConfigError(f"{where}: expected a list of mappings, got {brief(config)}.")
    return config


def _reference(config: Any, where: str) -> Reference | None:
    return None if config is None else read_reference(config, where)


def _layer_range(config: Any, where: str) -> tuple[int, int]:
    is_pair = isinstance(config, list) and len(config) == 2
    if not is_pair or not all(map(is_whole, config)):
        raise ConfigError(
            f"{where}.layer_range: expected two whole numbers, the first layer and the one after the last, "
            f"got {brief(config)}."
        )
    first, end = config
    if not 0 <= first < end:
        raise ConfigError(
            f"{where}.layer_range: [{first}, {end}] has no layers. Layers are numbered from 0, and the "
            "second number is larger."
        )
    return first, end


def output_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a configuration says for its output; ConfigError for one that is not known."""
    chosen = None
    for word in ("dtype", "out_dtype"):
        if config.get(word) is not None:
            name = str(config[word]).removeprefix("torch.")
            if name not in _DTYPES:
                raise ConfigError(f"{word}: unknown dtype {config[word]!r}.{did_you_mean(name, _DTYPES)}")
            chosen = name
    return chosen


def _chat_template(config: Any) -> str | None:
    if config is None:
        return None
    if not isinstance(config, str) or (config != AUTO and "{" not in config):
        raise ConfigError(
            f"chat_template: {brief(config)} is a name, and only {AUTO} and templates as text are read here. "
            "Give the text of the template, in Jinja."
        )
    return config
