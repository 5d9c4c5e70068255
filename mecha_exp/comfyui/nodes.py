"""The nodes beside those of methods: models, block weights, recipes, and merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mecha_exp.api import merge
from mecha_exp.comfyui import host
from mecha_exp.comfyui.widgets import BLOCKS, RECIPE
from mecha_exp.errors import ConfigError, RecipeError, brief
from mecha_exp.graph.by_key import DEFAULT
from mecha_exp.graph.literals import model
from mecha_exp.graph.nodes import Node, models_of
from mecha_exp.lab.content_hash import files_of
from mecha_exp.recipe import deserialize_path, fill, serialize, serialize_and_save
from mecha_exp.sources.search import find_model

SPACES = ("weight", "delta")
DTYPES = ("as the inputs", "float16", "bfloat16", "float32")


class ModelNode:
    """A model file that ComfyUI knows."""

    TITLE = "Mecha Model"
    CATEGORY = "mecha"
    DESCRIPTION = "A model for a recipe. Nothing is loaded before the merge."
    RETURN_TYPES = (RECIPE,)
    RETURN_NAMES = ("recipe",)
    FUNCTION = "open"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        about = {"default": "weight", "tooltip": "delta for a file of differences to a base"}
        return {"required": {"file": (host.model_names(), {}), "merge_space": (list(SPACES), about)}}

    @classmethod
    def IS_CHANGED(cls, file: str, **_: Any) -> str:
        """What differs once the file was replaced, so that what depends on it is made again."""
        return _state_of(host.model_path(file))

    def open(self, file: str, merge_space: str) -> tuple[Node]:
        """The model as a recipe."""
        return (model(host.model_path(file), merge_space=merge_space),)


class BlockWeightsNode:
    """Values by block, for any number of a merge method."""

    TITLE = "Mecha Block Weights"
    CATEGORY = "mecha"
    DESCRIPTION = "A line for each block, component, layer or pattern of keys: IN04 = 0.3"
    RETURN_TYPES = (BLOCKS,)
    RETURN_NAMES = ("by_block",)
    FUNCTION = "read"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        return {"required": {"values": ("STRING", {"multiline": True, "default": "IN00 = 0.5"})}}

    def read(self, values: str) -> tuple[dict[str, float]]:
        """The values by block.

        Raises:
            ConfigError: a line is not a name and a number, or names a block again, or all other blocks.
        """
        numbers: dict[str, float] = {}
        for number, line in enumerate(values.splitlines(), 1):
            name, separator, value = (part.strip() for part in line.partition("="))
            if not line.strip():
                continue
            if name == DEFAULT:
                raise ConfigError(
                    f"line {number}: the other blocks have the number of the method's own widget."
                )
            try:
                if not (separator and name) or name in numbers:
                    raise ValueError
                numbers[name] = float(value)
            except ValueError:
                again = f"line {number}: '{name}' has a value already." if name in numbers else None
                expected = (
                    f"line {number}: expected a block and a number such as IN04 = 0.3, got {brief(line)}."
                )
                raise ConfigError(again or expected) from None
        return (numbers,)


class LoadRecipeNode:
    """A recipe from a `.mecha` file."""

    TITLE = "Mecha Load Recipe"
    CATEGORY = "mecha"
    DESCRIPTION = "A recipe from a .mecha file. Its parameters a, b, ... are filled by what is connected."
    RETURN_TYPES = (RECIPE,)
    RETURN_NAMES = ("recipe",)
    FUNCTION = "load"
    PARAMETERS = 6

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        names = {
            "tooltip": "names of the recipe's parameters, in the order of the sockets, as in: base, a, b"
        }
        return {
            "required": {
                "path": ("STRING", {"default": ""}),
                "parameters": ("STRING", {"default": "", **names}),
            },
            "optional": {f"parameter_{n}": (RECIPE, {}) for n in range(1, cls.PARAMETERS + 1)},
        }

    @classmethod
    def IS_CHANGED(cls, path: str, **_: Any) -> str:
        """What differs once the recipe was edited, or one of its models replaced."""
        recipe = deserialize_path(Path(path).expanduser())
        models = [find_model(str(each.source), []) for each in models_of(recipe)]
        states = [_state_of(file) for each in models for file in files_of(each)]
        return " ".join([serialize(recipe), *states])

    def load(self, path: str, parameters: str = "", **sockets: Node | None) -> tuple[Node]:
        """The recipe with its parameters.

        Raises:
            RecipeError: there is no such file, it is not a recipe, or names and sockets do not agree.
        """
        names = [name.strip() for name in parameters.split(",") if name.strip()]
        slots = [sockets.get(f"parameter_{n}") for n in range(1, self.PARAMETERS + 1)]
        connected = [value for value in slots if value is not None]
        if len(names) != len(connected):
            raise RecipeError(f"parameters names {len(names)}, and {len(connected)} sockets are connected.")
        if repeated := [name for name in names if names.count(name) > 1]:
            raise RecipeError(f"parameters names '{repeated[0]}' twice.")
        recipe = deserialize_path(Path(path).expanduser())
        return (fill(recipe, dict(zip(names, connected, strict=True))) if names else recipe,)


class SaveRecipeNode:
    """Writes a recipe to a `.mecha` file."""

    TITLE = "Mecha Save Recipe"
    CATEGORY = "mecha"
    DESCRIPTION = "Writes a recipe to a .mecha file in ComfyUI's output folder."
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        return {"required": {"recipe": (RECIPE, {}), "name": ("STRING", {"default": "recipe"})}}

    def save(self, recipe: Node, name: str) -> dict[str, Any]:
        """Write the file; one of that name is replaced.

        Raises:
            ConfigError: the name leaves the folder.
        """
        path = _within(host.output_folder(), name, ".mecha")
        path.parent.mkdir(parents=True, exist_ok=True)
        serialize_and_save(recipe, path)
        return {"ui": {"text": [str(path)]}}


class MergeNode:
    """Merges a recipe in memory."""

    TITLE = "Mecha Merge"
    CATEGORY = "mecha"
    DESCRIPTION = "Merges a recipe in memory, to be used at once."
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "merge"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        return {"required": {"recipe": (RECIPE, {}), "dtype": (list(DTYPES), {"default": DTYPES[0]})}}

    def merge(self, recipe: Node, dtype: str) -> tuple[Any, Any, Any]:
        """MODEL, CLIP and VAE of the merge."""
        merged = merge(
            recipe, None, output_dtype=_dtype(dtype), strict_merge_space="weight", tqdm=host.ProgressBar
        )
        assert not isinstance(merged, Path)
        return host.load_parts(merged)


class MergeToFileNode:
    """Merges a recipe into a checkpoint file."""

    TITLE = "Mecha Merge to File"
    CATEGORY = "mecha"
    DESCRIPTION = "Merges a recipe into a file among ComfyUI's checkpoints, with the recipe in its header."
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("path",)
    FUNCTION = "merge"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        """The sockets and widgets, by name."""
        widgets = {"name": ("STRING", {"default": "merged"}), "dtype": (list(DTYPES), {"default": DTYPES[0]})}
        return {"required": {"recipe": (RECIPE, {}), **widgets}}

    def merge(self, recipe: Node, name: str, dtype: str) -> dict[str, Any]:
        """Write the file; one of that name is replaced once the merge is complete.

        Raises:
            ConfigError: the name leaves the folder.
        """
        path = _within(host.checkpoint_folder(), name, ".safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        merge(recipe, path, output_dtype=_dtype(dtype), tqdm=host.ProgressBar)
        return {"ui": {"text": [str(path)]}, "result": (str(path),)}


def _state_of(file: Path) -> str:
    """What differs once a file was replaced."""
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _dtype(word: str) -> str | None:
    return None if word == DTYPES[0] else word


def _within(folder: Path, name: str, suffix: str) -> Path:
    """A path below a folder, for a name that a workflow from elsewhere may give."""
    path = (folder / f"{name.removesuffix(suffix)}{suffix}").resolve()
    if not name.strip() or not path.is_relative_to(folder.resolve()):
        raise ConfigError(f"name: expected a name below {folder}, got {brief(name)}.")
    return path


NODES: dict[str, Any] = {
    "mecha_exp:model": ModelNode,
    "mecha_exp:block_weights": BlockWeightsNode,
    "mecha_exp:load_recipe": LoadRecipeNode,
    "mecha_exp:save_recipe": SaveRecipeNode,
    "mecha_exp:merge": MergeNode,
    "mecha_exp:merge_to_file": MergeToFileNode,
}
"""The nodes by the names that workflows keep."""
