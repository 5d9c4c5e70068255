"""What a file is a checkpoint of, from its keys and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mecha_exp.architectures.config import Component, KeyPattern, ModelConfig
from mecha_exp.architectures.patterns import Range
from mecha_exp.architectures.registry import get_all
from mecha_exp.architectures.structural import HasShape, StructuralConfig
from mecha_exp.errors import ConfigError, some

Keys = Mapping[str, HasShape]
ENOUGH = 0.8
"""The share of a component's keys that a file must have for it to be that component with keys missing."""


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
    known = get_all() if configs is None else configs
    found = [d for config in known if (d := match(keys, config)) is not None]
    best = max((d.matched for d in found), default=0)
    found = [d for d in found if d.matched == best]
    return [d for d in found if d.is_whole] or found


def match(keys: Keys, config: ModelConfig) -> Detection | None:
    """How a file fits one config, or None where it does not.

    It does where it has at least one of its components, and no key of another shape.
    """
    if not any(_looks_like(keys, part) for part in config.parts if not part.optional):
        return None
    fitted = config.with_sizes(_find_sizes(keys, config))
    renamed = {alias: key for alias, key in fitted.aliases().items() if alias in keys and key not in keys}
    present = {renamed.get(key, key): tuple(info.shape) for key, info in keys.items()}
    missing: list[str] = []
    absent: list[str] = []
    matched = 0
    for part in config.parts:
        infos = fitted.components()[part.name]
        shared = infos.keys() & present.keys()
        if any(infos[key].shape != present[key] for key in shared):
            return None
        required = [key for key, info in infos.items() if not info.optional]
        lacking = [key for key in required if key not in present]
        if len(lacking) > (1 - ENOUGH) * len(required):
            absent += [] if part.optional else [part.name]
        else:
            missing += lacking
            matched += len(shared)
    if matched == 0 or len(absent) == sum(not part.optional for part in config.parts):
        return None
    extra = [key for key in keys if renamed.get(key, key) not in fitted.keys()]
    return Detection(fitted, matched, tuple(missing), tuple(absent), tuple(extra), renamed)


def _looks_like(keys: Keys, part: Component) -> bool:
    """Whether the file has most of what its patterns begin with: enough to look closer, cheaply."""
    firsts = [(key.names.first(), len(key.shape)) for key in part.keys if not key.optional]
    for prefix in (part.prefix, *part.aliases):
        found = [len(keys[prefix + name].shape) == n for name, n in firsts if prefix + name in keys]
        if found and all(found) and len(found) >= ENOUGH / 2 * len(firsts):
            return True
    return False


def _find_sizes(keys: Keys, config: ModelConfig) -> dict[str, int]:
    """The sizes of a family's member: lengths of shapes, and ranges as long as the file has layers."""
    if not config.sizes:
        return {}
    sizes: dict[str, int] = {}
    for part in config.parts:
        prefix = next(
            (p for p in (part.prefix, *part.aliases) if any(p + k.names.first() in keys for k in part.keys)),
            part.prefix,
        )
        for pattern in part.keys:
            info = keys.get(prefix + pattern.names.first())
            if info is None or len(info.shape) != len(pattern.shape):
                continue
            for name, size in zip(pattern.shape, info.shape, strict=True):
                if isinstance(name, str):
                    sizes.setdefault(name, size)
            sizes |= _find_range(keys, prefix, pattern, sizes)
    return sizes


def _find_range(keys: Keys, prefix: str, pattern: KeyPattern, known: Mapping[str, int]) -> dict[str, int]:
    """The size that the pattern's open range ends at, by counting what follows it in the file."""
    for i, piece in enumerate(pattern.names.pieces):
        if not isinstance(piece, Range) or piece.size is None or piece.size in known:
            continue
        before = prefix + "".join(p if isinstance(p, str) else p.first() for p in pattern.names.pieces[:i])
        numbered = re.compile(re.escape(before) + r"(\d+)\b")
        numbers = {int(found[1]) for key in keys if (found := numbered.match(key))}
        last = piece.start
        while last + 1 in numbers:
            last += 1
        return {piece.size: last + piece.last}
    return {}
