"""Merging in the form of mergecraft: functions of torch modules, pipelines, state dicts and names of models.

    from mecha_exp.mergecraft import ties

    merged = ties(["base", "a", "b"], task="text-generation", k=0.2)

The formulas are those of this package; docs/mergecraft.md says where mergecraft has others.
"""

from mecha_exp.mergecraft.arithmetic import StateDict, dict_map
from mecha_exp.mergecraft.decorators import layer_merge, model_merge
from mecha_exp.mergecraft.glue import evaluate_glue_pipeline
from mecha_exp.mergecraft.methods import dare, fisher, slerp, soup, stock, task, ties

__all__ = [
    "StateDict",
    "dare",
    "dict_map",
    "evaluate_glue_pipeline",
    "fisher",
    "layer_merge",
    "model_merge",
    "slerp",
    "soup",
    "stock",
    "task",
    "ties",
]
