"""The points with which adaptive sweeps begin: they stand for those that follow while the sweep runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.config.jobs import Batch
from mecha_exp.app.sweep.experts import check_distinct_experts, check_lists, experts_of, subset_point
from mecha_exp.app.sweep.hyperparameters import GROUP, drop_unused
from mecha_exp.app.sweep.points import CONVENTION, Points, axis_of
from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.lab import points as lab
from mecha_exp.lab.points import LEARNED_KEY, SOUP_KEY, STEP_KEY, SUBSET_KEY, Setting
from mecha_exp.report.adaptive_records import GRADIENT, GREEDY_SOUP, NOTHING

EXPERT, KEY = "expert", "key"
KINDS = (EXPERT, "component", "layer", "block", KEY)
"""What has a weight for each expert: the whole model, its components, numbered layers, blocks or tensors."""


class AdaptiveSweep(Protocol):
    """A sweep whose points come in batches, each of which may follow from what the last ones gave."""

    @property
    def trials(self) -> int:
        """The number of all points."""

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the table."""

    def check_folder(self, folder: Path) -> None:
        """Check that nothing in the folder contradicts the sweep."""

    def batches(self, folder: Path) -> Iterator[Batch]:
        """Yield the points in batches; one has run in `folder` when the next is requested."""


@dataclass(frozen=True)
class AdaptivePoints(Points):
    """The points of an adaptive sweep that are known beforehand, and one like those that will follow.

    Attributes:
        begun: the points that are known.
        experts: the paths of all experts.
        learns: what a point with learned weights sets beside these.
    """

    begun: Sequence[Setting] = ()
    experts: Sequence[str] = ()
    learns: Setting = field(default_factory=dict)


def gradient_points(overrides: Sequence[Override], config: DictConfig) -> AdaptivePoints:
    """The points of `sweep=gradient`: those that are listed, and one with learned weights.

    Of several recipes the first one is that whose weights are learned; the others are measured beside it.

    Raises:
        ConfigError: the recipe or the settings do not allow to learn weights.
    """
    axes = [axis_of(o) for o in overrides if o.is_sweep_override()]
    fixed = [o for o in overrides if not o.is_sweep_override()]
    keys = [axis.key for axis in axes]
    _check_recipe(keys, config)
    _check_learning(config.sweep)
    experts = resolved(config.models.experts)
    check_distinct_experts(experts, GRADIENT)
    labels = {f"++{LEARNED_KEY}": NOTHING, f"++{STEP_KEY}": "0"}
    listed = [{**labels, **setting} for setting in lab.grid(axes, GRADIENT)]
    learned = learned_setting("entropy/expert", 1, lab.as_text([0.5] * len(experts)))
    first = {key: text for key, text in listed[0].items() if key == GROUP}
    fitted = drop_unused([*listed, first | learned], fixed, keys, config)
    *begun, like = fitted.settings
    begun = lab.unique(begun)
    learns = {key: text for key, text in like.items() if key not in learned}
    lines = [str(override.input_line) for override in fitted.fixed]
    fits = (fitted.own, fitted.left_out, fitted.meanings)
    return AdaptivePoints(
        [LEARNED_KEY, STEP_KEY, *keys], lines, [*begun, like], *fits, begun, experts, learns
    )


def _check_learning(settings: DictConfig) -> None:
    """Check what has weights, and that there is a loss."""
    for key, example in (("by", EXPERT), ("loss", "entropy")):
        if not as_list(settings[key]):
            raise ConfigError(f"sweep.{key} is empty, so nothing would be learned: sweep.{key}={example}.")
    for kind in as_list(settings.by):
        if kind not in KINDS:
            hint = did_you_mean(str(kind), KINDS)
            raise ConfigError(f"sweep.by={kind}: there are no such parts to learn weights of.{hint}")


def learned_setting(name: str, step: int, weights: str) -> Setting:
    """The settings of a point with learned weights.

    Args:
        name: of the descent, such as `entropy/block`.
        step: after which the weights were kept.
        weights: the hyperparameter as text.
    """
    return {f"++{LEARNED_KEY}": name, f"++{STEP_KEY}": str(step), "alpha": "1", "++weights": weights}


def as_list(value: Any) -> list[Any]:
    """A setting that is one value or a list, as a list."""
    plain = resolved(value)
    return list(plain) if isinstance(plain, list) else [plain]


def _check_recipe(swept: Sequence[str], config: DictConfig) -> None:
    """Check that the recipe has weights of task vectors, and that nothing else is in their way."""
    recipe = config.hydra.runtime.choices.get("recipe")
    if several := [key for key in swept if key.partition(".")[0] in ("models", "sweep")]:
        raise ConfigError(
            f"sweep=gradient learns the weights of one set of models, and {several[0]} has "
            "several values. Start a sweep for each; `python -m mecha_exp table FOLDER FOLDER` joins them."
        )
    if "alpha" not in config or "weights" not in config:
        raise ConfigError(
            f"sweep=gradient learns a weight for each task vector, and recipe={recipe} has no 'alpha' and "
            "'weights' for that. Use recipe=task_arithmetic, of several recipes as the first."
        )
    if not OmegaConf.is_list(config.models.get("experts")) or not len(config.models.experts):
        raise ConfigError("sweep=gradient learns the weights of experts: list them in models.experts=[...].")
    if set(config.blocks) - {CONVENTION}:
        raise ConfigError(
            "sweep=gradient learns the weights itself (for each block with sweep.by=block), and 'blocks' "
            "gives some another strength. Leave that out."
        )
    _check_replicates(config)


def soup_points(overrides: Sequence[Override], config: DictConfig) -> AdaptivePoints:
    """The points of `sweep=greedy_soup` that are known beforehand: each expert alone, and all of them.

    Raises:
        ConfigError: there are fewer than two experts, or a key has several values.
    """
    if swept := [o.key_or_group for o in overrides if o.is_sweep_override()]:
        raise ConfigError(
            f"sweep=greedy_soup chooses experts for one value of each key, and {swept[0]} has several. "
            "Start a sweep for each; `python -m mecha_exp table FOLDER FOLDER` joins them."
        )
    _check_replicates(config)
    paths = experts_of(config)
    check_lists(len(paths), config)
    names = names_of(paths)
    alone = [soup_setting("single", [i], names, paths) for i in range(len(paths))]
    begun = [*alone, soup_setting("uniform", range(len(paths)), names, paths)]
    fixed = [str(override.input_line) for override in overrides]
    return AdaptivePoints([SOUP_KEY, SUBSET_KEY], fixed, begun, begun=begun, experts=paths)


def soup_setting(kind: str, members: Sequence[int], names: Sequence[str], paths: Sequence[str]) -> Setting:
    """The settings of a point of a greedy soup.

    Args:
        kind: `single`, `uniform` (all experts), `trial` (never chosen), or `greedy` (what was chosen).
        members: the places of the experts that it merges.
        names: of all experts.
        paths: of all experts.
    """
    return {f"++{SOUP_KEY}": kind, **subset_point(tuple(sorted(members)), names, paths)}


def _check_replicates(config: DictConfig) -> None:
    mode = config.sweep.mode
    if config.sweep.get("replicate") or config.sweep.get("replicates"):
        raise ConfigError(
            f"sweep={mode} is for one set of experts and one seed: leave sweep.replicate and "
            "sweep.replicates out, and start it once for each."
        )


Make = Callable[[Sequence[Override], DictConfig], AdaptivePoints]
MAKERS: Mapping[str, Make] = {GRADIENT: gradient_points, GREEDY_SOUP: soup_points}
"""The function that makes the points of each adaptive mode of the group `sweep`."""
