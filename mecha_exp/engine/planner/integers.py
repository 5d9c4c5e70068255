"""Tensors of whole numbers, which are copied and not merged: where the inputs differ, copying needs a reason.

A counter and a table of positions are the same for every model of an architecture, or do not matter. Any
other integers may be codes: of quantised weights, of a pruning mask, of a codebook. A model that has the
codes of one input and the weights of all of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from mecha_exp.checkpoint import is_arithmetic
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.planner.checks import Classes, MergedModels
from mecha_exp.engine.planner.keys.specialisation import KeyClass
from mecha_exp.errors import counted, some
from mecha_exp.families import POSITIONS
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.inputs import Sources
from mecha_exp.sources.source import same_bytes

COUNTERS = frozenset(
    {
        *("num_batches_tracked", "n_averaged", "num_updates", "num_calls", "cluster_usage_count"),
        *("step", "steps", "global_step", "iteration", "epoch", "initted", "inited", "initialized"),
        *(POSITIONS, "token_type_ids", "relative_position_index", "relative_coords_table"),
    }
)
"""The last words of keys that count something, or that number positions."""


COMPLEX = "C64"
"""The dtype of complex numbers in a header."""

_KINDS = (
    (
        False,
        "not floating point",
        "Merging would copy them from the first input beside weights of all. If they are codes of quantised "
        "weights, merge the models as they were before. If they only count or number something, "
        "on_integers=base takes them from the first input.",
    ),
    (
        True,
        f"complex ({COMPLEX})",
        "Complex numbers are not merged. Store their real and imaginary parts as two floating-point tensors "
        "(torch.view_as_real), or take them from the first input with on_integers=base.",
    ),
)
"""What is copied: whether it is complex, its words, and the cure where it differs."""


def is_counter(key: str) -> bool:
    """Whether a key is a counter or a table of positions, by its last word."""
    return key.rpartition(".")[2] in COUNTERS


def different_integers(
    classes: Classes, merged: MergedModels, sources: Sources, configs: ConfigInference
) -> Iterator[str]:
    """Messages about keys of whole or complex numbers that differ between the models merged there.

    Args:
        classes: of the keys.
        merged: the models that one recipe merges at the keys of each class.
        sources: the opened models.
        configs: infers the model configs; a config that has a key says that it may be copied.
    """
    of_integers = {
        each: models
        for each, models in merged.items()
        if len(models) > 1 and not is_arithmetic(each.stored[models[0]].dtype)
    }
    copied = ((key, of_integers[each]) for key, each in classes.items() if each in of_integers)
    different = [
        key
        for key, models in copied
        if not is_counter(key)
        and not _is_of_config(key, models[0], configs)
        and not same_bytes(key, [sources[model] for model in models])
    ]
    for is_complex, what, cure in _KINDS:
        keys = [key for key in different if (_dtype(classes[key], merged) == COMPLEX) is is_complex]
        if keys:
            names = " and ".join(dict.fromkeys(sources[model].name for model in merged[classes[keys[0]]]))
            count = counted(len(keys), f"key is {what} and differs", f"keys are {what} and differ")
            yield f"{count} between the inputs: {some(keys)} (first between {names}). {cure}"


def _dtype(each: KeyClass, merged: MergedModels) -> str:
    return each.stored[merged[each][0]].dtype


def _is_of_config(key: str, model: ModelNode, configs: ConfigInference) -> bool:
    """Whether the model config of a model knows the key."""
    config = configs.only_fit(model)
    return config is not None and config.info_of(key) is not None
