"""Detection of a file's model config, from its keys and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mecha_exp.architectures.components import Component
from mecha_exp.architectures.config import ModelConfig
from mecha_exp.architectures.keys import HasShape, KeyPattern
from mecha_exp.architectures.library.prefilter import ENOUGH, first_in, is_adapter, starts_like
from mecha_exp.architectures.library.registry import get_all, plausible_configs
from mecha_exp.architectures.lora import AdapterConfig, fault_of
from mecha_exp.architectures.patterns import Range
from mecha_exp.architectures.structural import StructuralConfig
from mecha_exp.errors import ConfigError, some

Keys = Mapping[str, HasShape]


@dataclass(frozen=True)
class Detection:
    """The config of a file, and how well it fits.

    Attributes:
        config: the config; a structural one where no known one fits.
        matched: the number of the file's keys that belong to it.
        missing: required keys that the file lacks, of components that it has.
        absent: required components of which the file has too few keys.
        extra: keys of the file that the config does not know.
        renamed: aliases in the file, with the config's names of their keys.
    """

    config: ModelConfig
    matched: int
    missing: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether a known config fits."""
        return not isinstance(self.config, StructuralConfig)

    @property
    def is_whole(self) -> bool:
        """Whether the file has every required key."""
        return not self.missing and not self.absent


def detect(keys: Keys, configs: Iterable[ModelConfig] | None = None) -> Detection:
    """Detect the config that a file's keys and shapes fit; a structural one where no known config does.

    Args:
        keys: the file's keys with their shapes, such as a header's `tensors`, or a state dict.
        configs: the configs to choose from; all known ones by default.

    Raises:
        ConfigError: several configs fit equally well. `candidates` returns them.
    """
    best = candidates(keys, configs)
    if not best:
        return Detection(StructuralConfig(keys), len(keys))
    if len(best) > 1:
        names = ", ".join(f"'{detection.config.identifier}'" for detection in best)
        raise ConfigError(
            f"the keys ({some(keys, 3)}) fit {len(best)} model configs equally well: {names}. "
            "Say which one is meant."
        )
    return best[0]


def candidates(keys: Keys, configs: Iterable[ModelConfig] | None = None) -> list[Detection]:
    """The configs that match the most keys; of these the complete ones, or else those whose parts are."""
    known = plausible_configs(keys) if configs is None else configs
    detections = [detection for config in known if (detection := match(keys, config)) is not None]
    most = max((detection.matched for detection in detections), default=0)
    best = [detection for detection in detections if detection.matched == most]
    whole = [detection for detection in best if detection.is_whole]
    return whole or [detection for detection in best if not detection.missing] or best


@dataclass(frozen=True)
class NearMiss:
    """The differences between a file and a config that has most of its keys.

    Attributes:
        config: the config.
        other_shape: the shapes in the file and in the config, by key.
        missing: required keys that the file lacks, of components that it has.
        extra: keys of the file that the config does not know.
    """

    config: ModelConfig
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


def closest(keys: Keys) -> NearMiss | None:
    """The config that shares the most keys and shapes with a file that fits none, if over half of them."""
    ranked = ((_alike(keys, fitted), fitted) for fitted in (sized_for(keys, config) for config in get_all()))
    alike, config = max(ranked, key=lambda pair: pair[0], default=(0, None))
    if config is None or 2 * alike <= len(keys):
        return None
    names = {config.resolve_alias(key): key for key in keys}
    infos = config.keys()
    shapes = {
        key: (tuple(keys[own].shape), infos[key].shape)
        for key, own in names.items()
        if key in infos and tuple(keys[own].shape) != infos[key].shape
    }
    missing = [
        key
        for part in config.components().values()
        if names.keys() & part.keys()
        for key, info in part.items()
        if key not in names and not info.optional
    ]
    extra = [own for key, own in names.items() if key not in infos]
    return NearMiss(config, shapes, tuple(missing), tuple(extra))


def _alike(keys: Keys, config: ModelConfig) -> int:
    pairs = ((config.info_of(key), info) for key, info in keys.items())
    return sum(known is not None and known.shape == tuple(info.shape) for known, info in pairs)


