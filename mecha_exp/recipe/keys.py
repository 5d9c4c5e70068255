"""Restricts a merge to some keys: policies for the others, by kind of key or by any other selector.

    for_keys(tsv_m(base, *experts), "matrix")                                  # all else gets the mean
    for_keys(tsv_m(base, *experts), {"embedding": "base", "default": "merge"})
    for_keys(tsv_m(base, *experts), "paper")                                   # as the authors' code has it

The result is a choice by key between recipes, so that a signature has it, and text, trees and plans show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mecha_exp.errors import ArgumentError, RecipeError, brief, did_you_mean
from mecha_exp.graph.by_key import DEFAULT, ByKey, table
from mecha_exp.graph.kinds import KIND, KINDS, kinds_in
from mecha_exp.graph.literals import SELECT, node_by_key
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, call, is_call
from mecha_exp.method_api.registry import all_methods

MERGE, MEAN, BASE, TASK_ARITHMETIC = "merge", "mean", "base", "task_arithmetic"
POLICIES = (MERGE, MEAN, BASE, TASK_ARITHMETIC)
"""What keys get: the merge itself; base + scale times the mean or the sum of the task vectors; the base."""

ALL, PAPER = "all", "paper"

_OWN_RECIPE = "Give a recipe for these keys: {kind:matrix: RECIPE, default: RECIPE}."


def for_keys(merged: Node, keys: str | Sequence[str] | Mapping[str, str] | None) -> Node:
    """A merge for some keys, and something simpler for the others.

    Args:
        merged: a call of a merge method.
        keys: which it is for: kinds of keys (`matrix`; see `KINDS`), or other selectors of values by key; the
            others get the mean. A mapping says for each what it gets, and for the `default`: `merge`; `mean`,
            which is base + scale mean_i (model_i - base) with the `scale` of the method, or 1, and the mean
            of the models of methods without a base; `task_arithmetic`, with the sum in place of the mean; or
            `base`. `paper` is what the authors' code does, and `all` or None is every key.

    Raises:
        RecipeError: an unknown kind or policy, or one that the merge has no models for; no key gets the
            merge; or the recipe is such a choice itself.
    """
    policies = _policies(merged, keys)
    if set(policies.values()) == {MERGE}:
        return merged
    if not isinstance(merged, MergeNode):
        raise RecipeError(
            f"keys: {merged!r} is not a call of a merge method, so there are no models to choose."
        )
    if merged.method.identifier == SELECT:
        raise RecipeError(
            "keys: the recipe says itself what each key gets. Say it in one place: there, or in keys."
        )
    try:
        recipe = node_by_key({name: made_by(merged, policy) for name, policy in policies.items()})
    except ArgumentError as error:  # masks and LoRA files beside models
        raise RecipeError(f"keys: {str(error).rstrip('.')}. {_OWN_RECIPE}") from None
    if MERGE not in policies.values():
        raise RecipeError(f"keys: no key gets '{MERGE}', so that the method would merge nothing.")
    return recipe


def made_by(merged: MergeNode, policy: str) -> Node:
    """What keys of a policy get.

    Raises:
        RecipeError: the method has no base, or no models.
    """
    if policy == MERGE:
        return merged
    arguments = dict(merged.arguments)
    base = arguments.get("base")
    if isinstance(base, Node) and policy == BASE:
        return base
    models = [
        child
        for name, child in merged.named_children
        if name != "base" and child.merge_space in ("weight", "delta")
    ]
    if not models or (base is None and policy != MEAN):
        raise RecipeError(
            f"keys: '{merged.method.identifier}' has no {'base' if models else 'models'}, so no key can get "
            f"'{policy}'. {_OWN_RECIPE}"
        )
    if base is None:
        return call("n_average", *models)
    assert isinstance(base, Node)
    scale = arguments.get("scale", 1.0)
    if policy == TASK_ARITHMETIC:
        return call("task_arithmetic", base, *models, scale=scale)
    deltas = [model - base if model.merge_space == "weight" else model for model in models]
    return call("add_difference", base, call("n_average", *deltas), alpha=scale)


def with_names(choice: MergeNode) -> ByKey | None:
    """The value by key of a choice between recipes, with what each is in place of its number.

    That is a policy, with its method if it is the merge, or else the method; None for other calls.
    """
    arguments: dict[str, Any] = dict(choice.arguments)
    which = arguments.get("which")
    if choice.method.identifier != SELECT or not isinstance(which, LiteralNode):
        return None
    if not isinstance(which.value, ByKey):
        return None
    names = _names(arguments["values"])
    default = which.value.default
    return replace(
        which.value,
        patterns=tuple((selector, names[number]) for selector, number in which.value.patterns),  # type: ignore[index]
        default=None if default is None else names[default],  # type: ignore[index]
    )


def main_call(recipe: Node) -> Node:
    """The merge of a recipe that is for some keys; any other recipe as it is."""
    if not is_call(recipe, SELECT):
        return recipe
    merged, _ = _told_apart(dict(recipe.arguments)["values"])  # type: ignore[arg-type]
    return merged or recipe


def merges_nothing(choice: MergeNode) -> str | None:
    """Why a bound choice is a mistake: its models have no key that the merge is for. None where they have."""
    which, merged = with_names(choice), main_call(choice)
    if which is None or which.anatomy is None or not isinstance(merged, MergeNode) or merged is choice:
        return None
    if merged.method.identifier in (name for name, _ in table(which)):
        return None
    return (
        f"keys: the models have no key that '{merged.method.identifier}' would be for. They have these "
        f"kinds: {', '.join(kinds_in(which.anatomy))}."
    )


def _names(recipes: Sequence[Node]) -> list[str]:
    """The name of each of some recipes: a policy beside a merge among them, or else its method."""
    merged, policy_of = _told_apart(recipes)
    if merged is not None:
        return [merged.method.identifier if node is merged else policy_of[node] for node in recipes]
    return [node.method.identifier if isinstance(node, MergeNode) else repr(node) for node in recipes]


def _told_apart(recipes: Sequence[Node]) -> tuple[MergeNode | None, dict[Node | None, str]]:
    """The merge that the others of some recipes are policies beside, and the name of each."""
    for merged in recipes:
        if isinstance(merged, MergeNode):
            policy_of = {_made_or_none(merged, policy): policy for policy in reversed(POLICIES)}
            if all(node in policy_of for node in recipes):
                return merged, policy_of
    return None, {}


def _made_or_none(merged: MergeNode, policy: str) -> Node | None:
    try:
        return made_by(merged, policy)
    except RecipeError:
        return None


def _policies(merged: Node, keys: Any) -> dict[str, str]:
    """The policy of each selector, and of the default."""
    if keys is None or keys == ALL:
        return {DEFAULT: MERGE}
    if keys == PAPER:
        return _of_paper(merged)
    if isinstance(keys, str):
        keys = [keys]
    if isinstance(keys, Sequence) and all(isinstance(name, str) for name in keys):
        keys = dict.fromkeys(keys, MERGE)
    if not isinstance(keys, Mapping) or not all(isinstance(name, str) for name in keys):
        raise RecipeError(
            f"keys: expected kinds of keys, or a mapping of them to policies, got {brief(keys)}"
        )
    selectors = [f"{KIND}{name}" if name in KINDS else name for name in keys]
    policies = {DEFAULT: MEAN, **dict(zip(selectors, keys.values(), strict=True))}
    if len({*selectors}) < len(selectors):
        raise RecipeError(f"keys: a kind is named twice, with and without '{KIND}': {', '.join(keys)}.")
    for name, policy in policies.items():
        if policy not in POLICIES:
            raise RecipeError(
                f"keys: '{name}' gets {policy!r}, expected one of {', '.join(POLICIES)}."
                f"{did_you_mean(str(policy), POLICIES)}"
            )
    return policies


def _of_paper(merged: Node) -> dict[str, str]:
    policies = merged.method.paper_keys if isinstance(merged, MergeNode) else None
    if policies is None:
        name = merged.method.identifier if isinstance(merged, MergeNode) else repr(merged)
        known = ", ".join(method.identifier for method in all_methods() if method.paper_keys)
        raise RecipeError(
            f"keys=paper: the keys that the authors of '{name}' leave out are not known here, but those of "
            f"{known}. Name kinds of keys: {', '.join(KINDS)}."
        )
    return dict(policies)
