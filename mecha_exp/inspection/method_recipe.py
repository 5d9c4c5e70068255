"""A first recipe file for a merge method, made of its signature: `info methods NAME --recipe`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import yaml

from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec

ALPHA, SCALE = "alpha", "scale"
"""The parameters that a recipe calls `alpha`, and that the group `blocks` may set for single blocks."""


def recipe_text(method: MergeMethod) -> str:
    """The YAML of a recipe that calls a method: its hyperparameters with their defaults, then the call.

    Models are the base, the list of experts, or single experts in the order of the parameters. A parameter
    without a default gets the value null, which has to be replaced.
    """
    models, hyperparameters = [], []
    for spec in method.signature.parameters:
        if not spec.is_model:
            hyperparameters.append(spec)
        elif spec.required or spec.variadic or spec.name == "base":
            models.append(spec)
    formula = (inspect.getdoc(method) or "").partition("\n")[0]
    strength = ALPHA if ALPHA in {spec.name for spec in hyperparameters} else SCALE
    lines = ["# @package _global_", f"# {formula}"]
    lines += [_setting(spec, ALPHA if spec.name == strength else spec.name) for spec in hyperparameters]
    lines += ["recipe:", f"  method: {method.identifier}", *_models(models)]
    lines += [_argument(spec, spec.name == strength) for spec in hyperparameters]
    return "\n".join(lines) + "\n"


def _setting(spec: ParameterSpec, name: str) -> str:
    default = None if spec.required else spec.default
    value = yaml.safe_dump(default, default_flow_style=True).partition("\n")[0]
    return f"{name}: {value}" + (f"   # {spec.help}" if spec.help else "")


def _models(specs: list[ParameterSpec]) -> Iterator[str]:
    experts = 0
    for spec in specs:
        if spec.variadic:
            yield f"  {spec.name}: ${{models.experts}}"
        elif spec.name == "base":
            yield "  base: ${models.base}"
        else:
            yield f"  {spec.name}: ${{models.experts.{experts}}}"
            experts += 1


def _argument(spec: ParameterSpec, by_block: bool) -> str:
    if by_block:
        return f'  {spec.name}: {{default: "${{alpha}}", blocks: "${{blocks}}"}}'
    return f"  {spec.name}: ${{{spec.name}}}"
