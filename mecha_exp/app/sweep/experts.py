"""Makes points whose experts, or blocks, are factors: each is there or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.app.words.quotes import quoted
from mecha_exp.errors import ConfigError, counted
from mecha_exp.lab import points as lab
from mecha_exp.lab.points import BLOCKS_KEY, EXPERTS_KEY, SUBSET_KEY, Axis, Setting
from mecha_exp.numbers import is_whole

Group = tuple[int, ...]


def expert_points(axes: Sequence[Axis], config: DictConfig) -> list[Setting]:
    """The points of `sweep=leave_one_expert_out`, `experts`, `subsets` and `shapley`.

    Raises:
        ConfigError: the experts or the numbers in the group `sweep` do not allow these points.
    """
    paths, mode = experts_of(config), config.sweep.mode
    names = names_of(paths)
    check_lists(len(paths), config)
    groups = _GROUPS[mode](names, config)
    points = [subset_point(group, names, paths) for group in groups]
    if mode == "leave_one_expert_out":
        absent = [None, *reversed(names)]
        points = [{**({f"++{lab.EXPERT}": n} if n else {}), **p} for n, p in zip(absent, points, strict=True)]
    return [{**other, **point} for other in lab.grid(axes, mode) for point in points]


def block_coalitions(axes: Sequence[Axis], blocks: Sequence[str], mode: str) -> list[Setting]:
    """The points of `sweep=shapley` over blocks: each coalition has the others at strength 0."""
    from mecha_exp.verdict.why import coalitions  # which needs numpy

    points = []
    for coalition in coalitions(blocks):
        members = [block for block in blocks if block in coalition]
        absent = {f"++blocks.{block}": "0" for block in blocks if block not in coalition}
        points.append({f"++{BLOCKS_KEY}": lab.as_text(members), **absent})
    return [{**other, **point} for other in lab.grid(axes, mode) for point in points]


def experts_of(config: DictConfig) -> list[str]:
    """The experts of a configuration, two at least.

    Raises:
        ConfigError: there are fewer, or one is listed twice.
    """
    listed = config.models.get("experts")
    paths = resolved(listed) if OmegaConf.is_list(listed) else []
    if len(paths) < 2:
        raise ConfigError(
            f"sweep={config.sweep.mode} leaves experts out, and models.experts lists {len(paths)}: give two "
            "or more."
        )
    check_distinct_experts(paths, config.sweep.mode)
    return [str(path) for path in paths]


def check_distinct_experts(paths: Sequence[str], mode: str) -> None:
    """Check that no expert is listed twice.

    Raises:
        ConfigError: one is.
    """
    again = next((path for i, path in enumerate(paths) if path in paths[:i]), None)
    if again is not None:
        raise ConfigError(f"sweep={mode}: models.experts lists {again} twice.")


def subset_point(group: Group, names: Sequence[str], paths: Sequence[str]) -> Setting:
    """The point that merges the experts at these places."""
    return {
        f"++{SUBSET_KEY}": lab.as_text([names[i] for i in group]),
        EXPERTS_KEY: lab.as_text([quoted(paths[i]) for i in group]),
    }


def check_lists(count: int, config: DictConfig) -> None:
    """Refuse a list with a value for each expert, whose values would go to other experts.

    Raises:
        ConfigError: a hyperparameter is such a list.
    """
    for key in config:
        if key in config.hydra.runtime.choices or key in ("hydra", "plugins"):
            continue
        value = OmegaConf.select(config, str(key))
        if OmegaConf.is_list(value) and len(value) == count:
            raise ConfigError(
                f"{key!s} lists a value for each of {count} experts, and sweep={config.sweep.mode} leaves "
                "experts out. Give one value for all."
            )


def _one_left_out(names: Sequence[str], config: DictConfig) -> list[Group]:
    """All experts, then all but the last, and so on to all but the first."""
    return [tuple(range(len(names))), *_of_size(len(names), len(names) - 1)]


def _all_of_a_size(names: Sequence[str], config: DictConfig) -> list[Group]:
    size = config.sweep.get("size")
    _check_size("sweep.size", size, len(names))
    return _of_size(len(names), size)


def _drawn(names: Sequence[str], config: DictConfig) -> list[Group]:
    sizes, n, seed = config.sweep.get("sizes"), config.sweep.get("n"), config.sweep.get("seed", 0)
    if not OmegaConf.is_list(sizes) or not sizes or len(set(sizes)) < len(sizes):
        raise ConfigError(
            f"sweep.sizes={sizes}: expected a list of different sizes, as in sweep.sizes=[2,4]."
        )
    for size in sizes:
        _check_size("sweep.sizes", size, len(names))
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"sweep.n={n}: expected how many subsets of each size to draw, 1 or more.")
    return [group for size in sizes for group in lab.subsets_at_random(len(names), size, n, seed)]


def _coalitions(names: Sequence[str], config: DictConfig) -> list[Group]:
    """The coalitions that are not empty: the empty one is the base, which is measured anyway."""
    from mecha_exp.verdict.why import coalitions  # which needs numpy

    place = {name: i for i, name in enumerate(names)}
    return [tuple(sorted(place[name] for name in group)) for group in coalitions(names) if group]


def _of_size(count: int, size: int) -> list[Group]:
    return lab.subsets_at_random(count, size, math.comb(count, size), 0)


def _check_size(key: str, size: object, count: int) -> None:
    if not is_whole(size, least=1) or size > count:
        raise ConfigError(
            f"{key}={size}: there {'is' if count == 1 else 'are'} {counted(count, 'expert')}, so a subset "
            f"has 1 to {count} of them."
        )


_GROUPS: Mapping[str, Callable[[Sequence[str], DictConfig], list[Group]]] = {
    "leave_one_expert_out": _one_left_out,
    "experts": _all_of_a_size,
    "subsets": _drawn,
    "shapley": _coalitions,
}
MODES = tuple(_GROUPS)
