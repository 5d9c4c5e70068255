"""Reads the format of mergekit's configurations: what is merged with what, by which method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean
from mecha_exp.mergekit.methods import IGNORED, METHODS, NO_EFFECT, REQUIRED, SHARED, Method
from mecha_exp.mergekit.references import Reference, read_reference
from mecha_exp.mergekit.settings import (
    FLAG,
    Settings,
    check_known,
    output_dtype,
    read_each,
    read_entries,
    read_settings,
)
from mecha_exp.mergekit.tokenizer_settings import TokenizerSettings, read_chat_template, read_tokenizer
from mecha_exp.numbers import is_whole

WHOLE = (0, -1)
"""The layers of a model that is merged as a whole."""

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
_OF_SLICE = ("sources", "base_model", "parameters", "residual_weight")
_OF_MIXTURES = ("experts", "gate_mode", "experts_per_token")


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
        module: the module of the models that it is for; None for whole models.
    """

    inputs: tuple[Input, ...]
    base: Reference | None
    settings: Settings
    where: str
    module: str | None = None


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
        notes: what has no effect, in sentences.
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
    notes: tuple[str, ...] = ()

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
        ConfigError: all unknown words, methods and values, a missing base model, and what is not supported.
    """
    _refuse_mixture(config)
    problems = Problems()
    with problems.collected(ConfigError):
        section = next((word for word in _SECTIONS if config.get(word)), _SECTIONS[0])
        _check_words(config, _WORDS, ("merge_method", section), "configuration", problems)
        reader = _Reader(config, problems)
        settings = reader.settings(config.get("parameters"), "parameters")
        slices = reader.slices()
    with problems.collected(ConfigError):
        base = _reference(config.get("base_model"), "base_model")
    with problems.collected(ConfigError):
        dtype = output_dtype(config)
    with problems.collected(ConfigError):
        tokenizer = read_tokenizer(config)
    with problems.collected(ConfigError):
        template = read_chat_template(config.get("chat_template"))
    problems.raise_as(ConfigError)
    name, method, is_sliced = reader.name, reader.method, section == "slices"
    notes = tuple(reader.notes)
    return Configuration(name, method, slices, is_sliced, settings, dtype, tokenizer, template, base, notes)


class _Reader:
    """Reads the parts of a configuration that depend on its merge method.

    What hinders nothing else, such as a parameter that cannot be read, is added to the problems and left out.
    What has no effect in mergekit and is often there, a parameter of the base, is left out with a note.
    """

    def __init__(self, config: Mapping[str, Any], problems: Problems) -> None:
        name = config.get("merge_method")
        if not isinstance(name, str) or name not in METHODS:
            raise ConfigError(f"merge_method: unknown method {name!r}.{did_you_mean(str(name), METHODS)}")
        self.name = name
        self.method: Method = METHODS[name]
        self.notes: list[str] = []
        self._config = config
        self._problems = problems

    def settings(self, config: Any, where: str, *, of_input: bool = False) -> Settings:
        """A section of parameters; those with one value for all have no meaning for a single input."""
        is_mapping = isinstance(config, Mapping)
        if is_mapping and (names := [name for name in config if name in self.method.without_effect]):
            self.notes.append(
                f"{where}: {self.name} makes nothing sparse and ignores {', '.join(names)}, as mergekit does."
            )
            config = {name: value for name, value in config.items() if name not in names}
        for name in config if of_input and is_mapping else ():
            if name in self.method.parameters and self.method.parameters[name].scope == SHARED:
                self._problems.add(
                    f"{where}.{name}: {self.name} has one value for all inputs, and mergekit would ignore "
                    "this one. Move it to the parameters of the whole, or remove it."
                )
        kinds = {name: p.kind for name, p in self.method.parameters.items()}
        with self._problems.collected(ConfigError):
            return read_settings(config, {**kinds, NO_EFFECT: FLAG}, where, self.name)
        return {}

    def slices(self) -> tuple[Slice, ...]:
        """The one slice of whole models, or those of their modules, or the slices of layers."""
        section = _section(self._config)
        if section == "models":
            return (self._whole(self._config, ""),)
        if section == "modules":
            return tuple(read_each(lambda entry: self._module(*entry), self._modules().items()))
        entries = enumerate(read_entries(self._config["slices"], "slices"))
        return tuple(read_each(lambda entry: self._layers(entry[1], f"slices[{entry[0]}]"), entries))

    def _whole(
        self,
        config: Mapping[str, Any],
        prefix: str,
        settings: Settings | None = None,
        module: str | None = None,
    ) -> Slice:
        """The slice of whole models or of a module; the base is added if it is not among them."""
        base, inputs = self._models(config, prefix, "models", WHOLE)
        if base is not None and base not in [entry.reference for entry in inputs]:
            inputs.append(Input(base, WHOLE, {}, "base_model"))
        return self._checked(Slice(tuple(inputs), base, settings or {}, f"{prefix}models", module))

    def _modules(self) -> Mapping[str, Any]:
        modules = self._config["modules"]
        if not isinstance(modules, Mapping) or not all(isinstance(name, str) for name in modules):
            raise ConfigError(f"modules: expected models and parameters by module, got {brief(modules)}.")
        return modules

    def _module(self, name: str, config: Any) -> Slice:
        """The slice of one module of the models."""
        where = f"modules.{name}"
        if not isinstance(config, Mapping):
            raise ConfigError(f"{where}: expected 'models', got {brief(config)}.")
        if config.get("slices"):
            raise ConfigError(
                f"{where}.slices: layers of a single module are not read here. Give the module its 'models'; "
                "a gradient gives each layer its own value."
            )
        _check_words(config, ("models", "slices", "parameters"), ("models",), where, self._problems)
        settings = self.settings(config.get("parameters"), f"{where}.parameters")
        return self._whole(config, f"{where}.", settings, name)

    def _layers(self, config: Mapping[str, Any], where: str) -> Slice:
        _check_words(config, _OF_SLICE, ("sources",), where, self._problems)
        if config.get("residual_weight") is not None:
            self._problems.add(f"{where}.residual_weight: mergekit reads it nowhere. Remove it.")
        settings = self.settings(config.get("parameters"), f"{where}.parameters")
        base, inputs = self._models(config, f"{where}.", "sources", None)
        return self._checked(Slice(tuple(inputs), base, settings, where))

    def _models(
        self, config: Mapping[str, Any], prefix: str, word: str, layers: tuple[int, int] | None
    ) -> tuple[Reference | None, list[Input]]:
        """The base and the inputs of a slice; ConfigError for all that cannot be read."""
        problems = Problems()
        base: Reference | None = None
        with problems.collected(ConfigError):
            base = _reference(config.get("base_model"), f"{prefix}base_model")
            base = base or _reference(self._config.get("base_model"), "base_model")
        with problems.collected(ConfigError):
            inputs = read_each(
                lambda entry: self._input(entry[1], f"{prefix}{word}[{entry[0]}]", base, layers),
                enumerate(read_entries(config.get(word), f"{prefix}{word}")),
            )
        problems.raise_as(ConfigError)
        return base, inputs

    def _input(
        self, config: Mapping[str, Any], where: str, base: Reference | None, layers: tuple[int, int] | None
    ) -> Input:
        needed = ("model",) if layers else ("model", "layer_range")
        _check_words(config, ("parameters", *needed), needed, where, self._problems)
        problems = Problems()
        reference: Reference | None = None
        with problems.collected(ConfigError):
            reference = _model(config, where)
        is_base = reference is not None and reference == base and self.method.base != IGNORED
        settings = self._of_base(config.get("parameters"), f"{where}.parameters") if is_base else {}
        if not is_base:
            settings = self.settings(config.get("parameters"), f"{where}.parameters", of_input=True)
        with problems.collected(ConfigError):
            layers = layers or _layer_range(config.get("layer_range"), where)
        problems.raise_as(ConfigError)
        assert reference is not None and layers is not None
        return Input(reference, layers, settings, where)

    def _of_base(self, config: Any, where: str) -> Settings:
        """The parameters of the base, of which methods with a base have none: each other one is noted."""
        if isinstance(config, Mapping) and (names := [str(name) for name in config if name != NO_EFFECT]):
            self.notes.append(
                f"{where}: {self.name} has no parameters of the base model, and ignores {', '.join(names)}, "
                "as mergekit does."
            )
        return {}

    def _checked(self, part: Slice) -> Slice:
        """A slice with its base first, if its inputs are as many as the method takes."""
        references = [entry.reference for entry in part.inputs]
        repeated = next((r for r in references if references.count(r) > 1), None)
        if repeated:
            raise ConfigError(f"{part.where}: {repeated} is there twice. An input is named once.")
        base = part.base if self.method.base != IGNORED else None
        if base is None and self.method.base == REQUIRED:
            raise ConfigError(f"{part.where}: {self.name} needs a base model. Name it: base_model: ORG/MODEL")
        if base is not None and base not in references:
            raise ConfigError(f"{part.where}: the base model {base} is not among the sources. Add it.")
        others = len(references) - (base is not None)
        self._check_count(part.where, "inputs", len(references), self.method.counts)
        self._check_count(part.where, "inputs beside the base", others, self.method.others)
        return replace(
            part, inputs=tuple(sorted(part.inputs, key=lambda entry: entry.reference != part.base))
        )

    def _check_count(self, where: str, what: str, count: int, limits: tuple[int, int | None]) -> None:
        fewest, most = limits
        if count < fewest or (most is not None and count > most):
            expected = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
            what = what.replace("inputs", "input", 1) if fewest == 1 else what
            raise ConfigError(f"{where}: {self.name} takes {expected} {what}, got {count}.")


def _refuse_mixture(config: Mapping[str, Any]) -> None:
    if any(word in config for word in _OF_MIXTURES):
        raise ConfigError(
            "this has words of a mixture of experts (mergekit-moe), whose configuration has a file of its "
            "own, with 'experts' and 'base_model'."
        )


def _check_words(
    config: Mapping[str, Any], known: Iterable[str], needed: Iterable[str], where: str, problems: Problems
) -> None:
    """Add unknown words to the problems; raise them where they may stand for a needed word that is absent."""
    is_complete = all(word in config for word in needed)
    with problems.collected(ConfigError) if is_complete else nullcontext():
        check_known(config, known, where)


def _section(config: Mapping[str, Any]) -> str:
    """Which of the sections says what is merged."""
    present = [word for word in _SECTIONS if config.get(word)]
    if len(present) != 1:
        raise ConfigError(
            f"expected exactly one of 'models', 'slices' and 'modules', got {present or 'none of them'}."
        )
    return present[0]


def _reference(config: Any, where: str) -> Reference | None:
    return None if config is None else read_reference(config, where)


def _model(config: Mapping[str, Any], where: str) -> Reference:
    if config.get("model") is None:
        raise ConfigError(f"{where}: names no 'model'.")
    return read_reference(config["model"], f"{where}.model")


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
