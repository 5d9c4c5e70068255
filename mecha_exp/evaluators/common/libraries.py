"""Runs the libraries of evaluators without downloads, progress bars and hints, and shortens their errors."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mecha_exp.errors import ConfigError

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # not among the tables of a sweep
}

_OFFLINE_PLACES = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))
_ASIDES = (
    ("lm_eval.evaluator", "get_git_commit_hash"),  # git complains outside of a repository
    ("lm_eval.evaluator", "add_env_info"),  # runs other programs for most of a second
)
"""What the harness finds out for its own report, in each measurement."""
_TRUE = ("1", "ON", "YES", "TRUE")


@contextmanager
def one_line(
    what: str, errors: tuple[type[Exception], ...] = (OSError, ValueError, KeyError)
) -> Iterator[None]:
    """Raise an error of a library as a `ConfigError`: what it could not do, and the first line of why."""
    try:
        yield
    except errors as error:
        cause = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{what}: {cause}") from None


@contextmanager
def calm(*, offline: bool) -> Iterator[None]:
    """Let the libraries of the Hugging Face hub print errors alone, and download nothing if `offline`.

    They read their settings when they are imported, so those of imported ones are changed, too, and put back.
    Settings of the user's own environment about printing stay.
    """
    settings = {**(_OFFLINE if offline else {}), **{k: v for k, v in _QUIET.items() if k not in os.environ}}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    is_offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    attributes = _set_attributes(
        dict.fromkeys(_OFFLINE_PLACES, is_offline) | dict.fromkeys(_ASIDES, lambda *told: None)
    )
    verbosity = _be_quiet()
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    try:
        yield
    finally:
        harness.setLevel(level)
        if verbosity is not None:
            sys.modules["transformers"].utils.logging.set_verbosity(verbosity)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for module, attribute, was in attributes:
            setattr(sys.modules[module], attribute, was)


def _set_attributes(values: Mapping[tuple[str, str], object]) -> list[tuple[str, str, object]]:
    """Set attributes of modules that are imported, by module and name; returns what they were."""
    before = []
    for (module, attribute), value in values.items():
        if module in sys.modules and hasattr(sys.modules[module], attribute):
            before.append((module, attribute, getattr(sys.modules[module], attribute)))
            setattr(sys.modules[module], attribute, value)
    return before


def _be_quiet() -> int | None:
    """Hide the bars and warnings of libraries that are imported; returns what the level of warnings was."""
    if datasets := sys.modules.get("datasets"):
        datasets.disable_progress_bars()
    if diffusers := sys.modules.get("diffusers"):
        diffusers.utils.logging.disable_progress_bar()
    if not (transformers := sys.modules.get("transformers")):
        return None
    transformers.utils.logging.disable_progress_bar()
    verbosity: int = transformers.utils.logging.get_verbosity()
    if os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        transformers.utils.logging.set_verbosity_error()
    return verbosity
