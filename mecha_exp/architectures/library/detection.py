"""What a file is a checkpoint of, from its keys and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    """What a file is, and how well that fits.

    Attributes:
        config: the config; structural where no known one fits.
        matched: how many of the file's keys belong to it.
        missing: required keys that the file lacks, of components that it has.
        absent: components that it lacks as a whole and that a whole model has.
        extra: keys of the file that the config does not know.
        renamed: keys that the file has under an alias, and the config's names for them.
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
        """Whether nothing that the config requires is missing."""
        return not self.missing and not self.absent


def detect(keys: Keys, configs: Iterable[ModelConfig] | None = None) -> Detection:
    """The config that a file's keys and shapes fit; a structural one where no known config does.

    Args:
        keys: what the file has, such as a header's `tensors`, or a state dict.
        configs: the configs to choose from; all known ones by default.

    Raises:
        ConfigError: several configs fit equally well. `candidates` has them.
    """
    found = candidates(keys, configs)
    if not found:
        return Detection(StructuralConfig(keys), len(keys))
    if len(found) > 1:
        names = ", ".join(f"'{d.config.identifier}'" for d in found)
        raise ConfigError(
            f"the keys ({some(keys, 3)}) fit {len(found)} model configs equally well: {names}. "
            "Say which one is meant."
        )
    return found[0]


def candidates(keys: Keys, configs: Iterable[ModelConfig] | None = None) -> list[Detection]:
    """The configs that fit best: those that explain the most keys, and of these the whole ones if any is."""
    known = plausible_configs(keys) if configs is None else configs
    found = [d for config in known if (d := match(keys, config)) is not None]
    best = max((d.matched for d in found), default=0)
    found = [d for d in found if d.matched == best]
    return [d for d in found if d.is_whole] or found


@dataclass(frozen=True)
class NearMiss:
    """What keeps a file from being of a config that it has most keys of.

    Attributes:
        config: the config.
        other_shape: by key the shape that the file has and the one that the config has.
        missing: required keys that the file lacks, of components that it has.
        extra: keys of the file that the config does not know.
    """

    config: ModelConfig
    other_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


def closest(keys: Keys, configs: Iterable[ModelConfig] | None = None) -> NearMiss | None:
    """For a file that no config fits the one that has most of its keys and shapes, if that is over half."""
    known = get_all() if configs is None else configs
    ranked = ((_alike(keys, fitted), fitted) for fitted in (sized_for(keys, config) for config in known))
    alike, config = max(ranked, key=lambda found: found[0], default=(0, None))
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
    infos = config.keys()
    found = ((infos.get(config.resolve_alias(key)), info) for key, info in keys.items())
    return sum(known is not None and known.shape == tuple(info.shape) for known, info in found)


def match(keys: Keys, config: ModelConfig) -> Detection | None:
    """How a file fits one config, or None where it does not.

    It does where it has at least one of its components, no key of another shape, and not mostly other keys.
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
    """How a file fits a config of LoRA files: where most of its keys are of modules that fit the base."""
    if not is_adapter(keys, config.prefix):
        return None
    shapes = {key: tuple(info.shape) for key, info in keys.items()}
    modules = config.modules(keys)
    matched = sum(len(names) for key, names in modules.items() if not fault_of(config, key, names, shapes))
    extra = tuple(key for key in keys if key not in config.keys())
    return Detection(config, matched, extra=extra) if 2 * matched > len(keys) else None


def sized_for(keys: Keys, config: ModelConfig) -> ModelConfig:
    """A config as it is for a file: the member of a family that has the file's sizes."""
    return config.with_sizes(_find_sizes(keys, config))


def _find_sizes(keys: Keys, config: ModelConfig) -> dict[str, int]:
    """The sizes of a family's member: lengths of shapes, and ranges as long as the file has layers."""
    sizes: dict[str, int] = {}
    patterns = ((part, pattern) for part in config.parts for pattern in part.keys) if config.sizes else ()
    for part, pattern in patterns:
        first = first_in(keys, part.names_of_first(pattern))
        if first is None or len(keys[first].shape) != len(pattern.shape):
            continue
        for name, size in zip(pattern.shape, keys[first].shape, strict=True):
            if isinstance(name, str):
                sizes.setdefault(name, size)
        open_range = next((p for p in pattern.names.pieces if isinstance(p, Range) and p.size), None)
        if open_range and open_range.size not in sizes:
            sizes[str(open_range.size)] = _length(keys, pattern, open_range, first) + open_range.last
    return {name: size for name, size in sizes.items() if name in config.sizes}


def _length(keys: Keys, pattern: KeyPattern, open_range: Range, first: str) -> int:
    """The last number that follows, without a gap, where the open range is in its first name."""
    pieces = pattern.names.pieces
    after = "".join(p if isinstance(p, str) else p.first() for p in pieces[pieces.index(open_range) + 1 :])
    before = first.removesuffix(open_range.first() + after)
    numbered = re.compile(re.escape(before) + r"(\d+)\b")
    numbers = {int(found[1]) for key in keys if (found := numbered.match(key))}
    last = open_range.start
    while last + 1 in numbers:
        last += 1
    return last
