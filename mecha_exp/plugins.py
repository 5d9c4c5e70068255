"""Load plugins, the user's own files, so that their methods, evaluators and model configs are found by name.

    plugins: [my_evaluator.py, my_methods/, my_package.scoring, acme-net.yaml]

A plugin is a Python file, the YAML of a model config, a folder of such files, or an importable module. A
configuration that names a plugin runs its code, as an import does; a name in a recipe never runs code. Of a
folder only the files that import mecha_exp are run, and nothing is run before every name has been found.
Files in `methods/` of the current folder that import mecha_exp are plugins without being named; so are the
model configs in `model_configs/` and those that MECHA_MODEL_CONFIGS lists.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from mecha_exp.architectures import from_yaml, register
from mecha_exp.architectures.library.registry import builtin_folder
from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean, prefixed
from mecha_exp.method_api.registry import BUILTIN_METHODS

PACKAGE = "mecha_exp"
METHODS_FOLDER = "methods"
CONFIGS_FOLDER = "model_configs"
CONFIGS_VARIABLE = "MECHA_MODEL_CONFIGS"
_YAML = (".yaml", ".yml")


def load_plugins(plugins: Iterable[str] | str) -> None:
    """Load the named plugins, and those that need no name, unless this process has loaded them already.

    Args:
        plugins: Python and YAML files and folders of them, relative to the current folder, or modules; a
            string is a list of one.

    Raises:
        ConfigError: all plugins that do not exist, before any is imported; or all that cannot be imported.
    """
    named = [plugins] if isinstance(plugins, str) else [str(plugin) for plugin in plugins]
    _for_each(_require, named)
    _for_each(_load, [*_local_methods(), *_local_configs(), *named])


def _for_each(do: Callable[[str], None], plugins: Iterable[str]) -> None:
    """Call a function with each plugin.

    Raises:
        ConfigError: all problems together.
    """
    problems = Problems()
    for plugin in plugins:
        with problems.collected(ConfigError):
            do(plugin)
    problems.raise_as(ConfigError)


def load_model_configs() -> None:
    """Register the model configs that need no name, for verbs that only inspect models.

    Raises:
        ConfigError: all invalid configs, with their files.
    """
    _for_each(_load, _local_configs())


def _local_configs() -> list[str]:
    """The model configs in the folder `model_configs` and in the environment variable."""
    folder = Path(CONFIGS_FOLDER)
    own = [] if folder.resolve() == builtin_folder().resolve() else _files(folder, _YAML)
    named = os.environ.get(CONFIGS_VARIABLE, "").split(os.pathsep)
    configs = [path for path in own if b"identifier:" in path.read_bytes()]
    for path in (Path(name) for name in named if name):
        configs += _files(path, _YAML) if path.is_dir() else [path]
    return [str(path) for path in sorted(configs, key=_is_of_adapters)]


def _local_methods() -> list[str]:
    """The plugins in the folder `methods`; in a checkout they are modules beside the built-in methods."""
    folder = Path(METHODS_FOLDER)
    files = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    if not files:
        return []
    builtin = importlib.import_module(BUILTIN_METHODS)
    if folder.resolve() in (Path(path).resolve() for path in builtin.__path__):
        return [f"{BUILTIN_METHODS}.{path.stem}" for path in files]
    return [str(path) for path in files if _imports_us(path)]


def _imports_us(path: Path) -> bool:
    """Whether a Python file imports mecha_exp; one that cannot be parsed does if it mentions it."""
    code = path.read_bytes()
    if PACKAGE.encode() not in code:
        return False
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return True
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(module.partition(".")[0] == PACKAGE for module in modules)


def _require(plugin: str) -> None:
    """Check that a plugin exists, without running any code.

    Raises:
        ConfigError: there is no such file, folder or module.
    """
    path = Path(plugin)
    try:
        if path.is_dir():
            return
        if path.suffix in (".py", *_YAML):
            _require_file(path)
        elif not _is_module(plugin):
            raise ConfigError(f"plugins: there is no module, file or folder '{plugin}'.")
    except (OSError, ValueError) as error:
        raise ConfigError(f"plugins: {brief(plugin)} cannot be looked for: {error}.") from None


def _is_module(name: str) -> bool:
    """Whether a module can be found; `find_spec` would import the packages that it lies in."""
    if name in sys.modules:
        return True
    folders: list[str] | None = None
    for depth, part in enumerate(parts := name.split(".")):
        whole = ".".join(parts[: depth + 1])
        package = sys.modules.get(whole)
        if package is not None and hasattr(package, "__path__"):
            folders = list(package.__path__)
            continue
        spec = PathFinder.find_spec(whole if part else "", folders) if part else None
        if spec is None:
            return not depth and part in sys.builtin_module_names
        if spec.submodule_search_locations is None:
            return depth == len(parts) - 1
        folders = list(spec.submodule_search_locations)
    return True


def _load(plugin: str) -> None:
    path = Path(plugin)
    if path.is_dir():
        for file in _files(path, (".py", *_YAML)):
            if file.suffix in _YAML or _imports_us(file):
                _load_file(file)
    elif path.suffix in (".py", *_YAML):
        _load_file(path)
    else:
        _import(plugin)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    return sorted(files, key=_is_of_adapters)


def _is_of_adapters(path: Path) -> bool:
    """Whether a file is a LoRA config, which requires the config of its models to be loaded before."""
    return path.suffix in _YAML and path.is_file() and b"adapter:" in path.read_bytes()


def _require_file(path: Path) -> None:
    if not path.is_file():
        beside = [p.name for p in _files(path.parent, (path.suffix,))]
        what = "model configs" if path.suffix in _YAML else "plugins"
        raise ConfigError(f"{what}: {path} does not exist.{did_you_mean(path.name, beside)}")


def _load_file(path: Path) -> None:
    _require_file(path)
    if path.suffix in _YAML:
        _load_config(path)
    else:
        _load_code(path)


def _load_config(path: Path) -> None:
    config = from_yaml(path.read_text(encoding="utf-8"), str(path))
    with prefixed(f"{path}: "):
        register(config)


def _load_code(path: Path) -> None:
    # Files of one stem in different folders are different modules.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"mecha_exp_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: {path} cannot be imported.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"plugins: {path} cannot be imported: {_where(error)}") from error


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ConfigError(f"plugins: there is no module, file or folder '{name}'.") from None
        raise ConfigError(f"plugins: {name} cannot be imported: {_where(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"plugins: {name} cannot be imported: {_where(error)}") from error


def _where(error: BaseException) -> str:
    """The error in one line, with file and line number."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{location}"
