"""The recipe of a merge method, made of its signature: `recipe=NAME` where there is no file of that name.

`info methods NAME --recipe` prints it, as a file to begin with.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mecha_exp.method_api.registry import all_methods

if TYPE_CHECKING:
    from mecha_exp.method_api.method import MergeMethod
    from mecha_exp.method_api.parameters import ParameterSpec

ALPHA, SCALE = "alpha", "scale"
"""The parameters that a recipe calls `alpha`, and that the group `blocks` may set for single blocks."""


GROUP, PACKAGE = "recipe", "_global_"
SCHEME = "methods"


class MethodRecipes(ConfigSource):
    """The recipes of merge methods as a place where Hydra looks, after our files and the user's."""

    @staticmethod
    def scheme() -> str:
        """The scheme of this place in the search path."""
        return SCHEME

    def available(self) -> bool:
        """Whether it exists: always."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether a path is that of a group."""
        return config_path in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """Whether a path is that of a method's recipe."""
        group, _, name = config_path.rpartition("/")
        return group == GROUP and method_of(name.removesuffix(".yaml")) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing: `info methods` lists the methods."""
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        """Make the recipe of a method."""
        name = config_path.rpartition("/")[2].removesuffix(".yaml")
        method = method_of(name)
        assert method is not None  # Hydra has asked for it
        config = OmegaConf.create(recipe_text(method))
        return ConfigResult(self.provider, self.full_path(), config, {"package": PACKAGE})


class MethodRecipesPath(SearchPathPlugin):
    """Puts that place into Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add it at the end, so that files come first."""
        search_path.append("mecha_exp-methods", f"{SCHEME}://registry")


def method_of(name: str) -> MergeMethod | None:
    """The method of a name that can be the recipe of a run; None if there is none."""
    return _methods().get(name)


def names_of_methods() -> set[str]:
    """The methods that can be the recipe of a run."""
    return set(_methods())


def _methods() -> dict[str, MergeMethod]:
    return {method.identifier: method for method in all_methods() if not method.is_conversion}


def recipe_text(method: MergeMethod) -> str:
    """The YAML of a recipe that calls a method: its hyperparameters with their defaults, then the call.

    Models are the base, the list of experts, or single experts in the order of the parameters. A parameter
    without a default gets the value null, which has to be replaced.
    """
    models, hyperparameters = [], []
    for spec in method.signature.parameters:
        if not spec.is_model:
            hyperparameters.append(spec)
        elif spec.required or spec.variadic or spec.name == "base":
            models.append(spec)
    formula = (inspect.getdoc(method) or "").partition("\n")[0]
    strength = ALPHA if ALPHA in {spec.name for spec in hyperparameters} else SCALE
    lines = [f"# @package {PACKAGE}", *([f"# {formula}"] if formula else [])]
    lines += [_setting(spec, ALPHA if spec.name == strength else spec.name) for spec in hyperparameters]
    lines += ["recipe:", f"  method: {method.identifier}", *_models(models)]
    lines += [_argument(spec, spec.name == strength) for spec in hyperparameters]
    return "\n".join(lines) + "\n"


def _setting(spec: ParameterSpec, name: str) -> str:
    default = None if spec.required else spec.default
    value = yaml.safe_dump(default, default_flow_style=True).partition("\n")[0]
    return f"{name}: {value}" + (f"   # {spec.help}" if spec.help else "")


def _models(specs: list[ParameterSpec]) -> Iterator[str]:
    experts = 0
    for spec in specs:
        if spec.variadic:
            yield f"  {spec.name}: ${{models.experts}}"
        elif spec.name == "base":
            yield "  base: ${models.base}"
        else:
            yield f"  {spec.name}: ${{models.experts.{experts}}}"
            experts += 1


def _argument(spec: ParameterSpec, by_block: bool) -> str:
    if by_block:
        return f'  {spec.name}: {{default: "${{alpha}}", blocks: "${{blocks}}"}}'
    return f"  {spec.name}: ${{{spec.name}}}"
