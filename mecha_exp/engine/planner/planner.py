"""What a merge will do, from the headers of its inputs alone: keys, programs, bytes, and what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mecha_exp.checkpoint import TensorInfo, dtype_name, is_arithmetic, parse_dtype, torch_dtype
from mecha_exp.checkpoint.shards import Layout
from mecha_exp.engine.compiler.fusion import choose_backends
from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.engine.ir.program import DeferredCall, Program, compile_program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner import checks
from mecha_exp.engine.planner.batches import OMIT_NON_FINITE, groups_of
from mecha_exp.engine.planner.by_key import INPUT, Binder
from mecha_exp.engine.planner.formats import in_one_format
from mecha_exp.engine.planner.keys.extra_keys import converted, find_extras, left_out, notices_of, problems_of
from mecha_exp.engine.planner.keys.missing_parts import Parts
from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph, Specialisation
from mecha_exp.engine.planner.plan import Job, KeyPlan, Output, Plan
from mecha_exp.engine.planner.resolution import ModelView
from mecha_exp.engine.planner.vocabulary import unify_vocabularies
from mecha_exp.engine.report import Notice
from mecha_exp.engine.statistics import statistics_of
from mecha_exp.errors import CheckpointError, MergeError, Problems, RecipeError, some
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.recipe.templates import require_filled
from mecha_exp.sources.finite_keys import FiniteSource
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.lora import AdapterSource
from mecha_exp.sources.source import Source


@contextmanager
def plan(jobs: Sequence[Job], options: EngineOptions | None = None) -> Iterator[Plan]:
    """Open the inputs, check everything, and lay out the work. Nothing is written.

    Raises:
        CheckpointError: inputs that cannot be read or do not fit each other; all problems at once.
        RecipeError: recipes that cannot be run on these keys.
        MergeError: whole tensors that do not fit the memory budget; jobs that cannot share a pass (see
            `batches`).
    """
    options = options or EngineOptions()
    require_filled(job.recipe for job in jobs)
    recipes = [job.recipe for job in jobs]
    with open_sources(models_of(*recipes), options.model_dirs) as opened:
        _require_one_batch(recipes, opened, options)
        sources, lines = in_one_format(recipes, opened)
        notes = [Notice(line) for line in lines]
        extra = _settle_extras(opened, sources, options, notes)
        looked_through = set(sources) if options.on_nonfinite == "skip" else _only_finite(recipes)
        finite = {model: FiniteSource(sources[model]) for model in looked_through}
        notes += [Notice(line) for line in _spoilt(finite.values())]
        sources |= finite
        sources = unify_vocabularies(sources, options)
        yield _Planner(tuple(_bound(jobs, Binder(sources))), options, sources, notes, extra).plan()


def _require_one_batch(
    recipes: Sequence[Node], opened: Mapping[ModelNode, Source], options: EngineOptions
) -> None:
    if len(set(groups_of(recipes, opened, options))) > 1:
        raise MergeError(
            "these recipes read models that differ in their keys, or in the order or the shapes of these, so "
            "that they cannot be merged in one pass. Plan them one by one; merge_many does."
        )


def _settle_extras(
    opened: Mapping[ModelNode, Source],
    sources: Mapping[ModelNode, Source],
    options: EngineOptions,
    notes: list[Notice],
) -> frozenset[str]:
    """The keys that are left out as no model config knows them; `notes` is told which.

    Raises:
        CheckpointError: there are such keys, and that is an error.
    """
    extras = find_extras(opened, of_relatives=options.on_extra == "error")
    if options.on_extra == "keep":
        notes += converted([model for model in sources if sources[model] is not opened[model]], extras)
        return frozenset()
    if options.on_extra == "error":
        problems = Problems()
        problems.add_all(problems_of(extras.values()))
        problems.raise_as(CheckpointError)
    notes += notices_of(extras.values())
    return left_out(extras, opened)


def _spoilt(sources: Iterable[FiniteSource]) -> list[str]:
    """A line about each input that has keys which count as missing."""
    return [
        f"{source.name}: {len(source.spoilt)} keys count as missing, since they have values that are not "
        f"finite: {some(sorted(source.spoilt))}"
        for source in sorted(sources, key=lambda source: str(source.name))
        if source.spoilt
    ]


def _only_finite(recipes: Sequence[Node]) -> set[ModelNode]:
    """The models that a recipe wants without their keys that are not finite."""
    models = set()
    for node in walk(*recipes):
        if isinstance(node, MergeNode) and node.method.identifier == OMIT_NON_FINITE:
            (child,) = node.children
            if not isinstance(child, ModelNode):
                raise RecipeError(
                    f"{OMIT_NON_FINITE}: expected a model that is read, got {child!r}, whose values are "
                    "known only when the output is laid out already. Apply it to the models below."
                )
            models.add(child)
    return models


def _bound(jobs: Sequence[Job], binder: Binder) -> Iterator[Job]:
    """The jobs with every value by key bound to its model."""
    for job in jobs:
        new: dict[Node, Node] = {}
        (recipe,) = binder.bind([job.recipe], new)
        caches = {new.get(node, node): cache for node, cache in job.caches.items()}
        dtype = binder.bind_beside(job.dtype, [recipe]) if isinstance(job.dtype, ByKey) else job.dtype
        yield replace(job, recipe=recipe, caches=caches, dtype=dtype)


class _Planner:
    """Builds a `Plan`; programs are shared between the keys of one structure."""

    def __init__(
        self,
        jobs: tuple[Job, ...],
        options: EngineOptions,
        sources: Mapping[ModelNode, Source],
        notes: Sequence[Notice],
        extra: Collection[str],
    ) -> None:
        self._jobs = jobs
        self._options = options
        caches = {node: cache for job in jobs for node, cache in job.caches.items()}
        self._graph = PerKeyGraph([job.recipe for job in jobs], sources, options, caches)
        self._sources = self._graph.sources
        self._parts = Parts(self._sources)
        self._roots: dict[tuple[object, ...], _Roots] = {}
        self._programs: dict[tuple[Node, ...], Program] = {}
        self._leaves: dict[Node | None, ModelNode | DeferredCall | None] = {}
        self._extra = extra
        self._warnings: list[Notice] = list(notes)

    def plan(self) -> Plan:
        """Check, then lay out every key."""
        self._check_recipes()
        recipes = self._graph.roots
        keys = (key for key in self._graph.candidates(recipes) if key not in self._extra)
        situations = {key: self._graph.at(recipes, key) for key in keys}
        self._check_values(situations)
        self._check_inputs(situations)
        self._tell_unused()
        plans = tuple(self._plan_key(key, situation) for key, situation in situations.items())
        elements: dict[Program, int] = {}
        for key in plans:
            if key.program:
                elements[key.program] = elements.get(key.program, 0) + key.numel
        backends = choose_backends(elements, self._options)
        layouts = self._layouts(plans)
        made = Plan(self._jobs, self._options, self._sources, plans, layouts, tuple(self._warnings), backends)
        self._check_room(made)
        return made

    def _check_recipes(self) -> None:
        problems = Problems()
        for job in self._jobs:
            if not models_of(job.recipe):
                problems.add(f"the recipe {job.recipe!r} reads no model, so there is nothing to merge")
        problems.add_all(checks.mismatched_configs(self._graph))
        problems.raise_as(RecipeError)

    def _check_values(self, situations: Mapping[str, Specialisation]) -> None:
        """Values by key name keys that there are, and have one for every key."""
        problems = Problems()
        values = [atom for atom in self._graph.atoms(self._graph.roots) if isinstance(atom, LiteralNode)]
        by_key = [atom.value for atom in values if isinstance(atom.value, ByKey) and atom.config is None]
        by_key += [job.dtype for job in self._jobs if isinstance(job.dtype, ByKey)]
        problems.add_all(checks.unmatched_patterns(by_key, list(situations)))
        problems.add_all(checks.missing_values(situations))
        problems.raise_as(RecipeError)

    def _check_inputs(self, situations: Mapping[str, Specialisation]) -> None:
        """Keys, shapes and paths; everything that is wrong with any of them at once."""
        problems = Problems()
        before: Mapping[str, Sequence[ModelNode]] | None = None
        for number in range(len(self._jobs)):
            lacking = {key: s.lacking[number] for key, s in situations.items() if s.lacking[number]}
            if self._options.on_missing == "error":
                held = {key: situations[key].held[number] for key in lacking}
                lacked = self._parts.lacked(lacking, held)
                for note in self._parts.notes(lacked, lacking, held):
                    self._warn(note)
                total = sum(bool(s.held[number]) for s in situations.values())
                wrong = {key: nodes for key, nodes in lacking.items() if key not in lacked}
                problems.add_all(checks.missing_keys(wrong, self._sources, total))
            elif self._options.on_missing == "skip" and lacking:
                self._warn(f"{len(lacking)} keys are not in every input and are left out: {some(lacking)}")
            models = {key: self._models(number, situation) for key, situation in situations.items()}
            if models != before:  # points of a sweep mostly read the same
                problems.add_all(checks.different_shapes(models, self._sources))
                problems.add_all(checks.different_kinds(models, self._sources))
            before = models
        outputs = [job.output for job in self._jobs if isinstance(job.output, Path)]
        problems.add_all(checks.clashing_outputs(outputs, self._sources))
        problems.raise_as(CheckpointError)

    def _tell_unused(self) -> None:
        """What of a LoRA file changes nothing, as the model is of another format that has no place for it."""
        for model, source in self._sources.items():
            if isinstance(source, AdapterSource) and source.unused:
                self._warn(
                    f"{source.name}: {len(source.unused)} keys are left out, as '{model.config}' has nothing "
                    f"that they change: {some(source.unused, 5)}"
                )

    def _models(self, number: int, situation: Specialisation) -> Sequence[ModelNode]:
        """The models that a job merges at a key; where one is missing, all that there are."""
        return situation.held[number] if situation.lacking[number] else situation.models[number]

    def _inputs(self, number: int, situation: Specialisation) -> list[ModelNode]:
        """The models that the result is compared with: those that are named in the recipe."""
        return [m for m in self._models(number, situation) if not isinstance(m, ModelView)]

    def _root(self, number: int, situation: Specialisation) -> Node | None:
        """What a job makes of a key, after `on_missing`; what is an error was raised before."""
        if not situation.lacking[number]:
            return situation.roots[number]
        held = situation.held[number]
        return held[0] if held and self._options.on_missing != "skip" else None

    def _check_room(self, made: Plan) -> None:
        """In memory for whole tensors, and on the disks of the outputs."""
        for key in made.keys:
            if made.whole_bytes_of(key) > self._options.memory_budget:
                raise MergeError(
                    f"the key '{key.key}' needs {made.whole_bytes_of(key):,} bytes for whole tensors, more "
                    f"than memory_budget={self._options.memory_budget:,}. Raise engine.memory_budget, or use "
                    "a method that streams."
                )
        problems = Problems()
        problems.add_all(checks.unwritable_outputs(map(made.destination, range(len(self._jobs)))))
        problems.raise_as(CheckpointError)

    def _plan_key(self, key: str, situation: Specialisation) -> KeyPlan:
        first = [self._first_leaf(self._root(n, situation)) for n in range(len(self._jobs))]
        infos = [self._graph.lazy.info(leaf, key) if leaf else None for leaf in first]
        shape = next((i.shape for i in infos if i), ())
        if any(info and not is_arithmetic(info.dtype) for info in infos):
            copies = tuple((job, leaf) for job, leaf in enumerate(first) if leaf is not None)
            return KeyPlan(key, shape, None, (), copies=copies)
        dtypes = tuple(self._dtype_at(job, key, situation, info) for job, info in enumerate(infos))
        roots = self._roots_at(situation, dtypes)
        program = self._program(roots.nodes)
        for output in roots.outputs:
            extent = program.extents[program.roots[output.root]]
            if extent in (Extent.SMALL, Extent.FACTOR):
                what = "one number" if extent is Extent.SMALL else "a factor"
                raise RecipeError(
                    f"the recipe {self._jobs[output.job].recipe!r} gives {what} for a key, not a tensor, "
                    "so it makes no model. Use it as an argument of another method."
                )
        return KeyPlan(key, shape, program, roots.outputs, roots.statistics)

    def _dtype_at(
        self, number: int, key: str, situation: Specialisation, info: TensorInfo | None
    ) -> str | None:
        """How a job's result is stored: as the job says, or the recipe's last cast, or the first input."""
        if info is None:
            return None
        wanted = self._jobs[number].dtype
        if isinstance(wanted, ByKey):
            name = str(wanted(key))
            wanted = None if name == INPUT else torch_dtype(name)
        if wanted is not None:
            return dtype_name(wanted)
        root = self._root(number, situation)
        return (root and _dtype_of_cast(root)) or info.dtype

    def _first_leaf(self, root: Node | None) -> ModelNode | DeferredCall | None:
        """What the shape and the dtype of a result are those of: the first input."""
        if root not in self._leaves:
            leaves = (n for n in walk(root) if isinstance(n, ModelNode | DeferredCall)) if root else iter(())
            self._leaves[root] = next(leaves, None)
        return self._leaves[root]

    def _roots_at(self, situation: Specialisation, dtypes: tuple[str | None, ...]) -> _Roots:
        """The expanded graphs, and what becomes of each; the same for keys of one situation and dtypes."""
        kind = (situation, dtypes)
        if kind not in self._roots:
            self._roots[kind] = self._build_roots(situation, dtypes)
        return self._roots[kind]

    def _build_roots(self, situation: Specialisation, dtypes: tuple[str | None, ...]) -> _Roots:
        nodes: list[Node] = []
        outputs: list[Output] = []
        statistics: list[tuple[int, ModelNode, int]] = []
        for number, job in enumerate(self._jobs):
            root, stored = self._root(number, situation), dtypes[number]
            if root is None or stored is None:
                continue
            (root,) = self._expand([root])
            if job.output is not None or job.statistics:  # where nothing is kept, what overflows is counted
                outputs.append(Output(number, len(nodes), stored))
                nodes.append(root)
            if job.statistics:
                for model, node in statistics_of(root, self._inputs(number, situation), stored).items():
                    statistics.append((number, model, len(nodes)))
                    nodes.append(node)
        return _Roots(self._expand(nodes), tuple(outputs), tuple(statistics))

    def _expand(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Composites become what they are composed of."""
        expanded: dict[Node, Node] = {}
        roots = expand(nodes, expanded)
        self._graph.carry_caches(expanded)
        return roots

    def _program(self, roots: tuple[Node, ...]) -> Program:
        if roots not in self._programs:
            self._programs[roots] = compile_program(roots, self._options.compute_dtype, self._graph.caches)
        return self._programs[roots]

    def _layouts(self, plans: tuple[KeyPlan, ...]) -> tuple[Layout, ...]:
        layouts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in self._jobs]
        for key in plans:
            for output in key.outputs:
                layouts[output.job][key.key] = (output.dtype, key.shape)
            for job, leaf in key.copies:
                info = self._graph.lazy.info(leaf, key.key)
                assert info is not None
                layouts[job][key.key] = (info.dtype, key.shape)
        return tuple(layouts)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.append(Notice(message))


@dataclass(frozen=True)
class _Roots:
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    statistics: tuple[tuple[int, ModelNode, int], ...]


def _dtype_of_cast(root: Node) -> str | None:
    """The dtype that a recipe ends in, where it does: `recipe.to(dtype=...)`."""
    if not isinstance(root, MergeNode) or root.method is not resolve_method("cast"):
        return None
    dtype = dict(root.arguments).get("dtype")
    return dtype_name(parse_dtype(str(dtype.value))) if isinstance(dtype, LiteralNode) else None
