"""Functions of the user's own that a setting names as `FILE.py:function`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError, did_you_mean

Function = Callable[..., Any]


def function_file(text: str, key: str) -> tuple[Path, str]:
    """The file and the name of a function that `evaluator.KEY=FILE.py:function` names.

    Raises:
        ConfigError: there is no such file.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"evaluator.{key}={text}: expected FILE.py:function, and there is no file '{file}'."
        )
    return path.resolve(), name


def user_function(text: str, key: str) -> Function:
    """The function that `evaluator.KEY=FILE.py:function` names; its file is run once for each content.

    Raises:
        ConfigError: the file does not exist, cannot be imported, or has no such function.
    """
    path, name = function_file(text, key)
    module = _module(path, path.stat().st_mtime_ns, key)
    if not callable(function := getattr(module, name, None)):
        known = [own for own, value in vars(module).items() if callable(value)]
        raise ConfigError(f"evaluator.{key}: {path} has no function '{name}'.{did_you_mean(name, known)}")
    return function  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def _module(path: Path, changed: int, key: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"mecha_exp_{key}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"evaluator.{key}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"evaluator.{key}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module
