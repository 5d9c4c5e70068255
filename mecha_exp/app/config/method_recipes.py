"""The recipe of a merge method, made of its signature: `recipe=NAME` where there is no file of that name.

`info methods NAME --recipe` prints it, as a file to begin with. A file in `conf/recipe` says more than its
method: several calls, or other defaults.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods
from mecha_exp.system.cache import made_of

if TYPE_CHECKING:
    from mecha_exp.method_api.method import MergeMethod
    from mecha_exp.method_api.parameters import ParameterSpec

ALPHA, SCALE = "alpha", "scale"
"""The parameters that a recipe calls `alpha`, and that the group `blocks` may set for single blocks."""


GROUP, PACKAGE = "recipe", "_global_"
SCHEME = "methods"

_TITLED = re.compile(r"^@merge_method\([^@]*?\btitle=[^@]*?^(?:def|class) (\w+)", re.MULTILINE)
"""A decorator with a title, and the name of what it decorates."""


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
        return group == GROUP and text_of(name.removesuffix(".yaml")) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The built-in methods with a title."""
        return titled() if config_path == GROUP and results_filter != ObjectType.GROUP else []

    def load_config(self, config_path: str) -> ConfigResult:
        """Make the recipe of a method."""
        text = text_of(config_path.rpartition("/")[2].removesuffix(".yaml"))
        assert text is not None  # Hydra has asked for it
        config = OmegaConf.create(text)
        return ConfigResult(self.provider, self.full_path(), config, {"package": PACKAGE})


class MethodRecipesPath(SearchPathPlugin):
    """Puts that place into Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add it at the end, so that files come first."""
        search_path.append("mecha_exp-methods", f"{SCHEME}://registry")


def names_of_methods() -> set[str]:
    """The methods that can be the recipe of a run."""
    return set(_methods())


def _methods() -> dict[str, MergeMethod]:
    return {method.identifier: method for method in all_methods() if not method.is_conversion}


def titled() -> list[str]:
    """The built-in methods with a title, read from their source: to import them takes as long as torch."""
    texts = (file.read_text(encoding="utf-8") for file in _sources())
    return sorted(name for text in texts for name in _TITLED.findall(text))


def text_of(name: str) -> str | None:
    """The recipe of the method of a name; None if there is none that can be the recipe of a run.

    That of a built-in method with a title is taken from the cache as long as no method is imported.
    """
    if BUILTIN_METHODS not in sys.modules and name in (texts := _texts_of_titled()):
        return texts[name]
    method = _methods().get(name)
    return recipe_text(method) if method else None


@functools.cache
def _texts_of_titled() -> dict[str, str]:
    files = [*_sources(), *Path(inspect.getfile(all_methods)).parent.glob("*.py"), Path(__file__)]
    texts: dict[str, str] = made_of(
        files, "recipes", lambda: {n: recipe_text(_methods()[n]) for n in titled()}
    )
    return texts


def _sources() -> list[Path]:
    spec = importlib.util.find_spec(BUILTIN_METHODS)
    folders = spec.submodule_search_locations if spec else None
    return [file for folder in folders or () for file in Path(folder).glob("*.py")]


def recipe_text(method: MergeMethod) -> str:
    """The YAML of a recipe that calls a method: its hyperparameters with their defaults, then the call.

    Models are the base, the list of experts, or single experts in the order of the parameters. Statistics of
    the experts are files that `models` names. A parameter without a default gets the value null, which has to
    be replaced.
    """
    models, hyperparameters = [], []
    for spec in method.signature.parameters:
        if not spec.is_model:
            hyperparameters.append(spec)
        elif spec.required or spec.variadic or spec.name == method.base:
            models.append(spec)
    strength = ALPHA if ALPHA in {spec.name for spec in hyperparameters} else SCALE
    settings = [_setting(method, spec, ALPHA if spec.name == strength else "") for spec in hyperparameters]
    width = max((len(setting) for setting, _ in settings), default=0)
    lines = [f"# @package {PACKAGE}"]
    lines += [f"# {line}".rstrip() for line in (inspect.getdoc(method) or "").splitlines()]
    lines += [f"{setting:<{width}}   # {help}" if help else setting for setting, help in settings]
    lines += ["recipe:", *([f"  title: {_scalar(method.title)}"] if method.title else [])]
    lines += [f"  method: {method.identifier}", *_models(method, models)]
    lines += [_argument(method, spec, spec.name == strength) for spec in hyperparameters]
    return "\n".join(lines) + "\n"


def _setting(method: MergeMethod, spec: ParameterSpec, name: str) -> tuple[str, str]:
    """The line of a hyperparameter, by another name if it is given, and what it is about."""
    if _takes_files(method, spec):
        files = "masks" if method.statistics == "mask" else "statistics"
        return f"{spec.name}: ${{models.{files}}}", f"files of {files}, one for each expert in the same order"
    value = _scalar(None if spec.required else spec.default)
    return f"{name or spec.name}: {value}", "; ".join(filter(None, (spec.help, spec.range)))


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]


def _takes_files(method: MergeMethod, spec: ParameterSpec) -> bool:
    """Whether an argument is statistics of the experts, which files hold, and not of one merge."""
    return spec.name == "statistics" and method.statistics is not None and method.measured is None


def _models(method: MergeMethod, specs: list[ParameterSpec]) -> Iterator[str]:
    experts = 0
    for spec in specs:
        if spec.variadic:
            yield f"  {spec.name}: ${{models.experts}}"
        elif spec.name == method.base:
            yield f"  {spec.name}: ${{models.base}}"
        else:
            yield f"  {spec.name}: ${{models.experts.{experts}}}"
            experts += 1


def _argument(method: MergeMethod, spec: ParameterSpec, by_block: bool) -> str:
    value = f"${{{spec.name}}}"
    if _takes_files(method, spec):
        value = f'{{method: statistics, files: "{value}", kind: {method.statistics}}}'
    elif by_block:
        value = '{default: "${alpha}", blocks: "${blocks}"}'
    return f"  {spec.name}: {value}"
