"""From a model, its data and a module to the subject of a calibration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.calibration.bundled_subjects import BUNDLED
from mecha_exp.calibration.subject import Subject
from mecha_exp.checkpoint import StateDictSource, is_arithmetic
from mecha_exp.errors import ConfigError, MechaError
from mecha_exp.evaluators.common import ModelFolder
from mecha_exp.evaluators.common.functions import function_file, user_function
from mecha_exp.families import CONFIG
from mecha_exp.lab.content_hash import content_of


def load_subject(
    stored: StateDictSource, data: str, module: str | None = None, count: int | None = None, **settings: Any
) -> Subject:
    """The network of a model with its weights, and the examples of the data.

    Args:
        stored: the model.
        data: a file or folder of texts; for a module what that takes.
        module: `digits`, `mini8`, or `FILE.py:function`, a function of the state dict and the data to a
            `Subject`; None is the model's class of transformers.
        count: examples at most, the first ones.
        settings: of `subject_of_texts`.

    Raises:
        ConfigError: there is no such module, no configuration beside the model, or the data do not fit.
    """
    weights = {key: stored.read(key) for key in stored.keys()}
    try:
        if module is None:
            subject = _of_transformers(stored, weights, data, count, settings)
        else:
            subject = _of_module(module, weights, data, settings)
    except ConfigError as error:  # of settings that evaluators have, too
        raise ConfigError(str(error).replace("evaluator.", "")) from error
    unknown = [name for name, _ in subject.module.named_parameters() if subject.key_of(name) not in stored]
    if unknown:
        raise ConfigError(
            f"{module or 'transformers'}: the parameter '{unknown[0]}' of its module is not a key of "
            f"{stored.name}. Give Subject the key of each parameter: keys={{parameter: key}}."
        )
    return replace(subject, examples=subject.examples[:count])


def _of_module(module: str, weights: Mapping[str, Tensor], data: str, settings: Mapping[str, Any]) -> Subject:
    if settings:
        raise ConfigError(f"{min(settings)}: is a setting of transformers, and not of module={module}.")
    make: Any = BUNDLED.get(module)
    if make is None:
        try:
            make = user_function(module, "module")
        except ConfigError as error:
            known = ", ".join(BUNDLED)
            raise ConfigError(f"{error} Or name one of {known}.") from None
    try:
        subject = make(weights, data)
    except MechaError:
        raise
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"module={module} cannot take the model or data={data}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(subject, Subject):
        raise ConfigError(f"module={module} returns a {type(subject).__name__}: expected a Subject.")
    return subject


def _of_transformers(
    stored: StateDictSource,
    weights: Mapping[str, Tensor],
    data: str,
    count: int | None,
    settings: Mapping[str, Any],
) -> Subject:
    path = stored.path or Path()
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{stored.name} has no {CONFIG} beside it, so its network is not known. Name a folder of "
            "transformers, or a module: module=FILE.py:function."
        )
    if not Path(data).exists():
        raise ConfigError(f"data={data}: there is no such file or folder.")
    from mecha_exp.calibration.texts import subject_of_texts

    numbers = {key: tensor for key, tensor in weights.items() if is_arithmetic(stored.info(key).dtype)}
    return subject_of_texts(numbers, ModelFolder(folder), Path(data), count=count, **settings)


def hash_of_data(data: str) -> str:
    """The SHA-256 of a file, or of the names and contents of a folder's files; empty for another name."""
    path = Path(data)
    if not path.is_dir():
        return content_of(path) if path.exists() else ""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    parts = [(file.relative_to(path).as_posix(), content_of(file)) for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def hash_of_code(module: str | None) -> str:
    """The first digits of the SHA-256 of the file of `FILE.py:function`; empty for a bundled module."""
    if module is None or module in BUNDLED:
        return ""
    return content_of(function_file(module, "module")[0])[:16]
