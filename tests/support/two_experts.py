"""A base of zeros and two experts along two axes, whose merge is the pair of their weights, for tests."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

INPUTS = {"base": (0.0, 0.0), "a": (1.0, 0.0), "b": (0.0, 1.0)}

DISTANCE = """
import time
from pathlib import Path
from mecha_exp import evaluator

@evaluator("test_distance", metric="distance", direction="minimize")
def distance(state_dict):
    x, y = state_dict["w"].tolist()
    time.sleep(0.01)  # so that processes beside one another take turns
    with Path("measured.txt").open("a") as file:
        print(x, y, file=file)
    if Path("limit.txt").exists() and x > float(Path("limit.txt").read_text()):
        raise ArithmeticError("too far")
    return {"distance": (x - 0.3) ** 2 + (y - 0.8) ** 2}
"""
"""A plugin: the squared distance of the pair from (0.3, 0.8); it fails beyond the limit in `limit.txt`."""


def write_two_experts(folder: Path, plugin: str = DISTANCE, keys: Sequence[str] = ("w",)) -> list[str]:
    """Write the three models and a plugin, and return the words that choose them."""
    for name, pair in INPUTS.items():
        save_file({key: torch.tensor(pair) for key in keys}, folder / f"{name}.safetensors")
    (folder / "plugin.py").write_text(plugin)
    experts = f"models.experts=[{folder}/a.safetensors,{folder}/b.safetensors]"
    return [f"models.base={folder}/base.safetensors", experts, f"plugins=[{folder}/plugin.py]"]


def without(usual: dict[str, str], words: Sequence[str]) -> list[str]:
    """The usual words whose keys other words do not set."""
    given = {word.partition("=")[0] for word in words}
    return [f"{key}={value}" for key, value in usual.items() if key not in given]
