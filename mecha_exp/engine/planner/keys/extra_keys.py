"""Keys of inputs that their model configs do not know: states of an optimiser, counters, leftovers.

A config that describes a family of models (any depth and width, such as Llama) also fits relatives with
further keys: the biases of Qwen, the norms of Gemma. Those keys belong to the model. So keys beside such a
config count as extra only if the config is declared, or with `on_extra=error`. The same holds for LoRA files,
which may have modules of unknown kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mecha_exp.architectures import AdapterConfig, ModelConfig, resolve, sized_for
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.report import About, Notice
from mecha_exp.errors import CheckpointError, Problems, counted, some
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.inputs import Sources
from mecha_exp.sources.source import infos_of


@dataclass(frozen=True)
class ExtraKeys:
    """The keys of one input that are not in its model config.

    Attributes:
        name: the name of the input in messages.
        config: the declared config of the input, or the only one that it fits.
        keys: the keys of the input that are not in the config.
    """

    name: str
    config: ModelConfig
    keys: tuple[str, ...]

    def __str__(self) -> str:
        count = counted(len(self.keys), "key that is", "keys that are")
        return (
            f"{self.name} has {count} not in its model config "
            f"'{self.config.identifier}': {some(self.keys, 5)}"
        )


def drop_extra_keys(
    opened: Sources, views: Sources, configs: ConfigInference, options: EngineOptions
) -> tuple[frozenset[str], list[Notice]]:
    """The extra keys that are left out of the outputs, and notices about them.

    Args:
        opened: the inputs as they are stored.
        views: the inputs as they are read, some of them in another format.
        configs: infers the configs of the opened inputs.

    Raises:
        CheckpointError: there are extra keys, and `on_extra` is "error".
    """
    extras = find_extra_keys(opened, configs, of_relatives=options.on_extra == "error")
    if options.on_extra == "keep":
        converted = (extra for model, extra in extras.items() if views[model] is not opened[model])
        return frozenset(), list(_notices(converted, "since it is read in another format"))
    if options.on_extra == "error":
        problems = Problems()
        for extra in extras.values():
            problems.add(
                f"{extra}. on_extra=skip leaves them out, on_extra=keep merges them like the others."
            )
        problems.raise_as(CheckpointError)
    return _unclaimed(extras, opened), list(_notices(extras.values()))


def find_extra_keys(
    sources: Sources, configs: ConfigInference, of_relatives: bool = False
) -> dict[ModelNode, ExtraKeys]:
    """The extra keys of each input that has some; an input of no known config has none.

    Args:
        of_relatives: whether keys beside a family's config count although the config is not declared.
    """
    extras: dict[ModelNode, ExtraKeys] = {}
    for model, source in sources.items():
        if model.config is not None:
            config: ModelConfig | None = sized_for(infos_of(source), resolve(model.config))
        else:
            config = configs.only_fit(model)
        if config is None or (_is_open(config) and model.config is None and not of_relatives):
            continue
        keys = tuple(key for key in source.keys() if config.info_of(key) is None)
        if keys:
            extras[model] = ExtraKeys(source.name, config, keys)
    return extras


def _is_open(config: ModelConfig) -> bool:
    """Whether models of a config may have further keys that belong to them."""
    return bool(config.sizes) or isinstance(config, AdapterConfig)


def _unclaimed(extras: Mapping[ModelNode, ExtraKeys], sources: Sources) -> frozenset[str]:
    """The keys that are extra in every input that has them."""
    unknown = {key for extra in extras.values() for key in extra.keys}
    claimed = {
        key
        for model, source in sources.items()
        for key in unknown
        if key in source and (model not in extras or key not in extras[model].keys)
    }
    return frozenset(unknown - claimed)


def _notices(extras: Iterable[ExtraKeys], why: str = "") -> Iterator[Notice]:
    """A notice for each input whose extra keys are left out."""
    end = f", {why}" if why else ". on_extra=keep merges them like the others."
    return (Notice(f"{extra}, and are left out{end}", About.EXTRA_KEYS) for extra in extras)
