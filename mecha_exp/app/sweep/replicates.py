"""Replicates: each point of a sweep once for each seed, for each set of experts, or for both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.recipes.templates import first_seed_of
from mecha_exp.app.sweep.hyperparameters import RecipeFile, recipe_of
from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.errors import ConfigError, counted, did_you_mean
from mecha_exp.lab import points as lab
from mecha_exp.lab.points import EXPERTS_KEY, SEED_PATH, SUBSET_KEY, Setting
from mecha_exp.recipe.foreign import word_of
from mecha_exp.sources.search import folders_of

SEED_KEYS = ("seed", SEED_PATH)
SEED, EXPERTS, DATA = "seed", "experts", "data"


def replicate(points: Sequence[Setting], config: DictConfig, fixed: Sequence[Override]) -> list[Setting]:
    """Make the replicates of each point that `sweep.replicates` and `sweep.replicate` ask for.

    Args:
        points: of a sweep.
        config: with its groups chosen.
        fixed: overrides that all points have.

    Raises:
        ConfigError: an unknown kind of replicates, no number of seeds, or sets that cannot be used.
    """
    kinds, seeds = replicate_kinds(config), config.sweep.replicates
    if SEED in kinds and seeds is None:
        raise ConfigError("sweep.replicate has seed: say how many seeds with sweep.replicates=5.")
    if kinds and SEED not in kinds and seeds is not None:
        raise ConfigError(
            f"sweep.replicates={seeds} is a number of seeds, and sweep.replicate={lab.as_text(kinds)} has no "
            "seed. Add it, or leave sweep.replicates out."
        )
    replicated = list(points)
    if EXPERTS in kinds:
        replicated = lab.with_each_set(
            replicated, checked_names(replicated, _checked_sets(replicated, config, fixed))
        )
    return replicated if seeds is None else _with_seeds(replicated, config, fixed)


def replicate_kinds(config: DictConfig) -> list[str]:
    """What replicates differ in, as `sweep.replicate` lists it.

    The examples (`data`) need no points of their own: intervals draw them from each point's outcomes.

    Raises:
        ConfigError: an unknown kind of replicates.
    """
    value = config.sweep.get("replicate")
    kinds = [] if value is None else list(value) if OmegaConf.is_list(value) else [value]
    known = (SEED, EXPERTS, DATA)
    for kind in kinds:
        if kind not in known:
            hint = did_you_mean(str(kind), known)
            raise ConfigError(
                f"sweep.replicate: replicates differ in seed, experts or data, not in '{kind}'.{hint}"
                + (
                    f" {counted(kind, 'seed is', 'seeds are')} sweep.replicates={kind}."
                    if isinstance(kind, int)
                    else ""
                )
            )
    return kinds


def _checked_sets(
    points: Sequence[Setting], config: DictConfig, fixed: Sequence[Override]
) -> list[list[str]]:
    """The sets of experts, after a check that they are replicates of each other.

    Raises:
        ConfigError: they are not, or the experts are chosen in another way as well.
    """
    own = [point for point in points if f"++{SUBSET_KEY}" not in point]
    chosen = [o.key_or_group for o in fixed] + [key.lstrip("+") for point in own for key in point]
    clash = next((key for key in chosen if key.startswith(EXPERTS_KEY)), None)
    if clash or len({point.get("models") for point in points}) > 1:
        raise ConfigError(
            f"{clash or 'models'} is given, and sweep.replicate runs each point with every list of "
            "models.sets. Leave one of them out."
        )
    return sets_of(config.models.get("sets"))


def sets_of(value: object) -> list[list[str]]:
    """The sets of experts of `models.sets`, after a check that they are replicates of each other.

    Raises:
        ConfigError: one is not a list, has another length, or two are the same.
    """
    sets = resolved(value)
    if not sets or not isinstance(sets, list) or not all(isinstance(s, list) and s for s in sets):
        raise ConfigError(
            "sweep.replicate has experts, and models.sets lists no sets: give several lists of experts, as "
            "in models.sets=[[a0.safetensors,b0.safetensors],[a1.safetensors,b1.safetensors]]."
        )
    sizes = [len(experts) for experts in sets]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"models.sets: the sets have {', '.join(map(str, sizes))} experts. Replicates of one setting "
            "have equally many."
        )
    texts = [[str(expert) for expert in experts] for experts in sets]
    again = next((i for i, experts in enumerate(texts) if experts in texts[:i]), None)
    if again is not None:
        first = texts.index(texts[again])
        raise ConfigError(f"models.sets: sets {first} and {again} are the same experts. Leave one out.")
    return texts


def checked_names(points: Sequence[Setting], sets: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names of the experts of each set.

    Raises:
        ConfigError: points merge experts by name, and a set has others.
    """
    names = [names_of(experts) for experts in sets]
    different = next((i for i, of_set in enumerate(names) if sorted(of_set) != sorted(names[0])), None)
    if different is not None and any(f"++{SUBSET_KEY}" in point for point in points):
        raise ConfigError(
            f"models.sets: set {different} has the experts {', '.join(names[different])}, and set 0 has "
            f"{', '.join(names[0])}. A sweep over experts needs the same names in each set."
        )
    return names


