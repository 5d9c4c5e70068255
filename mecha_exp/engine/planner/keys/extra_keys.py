"""Keys of inputs that their model configs do not know: states of an optimiser, counters, leftovers.

A config that describes a family of models (any depth and width: Llama and what is built like it) is also
found for its relatives, whose further keys - the biases of Qwen, the norms of Gemma - are no less part of the
model. So what a file has beside such a config is extra only where the config is declared, or where the caller
wants to know of all of it. It is the same with LoRA files, whose modules may be of more kinds than are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mecha_exp.architectures import AdapterConfig, ModelConfig, candidates, resolve, sized_for
from mecha_exp.engine.report import About, Notice
from mecha_exp.errors import some
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.source import Source, infos_of


@dataclass(frozen=True)
class Extras:
    """The keys of one input that are not in its model config.

    Attributes:
        name: what messages call the input.
        config: what it is: the declared config, or the only one that it fits.
        keys: which are not in that.
    """

    name: str
    config: ModelConfig
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} has {len(self.keys)} keys that are not in its model config "
            f"'{self.config.identifier}': {some(self.keys, 5)}"
        )


def find_extras(sources: Mapping[ModelNode, Source], of_relatives: bool = False) -> dict[ModelNode, Extras]:
    """What each input has beside its model config; an input of no known config has nothing else.

    Args:
        of_relatives: whether that is also told where a family's config was found by the keys.
    """
    known: dict[frozenset[tuple[str, tuple[int, ...]]], ModelConfig | None] = {}
    found: dict[ModelNode, Extras] = {}
    for model, source in sources.items():
        infos = infos_of(source)
        if model.config is not None:
            config: ModelConfig | None = sized_for(infos, resolve(model.config))
        else:
            shapes = frozenset((key, info.shape) for key, info in infos.items())
            if shapes not in known:
                fitting = candidates(infos)
                known[shapes] = fitting[0].config if len(fitting) == 1 else None
            config = known[shapes]
        if config is None or (_is_open(config) and model.config is None and not of_relatives):
            continue
        extra = tuple(key for key in infos if config.resolve_alias(key) not in config.keys())
        if extra:
            found[model] = Extras(source.name, config, extra)
    return found


def _is_open(config: ModelConfig) -> bool:
    """Whether files of it may have more keys that belong to them."""
    return bool(config.sizes) or isinstance(config, AdapterConfig)


def left_out(extras: Mapping[ModelNode, Extras], sources: Mapping[ModelNode, Source]) -> frozenset[str]:
    """The keys that no input has but as an extra one."""
    unknown = {key for extra in extras.values() for key in extra.keys}
    claimed = {
        key
        for model, source in sources.items()
        for key in unknown
        if key in source and (model not in extras or key not in extras[model].keys)
    }
    return frozenset(unknown - claimed)


def notices_of(extras: Iterable[Extras]) -> Iterator[Notice]:
    """A line about each input whose extra keys are left out."""
    for extra in extras:
        text = f"{extra}, and are left out. on_extra=keep merges them like the others."
        yield Notice(text, About.EXTRA_KEYS)


def problems_of(extras: Iterable[Extras]) -> Iterator[str]:
    """What is wrong where such keys are an error."""
    for extra in extras:
        yield f"{extra}. on_extra=skip leaves them out, on_extra=keep merges them like the others."


def converted(models: Sequence[ModelNode], extras: Mapping[ModelNode, Extras]) -> Iterator[Notice]:
    """A line about each input whose extra keys cannot be kept, as it is read as if in another format."""
    for model in models:
        if model in extras:
            text = f"{extras[model]}, and are left out, since it is read in another format"
            yield Notice(text, About.EXTRA_KEYS)
