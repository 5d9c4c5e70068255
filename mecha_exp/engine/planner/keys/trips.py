"""Plans the trips over the data that find numbers of the whole model.

What a reduction over all keys is called with is found when composites are expanded, key by key. Here the keys
are put together again: which of them count, in which order the numbers are found, and what each key adds.
A key counts where the recipe calls the method that asks for the number, also where a strength of 0 leaves
nothing of it. Keys that are copied, that a policy decides or that an input lacks do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mecha_exp.checkpoint import TensorInfo, dtype_name
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.model_values import (
    ModelValue,
    has_model_values,
    through,
    walk_through,
    with_model_values,
)
from mecha_exp.engine.ir.program import DeferredCall, Program
from mecha_exp.engine.ir.reductions import is_ranked
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Structure, Trip
from mecha_exp.engine.planner.keys.stacked_experts import sees_tensors
from mecha_exp.errors import MergeError, RecipeError, some
from mecha_exp.graph.nodes import ModelNode, Node, calls_of
from mecha_exp.method_api.method import MergeMethod

Reduced: TypeAlias = tuple[Any, ...]
"""A number of the whole model without its hyperparameters: the reduction, and what it reduces."""


@dataclass(frozen=True)
class Asked:
    """The numbers of the whole model that a recipe needs at some keys.

    Attributes:
        values: each number with the method that asks for it.
        methods: all methods that the recipe calls there.
    """

    values: Mapping[ModelValue, MergeMethod]
    methods: frozenset[MergeMethod]


NOTHING = Asked({}, frozenset())
"""The value for keys that do not count."""


def asked_by(root: Node, expanded: Mapping[Node, Node]) -> Asked:
    """The numbers of the whole model that a graph needs; `expanded` has the expansion of each node."""
    calls = calls_of(root)
    askers: dict[ModelValue, MergeMethod] = {}
    seen: set[Node] = set()
    wholes = with_model_values([expanded[call] for call in calls])
    needed = zip(calls, wholes, strict=True) if has_model_values(wholes[-1]) else ()
    for call, whole in needed:  # arguments before their users, so the innermost comes first
        new = [*walk_through([whole], seen)]
        askers |= {node: call.method for node in new if isinstance(node, ModelValue)}
        seen.update(new)
    return Asked(askers, frozenset(call.method for call in calls))


_Scope: TypeAlias = tuple[KeyPlan, ...]


class TripPlanner:
    """Puts together what is asked at each key, and lays out the trips.

    Args:
        keys: the plans of all keys.
        asked: what each job asks of the whole model at computed keys, by structure.
        info: the shape and dtype of a leaf at a key, or None.
        caches: the callers' caches of methods, by node.
    """

    def __init__(
        self,
        keys: Sequence[KeyPlan],
        asked: Mapping[Structure, Sequence[Asked]],
        info: Callable[[Node, str], TensorInfo | None],
        caches: Mapping[Node, Any],
    ) -> None:
        self._keys = [key for key in keys if key.numel and key.structure in asked]
        self._asked = asked
        self._info = info
        self._caches = caches
        self._programs: dict[Any, Program] = {}
        self._structures: dict[tuple[Structure, Program], Structure] = {}
        self._checked: dict[int, set[Node]] = {}  # by scope

    def trips(self) -> tuple[Trip, ...]:
        """The trips in order: numbers that others need come first.

        Raises:
            RecipeError: a number that is not one for all keys.
            MergeError: jobs whose numbers are over different keys.
        """
        scopes = self._scopes()
        for value, scope in scopes.items():
            self._check(value, scope)
        deepest: dict[Node, int] = {}  # the trips that a value needs, its own included
        trips: list[dict[ModelValue, _Scope]] = []
        for node in walk_through(scopes):
            deepest[node] = max((deepest[below] for below in through(node)), default=0)
            if isinstance(node, ModelValue):
                trips += [{}] if deepest[node] == len(trips) else []
                trips[deepest[node]][node] = scopes[node]
                deepest[node] += 1
        return tuple(map(self._trip, trips))

    def _scopes(self) -> dict[ModelValue, _Scope]:
        """The keys that count for each number."""
        classes: dict[int, KeyPlan] = {}  # keys with one graph share what is asked at them
        for key in self._keys:
            classes.setdefault(id(self._asked[key.structure]), key)
        scopes: dict[ModelValue, frozenset[int]] = {}
        for job in range(len(self._asked[self._keys[0].structure]) if self._keys else 0):
            asked = {
                first.key: (number, self._asked[first.structure][job]) for number, first in classes.items()
            }
            askers = {value: method for _, each in asked.values() for value, method in each.values.items()}
            for method in dict.fromkeys(askers.values()):
                _require_one_graph({key: each for key, (_, each) in asked.items()}, method)
            for value, method in askers.items():
                scope = frozenset(number for number, each in asked.values() if method in each.methods)
                if scopes.setdefault(value, scope) != scope:
                    raise MergeError(
                        f"'{value.method.identifier}' is asked for over other keys by one recipe than by "
                        "another, so they cannot be merged in one pass. Merge them one by one."
                    )
        keys = {
            scope: tuple(key for key in self._keys if id(self._asked[key.structure]) in scope)
            for scope in scopes.values()
        }
        return {value: keys[scope] for value, scope in scopes.items()}

    def _check(self, value: ModelValue, scope: _Scope) -> None:
        """Check that a number can be found over some keys."""
        name = value.method.identifier
        checked = self._checked.setdefault(id(scope), set())
        new = [*walk_through([value], checked)]
        checked.update(new)
        leaves = [node for node in new if isinstance(node, ModelNode | DeferredCall)]
        for key in scope if leaves else ():
            infos = [self._info(leaf, key.key) for leaf in leaves]
            if any(info is None or info.shape != key.shape for info in infos):
                raise RecipeError(
                    f"'{name}' is a number of the whole model, and what it reduces is not there at the key "
                    f"'{key.key}' though the recipe merges it. Leave that key out, or give it to every model."
                )
        dtypes = {_dtype_of(key): key.key for key in scope} if is_ranked(value.call) else {}
        if len(dtypes) > 1:
            words = " and others in ".join(f"{dtype_name(d)} ('{key}')" for d, key in dtypes.items())
            raise RecipeError(
                f"'{name}' ranks the values of all keys, of which some are computed in {words}. Compute all "
                "of them in one dtype: engine.compute_dtype=float64."
            )

    def _trip(self, scopes: Mapping[ModelValue, _Scope]) -> Trip:
        by_key: dict[str, list[ModelValue]] = {}
        for value, scope in scopes.items():
            for key in scope:
                by_key.setdefault(key.key, []).append(value)
        keys = [(key, by_key[key.key]) for key in self._keys if key.key in by_key]
        ranked = [(key, [v for v in values if is_ranked(v.call)]) for key, values in keys]
        ranked = [(key, values) for key, values in ranked if values]
        counts = {value: sum(key.numel for key in scope) for value, scope in scopes.items()}
        full, sample, again = (
            tuple(self._plan(key, values, sampled) for key, values in group)
            for group, sampled in ((keys, False), (ranked, True), (ranked, False))
        )
        return Trip(tuple(scopes), full, sample, again, counts)

    def _plan(self, key: KeyPlan, values: Sequence[ModelValue], sampled: bool) -> KeyPlan:
        """What a key adds to numbers of the whole model."""
        roots = tuple(value.call for value in values)
        kind = (roots, _dtype_of(key), sampled)
        if kind not in self._programs:
            self._programs[kind] = compile_program(roots, _dtype_of(key), self._caches, sampled)
        program, is_stack = self._programs[kind], key.experts is not None
        whole = [value for value in values if is_stack and sees_tensors(program, value.call.children)]
        if whole:
            raise RecipeError(
                f"'{whole[0].method.identifier}' is a number of the whole model, and what it reduces is "
                f"computed expert by expert at the key '{key.key}', which is not supported. "
                "stacked_experts=whole takes that key as one tensor."
            )
        if (key.structure, program) not in self._structures:
            self._structures[key.structure, program] = Structure(key.shape, program, key.structure.stored)
        return KeyPlan(key.key, self._structures[key.structure, program])


def _dtype_of(key: KeyPlan) -> torch.dtype:
    """The dtype that a key is computed in."""
    assert key.program is not None
    return key.program.dtype


def _require_one_graph(asked: Mapping[str, Asked], method: MergeMethod) -> None:
    """Check that a recipe reduces the same graph for a method at each key.

    Hyperparameters of the reduction itself may differ: each of their values has a number of its own. `asked`
    has the first key of each structure.
    """
    by_key = [
        (key, frozenset(_reduced(value) for value, asker in each.values.items() if asker is method))
        for key, each in asked.items()
    ]
    everything = frozenset[Reduced]().union(*(graphs for _, graphs in by_key))
    if all(graphs != everything for _, graphs in by_key):
        first, some_graphs = next((key, graphs) for key, graphs in by_key if graphs)
        others = [key for key, graphs in by_key if graphs - some_graphs]
        name = next(reduction for reduction, *_ in everything).identifier
        raise RecipeError(
            f"'{name}' is one number for the whole model, but what it reduces differs between keys: at "
            f"'{first}' it is another than at {some(others, 3)}. Values by block and choices between models "
            "do not go into it: give one value for all keys."
        )


def _reduced(value: ModelValue) -> Reduced:
    tensors = {spec.name for spec in value.method.signature.parameters if spec.is_tensor}
    return (value.method, *((name, nodes) for name, nodes in value.call.arguments if name in tensors))
