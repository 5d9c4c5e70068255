"""What decides the numbers of an evaluator: its code, its parameters, and the data that it declares."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from mecha_exp.engine.code_hash import of_function
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.lab.content_hash import content_of
from mecha_exp.system.folders import files_below
from mecha_exp.system.texts import json_hash

TORCH = "torch"


def key_of(evaluator: Evaluator, parameters: Mapping[str, Any], context: Context | None = None) -> str:
    """The key of a stored measurement, valid as a file name: the evaluator's name and a hash.

    The hash covers name, version, parameters (a `Path` by the content of its file or folder), the code of the
    function with all that it reaches by name, the declared data, environment variables and libraries (with
    torch, by which they compute), and what it depends on in `context`, such as a tokenizer beside an input
    (a function counts by its code).

    Raises:
        ConfigError: a file that the evaluator declares, or that a parameter names, cannot be read.
    """
    identity = {
        "name": evaluator.name,
        "version": evaluator.version,
        "parameters": {name: _plain(evaluator, value) for name, value in parameters.items()},
        "code": of_function(inspect.unwrap(evaluator.score)),
        "data": [_content(evaluator, path) for path in evaluator.data],
        "variables": {name: os.environ.get(name) for name in evaluator.variables},
    }
    if evaluator.libraries:
        identity["libraries"] = {name: _version(name) for name in (TORCH, *evaluator.libraries)}
    if evaluator.depends is not None:
        depends = evaluator.depends(context or Context(), parameters)
        identity["depends"] = _plain(evaluator, depends)
    text = json.dumps(identity, sort_keys=True, default=str)
    name = re.sub(r"\W", "_", evaluator.name)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _plain(evaluator: Evaluator, value: Any) -> Any:
    """A value with the content of files in place of their paths, and code in place of functions."""
    if isinstance(value, Path):
        return {"content": _content(evaluator, value)}
    if inspect.isroutine(value) or inspect.isclass(value):
        return {"code": of_function(inspect.unwrap(value))}
    if isinstance(value, Mapping):
        return {str(name): _plain(evaluator, part) for name, part in value.items()}
    if isinstance(value, str) and _is_file(value):
        return {"text": value, "content": _content(evaluator, Path(value).expanduser())}
    return [_plain(evaluator, part) for part in value] if isinstance(value, list | tuple) else value


def _is_file(text: str) -> bool:
    """Whether a text is the name of a file, so that an evaluator may read it."""
    try:
        return Path(text).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # too long, another user's `~name`, a null
        return False


@functools.cache  # to look one up takes 15 ms, and each point has several keys
def _version(module: str) -> str:
    """The version of an installed library, by the name of its module, without what it was built for."""
    try:
        return version(module).partition("+")[0]
    except PackageNotFoundError:
        names = packages_distributions().get(module, ())  # reads what is installed: a second
        return " ".join(f"{name} {version(name)}" for name in sorted(set(names)))


def _content(evaluator: Evaluator, path: Path) -> str:
    """The SHA-256 of a file; for a folder, of the names and contents of the files below it."""
    try:
        if path.is_file():
            return content_of(path)
        if not path.is_dir():
            raise FileNotFoundError
        return json_hash([[name, content_of(file)] for name, file in files_below(path).items()])
    except FileNotFoundError:
        raise ConfigError(f"the evaluator '{evaluator.name}' reads {path}, which does not exist.") from None
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"the evaluator '{evaluator.name}' reads {path}, which cannot be read: {error}"
        ) from None