def _with_seeds(points: Sequence[Setting], config: DictConfig, fixed: Sequence[Override]) -> list[Setting]:
    """Each point with several seeds, from its recipe's own on; once where its recipe draws nothing."""
    count = config.sweep.replicates
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"sweep.replicates={count}: expected how many seeds to run, 1 or more.")
    seeds = _seeds(points, config, fixed)
    is_swept = any(key.lstrip("+") in SEED_KEYS for point in points for key in point)
    if not any(isinstance(seed, int) for seed in seeds) or is_swept:
        raise ConfigError(
            f"sweep.replicates={count} runs each point with {counted(count, 'seed')} from the recipe's "
            "own on, and " + ("seed is swept already." if is_swept else "this recipe has no seed.")
        )
    key = f"++{SEED_PATH}" if _are_foreign(points, config) else "seed"
    return [
        setting
        for point, seed in zip(points, seeds, strict=True)
        for setting in (lab.replicated([point], seed, count, key) if isinstance(seed, int) else [point])
    ]


def _seeds(points: Sequence[Setting], config: DictConfig, fixed: Sequence[Override]) -> list[int | None]:
    """The first seed of each point; None if its recipe draws no random numbers."""
    if _are_foreign(points, config):
        return [_foreign_seed(point, config) for point in points]
    names = [recipe_of(point, config) for point in points]
    if len(set(names)) == 1:
        return [config.get("seed")] * len(points)
    own = {name: RecipeFile.load(name).seed for name in dict.fromkeys(names)}
    seeds = [seed for o in fixed if o.key_or_group == "seed" and isinstance(seed := o.value(), int)]
    return [seeds[-1] if seeds and seed is not None else seed for seed in map(own.__getitem__, names)]


def _are_foreign(points: Sequence[Setting], config: DictConfig) -> bool:
    """Whether all points have the one recipe that is chosen, and that is in the form of another tool."""
    return len({recipe_of(point, config) for point in points}) == 1 and word_of(config.recipe) is not None


def _foreign_seed(point: Setting, config: DictConfig) -> int | None:
    """The first seed of a point with a recipe of another tool; None if it draws no random numbers."""
    word = word_of(config.recipe)
    assert word is not None
    texts = {key.lstrip("+"): text for key, text in point.items()}
    path = texts.get("recipe.path") or str(config.recipe[word])
    keys = ("merge_method", SEED_PATH)
    values = {key: texts.get(key, OmegaConf.select(config, key)) for key in keys}
    folders = folders_of({"models": resolved(config.models)})
    return first_seed_of(word, Path(path), {k: v for k, v in values.items() if v is not None}, folders)
