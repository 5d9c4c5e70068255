"""Makes the points of a sweep from its command line and the mode of the group `sweep`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.sweep.experts import MODES as EXPERT_MODES
from mecha_exp.app.sweep.experts import block_coalitions, expert_points
from mecha_exp.app.sweep.hyperparameters import RecipeFile, drop_unused, recipe_of
from mecha_exp.app.sweep.replicates import replicate
from mecha_exp.app.words.plain_data import as_written, resolved
from mecha_exp.app.words.quotes import parse, quoted
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.lab import points as lab
from mecha_exp.lab.points import EXPERT, EXPERTS_KEY, SUBSET_KEY, Axis, Setting

_LONGEST_NAME = 120
"""Characters of the name of a point's own folder, which file systems limit to 255 bytes."""
PARTS = ("block", "layer", "component")
CONVENTION = "convention"
"""The key of `blocks` that is not a strength: the naming convention of the blocks."""
_STRENGTH = re.compile(r"'default': '(?P<reference>\$\{\w+\})', 'blocks': '\$\{blocks\}'")


@dataclass(frozen=True)
class Points:
    """The points of a sweep.

    Attributes:
        swept: the keys that differ.
        fixed: overrides that all points have.
        settings: what each point sets beside them.
        own: keys that are hyperparameters of some of several recipes.
        left_out: keys with the recipes that have none, whose points go without.
        notes: remarks for the plan and the table.
    """

    swept: list[str]
    fixed: list[str]
    settings: list[Setting]
    own: frozenset[str] = frozenset()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def words(self) -> list[list[str]]:
        """The overrides of each point."""
        return [self.words_of(setting) for setting in self.settings]

    def words_of(self, setting: Setting) -> list[str]:
        """The overrides of a point, from what it sets; `output.path=merged/` is a folder of its own there."""
        name = ",".join(f"{key}={setting[key]}" for key in self.swept if key in setting)
        fixed = [_with_own_folder(word, name) if name else word for word in self.fixed]
        return [*fixed, *(f"{key}={text}" for key, text in setting.items())]


def _with_own_folder(word: str, name: str) -> str:
    """An override of a point; `output.path=sw/` is its own folder `sw/alpha=0.3`."""
    if not word.startswith("output.path="):
        return word
    override = parse(word)
    path = str(override.value()) if override is not None and not override.is_sweep_override() else ""
    if not path.endswith("/") or "${" in path:
        return word
    safe = re.sub(r"[^\w.,=+-]+", "_", name)
    if len(safe) > _LONGEST_NAME:
        safe = f"{safe[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"output.path={quoted(path + safe)}"


def points_of(overrides: Sequence[Override], config: DictConfig) -> Points:
    """The points of a sweep.

    Args:
        overrides: of the command line.
        config: with its groups chosen, and the default of each key that is varied.

    Raises:
        ConfigError: a mode that cannot make points of this.
    """
    axes = [axis_of(o) for o in overrides if o.is_sweep_override()]
    fixed = [o for o in overrides if not o.is_sweep_override()]
    settings = config.sweep
    mode = _MODES.get(settings.mode)
    if mode is None:
        raise ConfigError(
            f"sweep.mode={settings.mode}: there is no such mode.{did_you_mean(settings.mode, _MODES)}"
        )
    candidates = mode(axes, config)
    candidates = lab.unique(replicate(candidates, config, fixed))
    listed = {axis.key for axis in axes}
    keys = dict.fromkeys(key for setting in candidates for key in setting)
    shown = [key for key in keys if key in listed or not _is_implied(key, keys)]
    swept = [key for key in shown if len({s.get(key) for s in candidates}) > 1]
    swept = [key.lstrip("+") for key in swept] or [key.lstrip("+") for key in keys]
    if len({recipe_of(setting, config) for setting in candidates}) < 2:
        return Points(swept, _lines(fixed), lab.shared(candidates, settings.share))
    fitted = drop_unused(candidates, fixed, list(listed), config)
    points = lab.shared(lab.unique(fitted.settings), settings.share)
    return Points(swept, _lines(fitted.fixed), points, fitted.own, fitted.left_out, fitted.meanings)