def match(keys: Keys, config: ModelConfig) -> Detection | None:
    """Compare a file with one config; None where it does not fit.

    It fits if it has a component, no key of another shape, and over half of its keys in the config.
    """
    if isinstance(config, AdapterConfig):
        return _match_adapter(keys, config)
    parts = [part for part in config.parts if starts_like(keys, part.beginnings)]
    if all(part.optional is True for part in parts):
        return None
    fitted = sized_for(keys, config)
    if 2 * sum(part.count(fitted.sizes) for part in parts) <= len(keys):
        return None
    renamed = {alias: key for alias, key in fitted.aliases().items() if alias in keys and key not in keys}
    present = {renamed.get(key, key): tuple(info.shape) for key, info in keys.items()}
    missing: list[str] = []
    absent: list[str] = []
    matched = 0
    for part in config.parts:
        infos = fitted.components()[part.name]
        shared = infos.keys() & present.keys()
        if any(infos[key].shape != present[key] for key in shared):
            if part.optional is True:
                continue
            return None
        required = [key for key, info in infos.items() if not info.optional]
        lacking = [key for key in required if key not in present]
        if len(lacking) > (1 - ENOUGH) * len(required):
            absent += [] if part.optional is True else [part.name]
        else:
            missing += lacking
            matched += len(shared)
    if 2 * matched <= len(keys) or len(absent) == sum(part.optional is not True for part in config.parts):
        return None
    extra = [key for key in keys if renamed.get(key, key) not in fitted.keys()]
    return Detection(fitted, matched, tuple(missing), tuple(absent), tuple(extra), renamed)


def _match_adapter(keys: Keys, config: AdapterConfig) -> Detection | None:
    """Compare a file with a config of LoRA files: most of its keys must be in modules that fit the base."""
    if not is_adapter(keys, config.beginnings):
        return None
    shapes = {key: tuple(info.shape) for key, info in keys.items()}
    modules = config.modules(keys)
    any_size = bool(config.base.sizes)
    fitting = [names for key, names in modules.items() if not fault_of(config, key, names, shapes, any_size)]
    matched = sum(map(len, fitting))
    known = {name for names in modules.values() for name in names.values()}
    extra = tuple(key for key in keys if key not in known)
    return Detection(config, matched, extra=extra) if 2 * matched > len(keys) else None


def sized_for(keys: Keys, config: ModelConfig) -> ModelConfig:
    """The member of a family of configs that has the sizes of a file."""
    return config.with_sizes(_find_sizes(keys, config))


def _find_sizes(keys: Keys, config: ModelConfig) -> dict[str, int]:
    """The sizes that a file implies: from its shapes, and from its numbers of layers."""
    sizes: dict[str, int] = {}
    patterns = ((part, pattern) for part in config.parts for pattern in part.patterns) if config.sizes else ()
    for part, pattern in patterns:
        first = first_in(keys, part.names_of_first(pattern)) or _any_layer(keys, config, sizes, part, pattern)
        if first is None or len(keys[first].shape) != len(pattern.shape):
            continue
        for name, size in zip(pattern.shape, keys[first].shape, strict=True):
            if isinstance(name, str) and name not in part.sizes:
                sizes.setdefault(name, size)
        open_range = next((p for p in pattern.names.pieces if isinstance(p, Range) and p.size), None)
        if open_range and open_range.size not in {**sizes, **part.sizes}:
            sizes[str(open_range.size)] = _length(keys, pattern, open_range, first) + open_range.last
    return {name: size for name, size in sizes.items() if name in config.sizes}


def _any_layer(
    keys: Keys, config: ModelConfig, sizes: Mapping[str, int], part: Component, pattern: KeyPattern
) -> str | None:
    """The first key of an optional pattern that the file has: not every layer has what is optional."""
    if not pattern.optional or not pattern.names.sizes <= sizes.keys():
        return None
    names = pattern.names.expand({**config.sizes, **sizes})
    return first_in(keys, map(part.full_name, names))


def _length(keys: Keys, pattern: KeyPattern, open_range: Range, first: str) -> int:
    """The last number, without a gap, in the place of the open range."""
    pieces = pattern.names.pieces
    after = "".join(p if isinstance(p, str) else p.first() for p in pieces[pieces.index(open_range) + 1 :])
    before = first.removesuffix(open_range.first() + after)
    numbered = re.compile(re.escape(before) + r"(\d+)\b")
    numbers = {int(match[1]) for key in keys if (match := numbered.match(key))}
    last = open_range.start
    while last + 1 in numbers:
        last += 1
    return last
