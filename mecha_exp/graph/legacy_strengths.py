"""Strengths by component, block and class of a model config, in the words of sd-mecha's older releases.

`default(config, component, value) | blocks(config, component, in2=0.75)` is a hyperparameter wherever a
mapping is one, and means what `dict sd1_txt_default=0.33 sd1_txt_block_in2=0.75` means in a recipe of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mecha_exp.architectures import ModelConfig, resolve
from mecha_exp.errors import RecipeError, counted, did_you_mean
from mecha_exp.graph.by_key import REGULAR, ByKey


class Part(NamedTuple):
    """The target of a strength: a component of a config, or one of its blocks or classes."""

    config: str
    component: str
    kind: str = "default"
    name: str = ""


@dataclass(frozen=True)
class Strengths:
    """Strengths of parts of models; all other parts have strength 0.

    `a | b` has the strengths of both, and those of b for parts that both name.

    Attributes:
        values: the strength of each part.
    """

    values: Mapping[Part, float]

    def __or__(self, other: Strengths) -> Strengths:
        return Strengths({**self.values, **other.values})

    @property
    def config(self) -> str | None:
        """The model config whose parts are named; None for older names, which stand for prefixes of keys.

        Raises:
            RecipeError: parts of several configs.
        """
        named = dict.fromkeys(part.config for part in self.values if part.config not in _OLD_CONFIGS)
        if len(named) > 1:
            raise RecipeError(f"strengths of several model configs in one: {', '.join(named)}")
        return next(iter(named), None)

    def by_key(self) -> ByKey:
        """The strengths by selector; keys that several blocks share have the mean of their strengths.

        Raises:
            RecipeError: a component, block or class that the config does not have.
        """
        by_selector: dict[str, list[float]] = {}
        for part, value in self.values.items():
            for selector in _selectors(part):
                by_selector.setdefault(selector, []).append(value)
        means = {selector: v[0] if len(v) == 1 else sum(v) / len(v) for selector, v in by_selector.items()}
        return ByKey(tuple(sorted(means.items())), 0)


def default(
    config: str | ModelConfig, component: str | Sequence[str] | None = None, value: float = 0
) -> Strengths:
    """One strength for whole components.

    Args:
        config: a model config, its identifier, or an architecture as older releases call it: sd1, sdxl.
        component: one of the config's, or several; None is all of them. Those of sd1 and sdxl are also
            called txt, txt2 and unet.
        value: the strength.

    Raises:
        ConfigError: there is no such config.
        RecipeError: it has no such component.

    >>> alpha = default("sd1", "txt", 0.33) | blocks("sd1", "txt", in2=0.75)
    """
    name = _name(config)
    names = [component] if isinstance(component, str) else component
    components = names or list(_OLD_CONFIGS.get(name) or resolve(name).components())
    return _checked({Part(name, component): value for component in components})


def blocks(
    config: str | ModelConfig, component: str, *values: float, strict: bool = True, **by_name: float
) -> Strengths:
    """Strengths of the blocks of a component.

    Args:
        config, component: as `default` has them.
        values: of all blocks, in the order of the model.
        strict: whether there must be as many values as blocks; otherwise the last blocks go without.
        by_name: of the named blocks, instead of values in order.

    Raises:
        ConfigError: there is no such config.
        RecipeError: it has no such component or block; or there are too many or too few values.
    """
    name = _name(config)
    if values and by_name:
        raise RecipeError("blocks: give the values in order or by name, not both")
    if values:
        names = _blocks_of(name, component)
        if len(values) > len(names) or (strict and len(values) < len(names)):
            raise RecipeError(
                f"blocks: {counted(len(values), 'value')} for the {len(names)} blocks of '{component}' of "
                f"'{name}' ({names[0]} to {names[-1]}). Name those that are meant: {names[0]}=0.5."
            )
        by_name = dict(zip(names, values, strict=False))
    return _checked({Part(name, component, "block", block): value for block, value in by_name.items()})


def classes(config: str | ModelConfig, component: str, **by_name: float) -> Strengths:
    """Strengths of the layers of a component that have a name in common, such as `attn1` or `mlp_fc1`.

    Args:
        config, component: as `default` has them.
        by_name: of each name, where `_` also stands for a dot: `mlp_fc1` is `*.mlp.fc1.*`. A class and a
            block that share keys must agree on them.

    Raises:
        ConfigError: there is no such config.
        RecipeError: it has no such component, or no layers of that name.
    """
    name = _name(config)
    return _checked({Part(name, component, "class", word): value for word, value in by_name.items()})


def part_of_word(word: str) -> Part:
    """The part that a word of an older recipe names: `sd1_txt_default`, `sd1_unet_block_in3`."""
    match = _WORD.fullmatch(word)
    if match is None or match["arch"] not in _OLD_CONFIGS:
        raise RecipeError(
            f"'{word}' cannot be read from the old format. Expected <architecture>_<component>_default, "
            f"..._block_<block> or ..._class_<class> of one of {', '.join(_COMPONENTS)}."
        )
    named = (match["kind"], match["name"]) if match["name"] else ()
    return Part(match["arch"], match["component"], *named)


_WORD = re.compile(
    r"(?P<arch>[a-z0-9]+)_(?P<component>[a-z0-9]+)_(?:default|(?P<kind>block|class)_(?P<name>\w+))"
)


def _numbered(names: str, layers: str, count: int, **more: str) -> dict[str, list[str]]:
    """Blocks of one layer each, with further layers of some of them."""
    blocks = {f"{names}{i}": [f"{layers}.{i}"] for i in range(count)}
    return {block: [*parts, *more.get(block, "").split()] for block, parts in blocks.items()}


def _unet(count: int) -> dict[str, list[str]]:
    """Down, middle and up; `time_embed` belongs to all blocks but those that have no residual layer."""
    blocks = {
        **_numbered("in", "input_blocks", count),
        "mid": ["middle_block"],
        **_numbered("out", "output_blocks", count, **{f"out{count - 1}": "out"}),
    }
    without = {"in0", "in3", "in6", "in9"}
    return {block: parts if block in without else [*parts, "time_embed"] for block, parts in blocks.items()}


_CLIP_L = _numbered("in", "encoder.layers", 12, in0="embeddings", in11="final_layer_norm")
_CLIP_G = _numbered(
    "in",
    "transformer.resblocks",
    32,
    in0="positional_embedding token_embedding",
    in31="ln_final text_projection logit_scale",
)
_COMPONENTS = {
    "sd1": {
        "txt": ("cond_stage_model.transformer.text_model", _CLIP_L),
        "unet": ("model.diffusion_model", _unet(12)),
    },
    "sdxl": {
        "txt": ("conditioner.embedders.0.transformer.text_model", _CLIP_L),
        "txt2": ("conditioner.embedders.1.model", _CLIP_G),
        "unet": ("model.diffusion_model", _unet(9)),
    },
}
"""The components of older releases: the prefix of their keys, and the layers of their blocks."""

_TODAY = {"sd1": "sd1-ldm", "sdxl": "sdxl-sgm"}
_OLD_CONFIGS = {old: _COMPONENTS[arch] for arch, today in _TODAY.items() for old in (arch, f"{today}-base")}
"""The configs with the names that only older releases have."""


def _name(config: str | ModelConfig) -> str:
    return config if isinstance(config, str) else config.identifier


def _config(name: str) -> ModelConfig:
    return resolve(_TODAY[name.partition("-")[0]] if name in _OLD_CONFIGS else name)


def _old_component(config: str, component: str) -> tuple[str, Mapping[str, Sequence[str]]] | None:
    """A component of an older release, also of a config by today's name; None for one of today's."""
    components = _OLD_CONFIGS.get(config) or _OLD_CONFIGS.get(f"{config}-base") or {}
    if component in components:
        return components[component]
    names = [*components, *([] if config in _OLD_CONFIGS else _config(config).components())]
    if component not in names:
        raise RecipeError(f"'{config}' has no component '{component}'.{did_you_mean(component, names)}")
    return None


def _blocks_of(config: str, component: str) -> list[str]:
    if old := _old_component(config, component):
        return list(old[1])
    model_config = _config(config)
    blocks = {model_config.block_of(key) for key in model_config.components()[component]}
    return [block for block in model_config.blocks() if block in blocks]


def _checked(values: Mapping[Part, float]) -> Strengths:
    for part in values:
        _selectors(part)
    return Strengths(values)


def _selectors(part: Part) -> Sequence[str]:
    """The selectors that hold exactly the keys of a part."""
    old = _old_component(part.config, part.component)
    if part.kind == "default":
        return [old[0] if old else part.component]
    if part.kind == "class":
        return _of_class(part, old[0] if old else None)
    blocks = _blocks_of(part.config, part.component)
    if part.name not in blocks:
        raise RecipeError(
            f"'{part.component}' of '{part.config}' has no block '{part.name}'."
            f"{did_you_mean(part.name, blocks)}"
        )
    if old:
        return [f"{old[0]}.{below}" for below in old[1][part.name]]
    config = _config(part.config)
    keys = [key for key in config.components()[part.component] if config.block_of(key) == part.name]
    elsewhere = any(config.block_of(key) == part.name for key in config.keys().keys() - set(keys))
    return keys if elsewhere else [part.name]


def _of_class(part: Part, prefix: str | None) -> Sequence[str]:
    begin = rf"^{re.escape(prefix)}\.(.*\.)?" if prefix else r"(^|\.)"
    pattern = begin + re.escape(part.name).replace("_", "[._]") + r"(\.|$)"
    config = _config(part.config)
    holding = [key for key in config.keys() if re.search(pattern, key)]
    keys = holding if prefix else [k for k in holding if config.component_of(k) == part.component]
    if not keys:
        raise RecipeError(f"no layer of '{part.component}' of '{part.config}' is named '{part.name}'")
    return [REGULAR + pattern] if len(keys) == len(holding) else keys