def _is_implied(key: str, keys: Collection[str]) -> bool:
    """Whether another key of a point says what this one sets: a block, an expert, the number of a set."""
    by_expert = key == f"++{SUBSET_KEY}" and f"++{EXPERT}" in keys
    return key.startswith("++blocks.") or key == EXPERTS_KEY or by_expert


def _lines(overrides: Sequence[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def axis_of(override: Override) -> Axis:
    """The axis of an override with several values.

    Raises:
        ConfigError: a range without two ascending bounds, or without a value.
    """
    key = override.get_key_element()
    if override.is_discrete_sweep():
        texts = map(lab.normalized, override.sweep_string_iterator())
        values = tuple(text for text in texts if not _is_stop(text, override))
        if not values:
            raise ConfigError(
                f"{override.input_line}: the range is empty. It has a start, an end and a step: range(1,9,2)."
            )
        return Axis(key, values)
    value = override.value()
    assert isinstance(value, IntervalSweep) and value.start is not None and value.end is not None
    is_integer = isinstance(value.start, int) and isinstance(value.end, int)  # int(interval(1,8))
    axis = Axis(key, (), float(value.start), float(value.end), "log" in value.tags, is_integer)
    if axis.low >= axis.high:
        raise ConfigError(f"{override.input_line}: the first bound is the smaller one: interval(0,1.5).")
    if axis.logarithmic and axis.low <= 0:
        raise ConfigError(f"{override.input_line}: the bounds of a logarithmic interval are above 0.")
    return axis


def _is_stop(text: str, override: Override) -> bool:
    """Whether a value is the end of its range: Hydra's sums give 1.0999999999999999 instead of 1.1."""
    value = override.value()
    return isinstance(value, RangeSweep) and value.stop is not None and float(text) == float(value.stop)


def _sampled(axes: Sequence[Axis], config: DictConfig, draw: Callable[..., list[Setting]]) -> list[Setting]:
    count, seed = config.sweep.get("n"), config.sweep.get("seed", 0)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"sweep.n={count}: expected how many points to draw, 1 or more.")
    if not axes:
        raise ConfigError(
            f"sweep={config.sweep.mode} draws from ranges and lists, and there is none. Say for instance "
            "'alpha=interval(0,1)' k=0.1,0.2."
        )
    return draw(axes, count, seed)


def _listed(axes: Sequence[Axis], config: DictConfig) -> list[Setting]:
    file, points = config.sweep.get("file"), config.sweep.get("points")
    if file and points:
        raise ConfigError("sweep.points and sweep.file: give one of them.")
    listed = lab.read_points(Path(file)) if file else lab.listed(resolved(points) or [])
    return [{**other, **point} for other in lab.grid(axes) for point in listed]


def _one_at_a_time(axes: Sequence[Axis], config: DictConfig) -> list[Setting]:
    default: dict[str, str] = {}
    for axis in axes:
        key = axis.key.lstrip("+")
        chosen = config.hydra.runtime.choices.get(key)
        value = OmegaConf.select(config, key)
        default[axis.key] = lab.as_text(resolved(value)) if chosen is None else str(chosen)
    return lab.one_at_a_time(axes, default)


def _blocks_apart(axes: Sequence[Axis], config: DictConfig) -> list[Setting]:
    mode, part = config.sweep.mode, config.sweep.get("by", "block")
    if part not in PARTS:
        raise ConfigError(
            f"sweep.by={part}: there is no such part of a model.{did_you_mean(str(part), PARTS)}"
        )
    if mode == "only_one_block" and set(config.blocks) - {CONVENTION}:
        raise ConfigError(
            f"sweep={mode} gives every {part} its strength itself, and 'blocks' gives some another one. "
            "Leave that out."
        )
    blocks = parts_of(config.models, part)
    return [
        {**other, **point}
        for other in lab.grid(axes, mode)
        for point in lab.blocks_apart(blocks, mode, _strength(recipe_of(other, config), config))
    ]


def _coalitions(axes: Sequence[Axis], config: DictConfig) -> list[Setting]:
    """The points of `sweep=shapley`: coalitions of experts, or of blocks."""
    part = config.sweep.get("by", EXPERT)
    if part == EXPERT:
        return expert_points(axes, config)
    if part not in PARTS:
        players = (EXPERT, *PARTS)
        raise ConfigError(f"sweep.by={part}: there are no such players.{did_you_mean(str(part), players)}")
    for other in lab.grid(axes, config.sweep.mode):
        _strength(recipe_of(other, config), config)
    if set(config.blocks) - {CONVENTION}:
        raise ConfigError(
            f"sweep=shapley sets {part}s to 0, and 'blocks' gives some a strength. Leave that out."
        )
    return block_coalitions(axes, parts_of(config.models, part), config.sweep.mode)


def _strength(recipe: str, config: DictConfig) -> str:
    """The default strength of a recipe's blocks: a reference to its hyperparameter.

    Raises:
        ConfigError: it has none that can be another one for each block.
    """
    is_chosen = recipe == str(config.hydra.runtime.choices.recipe)
    raw = as_written(config) if is_chosen else RecipeFile.load(recipe).values
    graph = str(raw.get("recipe")) if isinstance(raw, Mapping) else ""
    if "${blocks}" not in graph:
        raise ConfigError(
            f"sweep={config.sweep.mode}: the recipe '{recipe}' takes no strength for each block (its alpha "
            "does not refer to ${blocks})."
        )
    match = _STRENGTH.search(graph)
    return match["reference"] if match else "${alpha}"


def parts_of(models: DictConfig, part: str) -> list[str]:
    """The blocks, numbered layers or components of the models that a configuration names.

    Those without a tensor that is merged are none: the output layer of a tied model, a table of positions.

    Raises:
        CheckpointError: the model is not there.
        ConfigError: it has no such parts.
    """
    from mecha_exp.architectures.anatomy import Anatomy  # which need torch
    from mecha_exp.checkpoint import is_arithmetic
    from mecha_exp.checkpoint.folder import open_stored
    from mecha_exp.sources.quantised.view import with_plain_keys
    from mecha_exp.sources.search import find_model, folders_of
    from mecha_exp.sources.source import infos_of

    named = models.get("base") or next(iter(models.experts), None)
    with open_stored(find_model(str(named), folders_of({"models": models}))) as model:
        anatomy = Anatomy.of(infos_of(with_plain_keys(model)))
    merged = [key for key, info in anatomy.infos.items() if is_arithmetic(str(info.dtype))]
    part_of = anatomy.components if part == "component" else anatomy.blocks
    names = {"block": anatomy.order, "layer": anatomy.layers}.get(part, dict.fromkeys(part_of.values()))
    parts = [name for name in names if name in {part_of[key] for key in merged}]
    if not parts:
        raise ConfigError(f"sweep.by={part}: {named} has no {part}s.")
    return parts


_MODES: Mapping[str, Callable[[Sequence[Axis], DictConfig], list[Setting]]] = {
    "grid": lambda axes, config: lab.grid(axes),
    "zip": lambda axes, config: lab.zipped(axes),
    "points": _listed,
    "random": lambda axes, config: _sampled(axes, config, lab.at_random),
    "latin": lambda axes, config: _sampled(axes, config, lab.latin_hypercube),
    "one_at_a_time": _one_at_a_time,
    "leave_one_block_out": _blocks_apart,
    "only_one_block": _blocks_apart,
    **dict.fromkeys(EXPERT_MODES, expert_points),
    "shapley": _coalitions,
}
