"""Recipe texts of sd-mecha before 0.1.0, which have no version line.

    model "a" "sd1" "base"
    parameter "b" "BASE" "sd1"
    dict sd1_txt_default=0 sd1_unet_block_in3=0.7
    merge "weighted_sum" &0 &1 alpha=&2

A model has an architecture and a type, merge spaces are BASE and DELTA, `merge` was `call` at first, and a
dictionary names the components and blocks of an architecture. All of it is translated to version 0.1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mecha_exp.errors import RecipeError, did_you_mean
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.legacy_strengths import Strengths, part_of_word
from mecha_exp.graph.nodes import ModelNode, Node, ParameterNode
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.recipe.text_reader import Arguments, Dialect, call, read_dict

CONFIGS = {
    "sd1": "sd1-ldm",
    "sdxl": "sdxl-sgm",
    "sd3": "sd3-comfyui",
    "flux": "flux-flux",
}
"""The model config of an architecture."""

SPACES = {"BASE": "weight", "DELTA": "delta"}
RENAMED = {"rotate": {"alpha": "alignment", "beta": "alpha"}}
"""Arguments that have another name now, by method."""

_LORA = (
    "cannot be read from the old format, which does not say what model it is for. In version 0.1.0 it is "
    '`merge "lora_delta" &1 &0`, with the lines of the LoRA and of its base.'
)

_FIRST_WORD = re.compile(r"\s*(dict|model|lora|parameter|merge|call)\b")


def is_legacy(line: str) -> bool:
    """Whether the first line of a text is in the old format."""
    return _FIRST_WORD.match(line) is not None


def _model(arguments: Arguments) -> Node:
    path = arguments.word("a path in quotes after 'model'")
    words = arguments.take("model_arch", "model_type")
    config = _config(words.get("model_arch"))
    kind = words.get("model_type", "base")
    if kind == "lora":
        raise RecipeError(f"a model of type 'lora' {_LORA}")
    if kind != "base":
        raise RecipeError(
            f"a model of type '{kind}' cannot be read from the old format, only one of type 'base': convert "
            "it to the keys of the model first."
        )
    return ModelNode(path, "weight", config)


def _lora(arguments: Arguments) -> Node:
    arguments.word("a path in quotes after 'lora'")
    raise RecipeError(f"a LoRA {_LORA}")


def _parameter(arguments: Arguments) -> Node:
    name = arguments.word("a name in quotes after 'parameter'")
    words = arguments.take("merge_space", "model_arch")
    space = words.get("merge_space", "BASE")
    if space not in SPACES:
        raise RecipeError(f"unknown merge space '{space}'.{did_you_mean(str(space), SPACES)}")
    return ParameterNode(name, SPACES[space], _config(words.get("model_arch")))


def _merge(arguments: Arguments) -> Node:
    method = resolve_method(arguments.word("the name of a method in quotes"))
    renamed = RENAMED.get(method.identifier, {})
    named = {
        renamed.get(name, name): _hyperparameter(method, renamed.get(name, name), value)
        for name, value in arguments.named.items()
    }
    return call(method, arguments, named)


def _hyperparameter(method: MergeMethod, name: str, value: Any) -> Any:
    """A number in the type of the method's parameter; a dictionary as strengths by key."""
    if isinstance(value, Mapping):
        return strengths(value)
    if isinstance(value, float | int) and name in method.signature.names:
        interface = method.signature[name].interface
        if interface is bool:
            return value > 0
        if interface is int and value == int(value):
            return int(value)
    return value


def strengths(by_word: Mapping[str, Any]) -> ByKey:
    """Strengths by component and block as patterns over keys; any other key has 0.

    >>> strengths({"sd1_txt_default": 0.2}).patterns
    (('cond_stage_model.transformer.text_model', 0.2),)
    """
    return Strengths({part_of_word(word): value for word, value in by_word.items()}).by_key()


def _config(arch: Any) -> str | None:
    """The model config of an architecture; None for an unknown one, which is then detected."""
    if arch is not None and not isinstance(arch, str):
        raise RecipeError(f"expected an architecture in quotes, found {arch!r}")
    return CONFIGS.get(arch or "")


DIALECT = Dialect(
    {
        "dict": read_dict,
        "model": _model,
        "lora": _lora,
        "parameter": _parameter,
        "merge": _merge,
        "call": _merge,
    },
    escapes=False,
)
"""The format without a version line. A backslash is an ordinary character, as in a path of Windows."""
