"""Compositions of Hydra that the commands of one process share: to compose takes longer than a sweep."""

import functools
import pickle
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf, read_write

from mecha_exp.app.config.user_folder import USER_FOLDER

OURS = Path(__file__).parents[2] / "conf"
_compose, _known = hydra.compose, dict[tuple[str, ...], bytes]()


def composed_once(name: str, words: Sequence[str], *, return_hydra_config: bool) -> DictConfig:
    """`hydra.compose`, which reads the files of `conf` once for each choice of options.

    Folders and recipes of a test's own are composed each time.
    """
    if USER_FOLDER.get() or not all(map(_is_of_ours, words)):
        return _compose(name, words, return_hydra_config=return_hydra_config)
    key = (name, *words)
    if key not in _known:
        composed = _compose(name, words, return_hydra_config=return_hydra_config)
        OmegaConf.clear_cache(composed)  # such as the time in the names of folders
        _known[key] = pickle.dumps(composed)
    config: DictConfig = pickle.loads(_known[key])
    with read_write(config.hydra.runtime):
        config.hydra.runtime.cwd = str(Path.cwd())
    return config


@functools.cache
def _is_of_ours(word: str) -> bool:
    """Whether a word chooses an option of our files, and not a folder or a method of a test's own."""
    group, _, option = word.lstrip("+").partition("=")
    return "searchpath" not in group and (group != "recipe" or (OURS / group / f"{option}.yaml").is_file())
