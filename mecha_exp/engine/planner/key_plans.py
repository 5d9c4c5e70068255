"""Lays out single keys of a merge: shape, dtypes, the program, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic, torch_dtype
from mecha_exp.checkpoint.dtypes import Layout, floating_dtype
from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.expansion import expand, without_factors
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.model_values import with_model_values
from mecha_exp.engine.ir.program import DeferredCall, Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.by_key import INPUT
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Output, Structure, Trip
from mecha_exp.engine.planner.keys.running_statistics import (
    RunningStatistics,
    describe,
    is_running_statistic,
)
from mecha_exp.engine.planner.keys.specialisation import KeyClass, PerKeyGraph, Specialisation
from mecha_exp.engine.planner.keys.stacked_experts import doubt, split_notice
from mecha_exp.engine.planner.keys.trips import NOTHING, Asked, TripPlanner, asked_by
from mecha_exp.engine.planner.plan import Job
from mecha_exp.engine.scaled_fp8 import DTYPE, MARKER, is_linear, scale_key, scaled
from mecha_exp.engine.statistics import as_stored, moments, statistics_of
from mecha_exp.errors import RecipeError, some
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.method_api.views import ModelView


@dataclass(frozen=True, eq=False)
class _Roots:
    """The expanded graphs of all jobs at a key, their uses, and the numbers of the model that they need."""

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    statistics: tuple[tuple[int, ModelNode, int], ...]
    scales: tuple[tuple[int, int, int], ...]
    asked: tuple[Asked, ...]


class KeyPlanner:
    """Plans single keys of some jobs; keys of one class share their structure, unless their names count."""

    def __init__(
        self, jobs: Sequence[Job], graph: PerKeyGraph, options: EngineOptions, quantised_prefix: str = ""
    ) -> None:
        self._prefix = quantised_prefix
        self._jobs = jobs
        self._graph = graph
        self._options = options
        self._names_count = any(job.quantize or isinstance(job.dtype, ByKey) for job in jobs)
        self._of_class: dict[KeyClass, Structure] = {}
        self._structures: dict[tuple[object, ...], Structure] = {}
        self._asked: dict[Structure, tuple[Asked, ...]] = {}
        self._roots: dict[tuple[object, ...], _Roots] = {}
        self._programs: dict[tuple[_Roots, torch.dtype], Program] = {}
        self._plain: dict[Structure, Structure] = {}
        self._plain_programs: dict[tuple[Program, frozenset[Node]], Program] = {}
        self._running = RunningStatistics(options.running_stats, graph.lazy)
        self._leaves: dict[Node | None, ModelNode | DeferredCall | None] = {}

    def plan(self, key: str, alike: KeyClass) -> KeyPlan:
        """The plan of one key.

        Raises:
            RecipeError: a recipe that gives one number for the key.
        """
        structure = self._of_class.get(alike)
        if structure is None or is_running_statistic(key):
            structure = self._structure_at(key, alike)
        split = structure if len(structure.shape) < 2 else self._split(key, structure)
        return KeyPlan(key, self._without_factors(split))

    def _structure_at(self, key: str, alike: KeyClass) -> Structure:
        """The structure of a key as a whole, noted for its class unless its name counts."""
        specialised, is_statistic = alike.specialised, is_running_statistic(key)
        if is_statistic:
            specialised = self._running.apply(key, specialised, self._info_at(alike))
        leaves = [self._first_leaf(self._root(job, specialised)) for job in range(len(self._jobs))]
        infos = [self._info_of(leaf, key, alike) for leaf in leaves]
        shape = next((info.shape for info in infos if info), ())
        if any(info and not is_arithmetic(info.dtype) for info in infos):
            first = enumerate(zip(leaves, infos, strict=True))
            copies = tuple((job, leaf, info.dtype) for job, (leaf, info) in first if leaf and info)
            structure = Structure(shape, None, alike.stored, copies=copies)
        else:
            dtypes = tuple(self._dtype_at(job, key, specialised, info) for job, info in enumerate(infos))
            quantised = tuple(
                bool(job.quantize) and is_linear(key, shape, self._prefix) for job in self._jobs
            )
            structure = self._computed(alike, specialised, shape, dtypes, quantised)
        if not (is_statistic or self._names_count or any(isinstance(leaf, DeferredCall) for leaf in leaves)):
            self._of_class[alike] = structure
        return structure

    def _computed(
        self,
        alike: KeyClass,
        specialised: Specialisation,
        shape: tuple[int, ...],
        dtypes: tuple[str | None, ...],
        quantised: tuple[bool, ...],
    ) -> Structure:
        """The structure of keys that are computed."""
        kind = (alike, specialised, shape, dtypes, quantised)
        if kind not in self._structures:
            roots = self._roots_at(specialised, dtypes, quantised)
            dtype = self._options.arithmetic([info.dtype for info in alike.stored.values()])
            parts = (roots.outputs, roots.statistics, (), roots.scales)
            structure = Structure(shape, self._program(roots, dtype), alike.stored, *parts)
            self._structures[kind], self._asked[structure] = structure, roots.asked
        return self._structures[kind]

    def _split(self, key: str, structure: Structure) -> Structure:
        """The structure of a key that is merged expert by expert, if it is."""
        if structure.program is None:
            return structure
        program = structure.program
        results = [program.roots[output.root] for output in structure.outputs]
        model = next(iter(program.models), None)
        experts = self._graph.lazy.stacks.experts_at(key, structure.shape, model, program, results)
        if experts is None:
            return structure
        if structure.scales:
            raise RecipeError(
                f"the key '{key}' holds several experts and cannot be quantised, as it would have one scale: "
                "leave out quantize, or let its model config say 'stacked: false'."
            )
        kind = (structure, experts)
        if kind not in self._structures:
            split = replace(structure, experts=experts)
            self._structures[kind], self._asked[split] = split, self._asked[structure]
        return self._structures[kind]

    def _without_factors(self, structure: Structure) -> Structure:
        """The structure without the calls for which another graph stands, at keys without their factors."""
        if structure not in self._plain:
            self._plain[structure] = self._find_plain(structure)
        return self._plain[structure]

    def _find_plain(self, structure: Structure) -> Structure:
        program = structure.program
        unmade: frozenset[Node] = program.unmade(structure.part_shape) if program else frozenset()
        if program is None or not unmade:
            return structure
        kind = (program, unmade)
        if kind not in self._plain_programs:
            replaced: dict[Node, Node] = {}
            roots = without_factors(program.roots, unmade, replaced)
            self._graph.carry_caches(replaced)
            is_new = roots != program.roots
            compiled = compile_program(roots, program.dtype, self._graph.caches) if is_new else program
            self._plain_programs[kind] = compiled
        if self._plain_programs[kind] is program:
            return structure
        plain = replace(structure, program=self._plain_programs[kind])
        self._asked[plain] = self._asked[structure]
        return self._without_factors(plain)

    def trips(self, plans: Sequence[KeyPlan]) -> tuple[Trip, ...]:
        """The trips that find what keys need of the whole model."""
        if not any(asked.values for each in self._asked.values() for asked in each):
            return ()
        return TripPlanner(plans, self._asked, self._graph.lazy.info, self._graph.caches).trips()

    def layouts(self, plans: Sequence[KeyPlan]) -> tuple[Layout, ...]:
        """The dtype and shape of every key of each job's output."""
        layouts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in self._jobs]
        for plan in plans:
            for job, tensor in plan.structure.tensors:
                layouts[job][plan.key] = tensor
            for job in plan.structure.quantised_by:
                layouts[job][scale_key(plan.key)] = ("F32", ())
        for quantising, layout in zip(self._jobs, layouts, strict=True):
            if quantising.quantize:
                layout[self._prefix + MARKER] = (DTYPE, (0,))
        return tuple(layouts)

    def _require_tensors(self, program: Program, outputs: Sequence[Output]) -> None:
        for output in outputs:
            extent = program.extents[program.roots[output.root]]
            if extent in (Extent.SMALL, Extent.FACTOR):
                what = "one number" if extent is Extent.SMALL else "a factor"
                raise RecipeError(
                    f"the recipe {self._jobs[output.job].recipe!r} gives {what} for a key, not a tensor, "
                    "so it makes no model. Use it as an argument of another method."
                )

    def _info_at(self, alike: KeyClass) -> TensorInfo | None:
        """The shape and dtype of the first model that is merged at the keys of a class."""
        models = (model for job in range(len(self._jobs)) for model in alike.specialised.merged(job))
        return next((alike.stored[model] for model in models), None)

    def _info_of(self, leaf: ModelNode | DeferredCall | None, key: str, alike: KeyClass) -> TensorInfo | None:
        """The shape and dtype of the first input of a graph."""
        if isinstance(leaf, DeferredCall):
            return self._graph.lazy.info(leaf, key)
        return None if leaf is None else alike.stored[leaf]

    @property
    def notices(self) -> list[str]:
        """Sentences about the decisions on the keys that have been planned."""
        by_policy: dict[str, dict[str, None]] = {}
        for (_, policy), keys in self._running.policies.items():
            by_policy.setdefault(policy, {}).update(dict.fromkeys(keys))
        notices = [describe(policy, len(keys), some(keys, 3)) for policy, keys in by_policy.items()]
        split = list(self._graph.lazy.stacks.split)
        return [*notices, split_notice(split)] if split else notices

    def check_stacks(self) -> None:
        """Raise a RecipeError for keys that look like stacks of experts although nothing says so."""
        if doubtful := list(self._graph.lazy.stacks.doubtful):
            raise RecipeError(doubt(doubtful))

    def _root(self, job: int, specialised: Specialisation) -> Node | None:
        """The graph of a job at a key, after `on_missing` is applied; None if the key is left out."""
        if not specialised.lacking[job]:
            return specialised.roots[job]
        held = specialised.held[job]
        return held[0] if held and self._options.on_missing != "skip" else None

    def _dtype_at(
        self, job: int, key: str, specialised: Specialisation, info: TensorInfo | None
    ) -> str | None:
        """The stored dtype of a result: as the job says, or the recipe's last cast, or the first input."""
        if info is None:
            return None
        dtype = self._jobs[job].dtype
        if isinstance(dtype, ByKey):
            name = str(dtype(key))
            dtype = None if name == INPUT else torch_dtype(name)
        if dtype is not None:
            return dtype_name(dtype)
        root = self._root(job, specialised)
        return (root and dtype_of_cast(root)) or info.dtype

    def _first_leaf(self, root: Node | None) -> ModelNode | DeferredCall | None:
        """The first input of a graph: a result has its shape and dtype."""
        if root not in self._leaves:
            leaves = (n for n in walk(root) if isinstance(n, ModelNode | DeferredCall)) if root else iter(())
            self._leaves[root] = next(leaves, None)
        return self._leaves[root]

    def _roots_at(
        self, specialised: Specialisation, dtypes: tuple[str | None, ...], quantised: tuple[bool, ...]
    ) -> _Roots:
        """The roots of a program; the same object for keys with one specialisation and equal dtypes."""
        arguments = (specialised, dtypes, quantised)
        if arguments not in self._roots:
            self._roots[arguments] = self._build_roots(*arguments)
        return self._roots[arguments]

    def _build_roots(
        self, specialised: Specialisation, dtypes: tuple[str | None, ...], quantised: tuple[bool, ...]
    ) -> _Roots:
        nodes: list[Node] = []
        outputs: list[Output] = []
        scales: list[tuple[int, int, int]] = []
        statistics: list[tuple[int, ModelNode, int]] = []
        asked = [NOTHING] * len(self._jobs)

        def add(node: Node) -> int:
            nodes.append(node)
            return len(nodes) - 1

        for index, job in enumerate(self._jobs):
            recipe, stored = self._root(index, specialised), dtypes[index]
            if recipe is None or stored is None:
                continue
            expanded: dict[Node, Node] = {}
            (merged,) = self._expand([recipe], expanded)
            if isinstance(recipe, MergeNode):
                asked[index] = asked_by(recipe, expanded)
            is_made = job.output is not None or job.statistics  # overflows count even if nothing is written
            if quantised[index]:
                codes, scale, result = scaled(merged)
                if is_made:
                    outputs.append(Output(index, add(codes), DTYPE))
                    scales.append((index, add(scale), add(moments(result, merged))))
            else:
                result = as_stored(merged, dtype=stored)
                if is_made:
                    outputs.append(Output(index, add(merged), stored))
            if job.statistics:
                inputs = [m for m in specialised.merged(index) if not isinstance(m, ModelView)]
                measured = statistics_of(result, inputs)
                statistics += [(index, model, add(node)) for model, node in measured.items()]
        roots = self._expand(nodes, {})
        return _Roots(roots, tuple(outputs), tuple(statistics), tuple(scales), tuple(asked))

    def _expand(self, nodes: Sequence[Node], expanded: dict[Node, Node]) -> tuple[Node, ...]:
        """Replace composites by the calls that they are composed of, and numbers of the model by leaves."""
        roots = expand(nodes, expanded)
        self._graph.carry_caches(expanded)
        replaced: dict[Node, Node] = {}
        roots = with_model_values(roots, replaced)
        self._graph.carry_caches(replaced)
        return roots

    def _program(self, roots: _Roots, dtype: torch.dtype) -> Program:
        if (roots, dtype) not in self._programs:
            program = compile_program(roots.nodes, dtype, self._graph.caches)
            self._require_tensors(program, roots.outputs)
            self._programs[roots, dtype] = program
        return self._programs[roots, dtype]


def dtype_of_cast(root: Node) -> str | None:
    """The dtype of the cast that a recipe ends in (`recipe.to(dtype=...)`), or None."""
    if not isinstance(root, MergeNode) or root.method is not resolve_method("cast"):
        return None
    dtype = dict(root.arguments).get("dtype")
    return dtype_name(floating_dtype(str(dtype.value))) if isinstance(dtype, LiteralNode) else None
