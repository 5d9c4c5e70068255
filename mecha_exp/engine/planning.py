"""What a merge will do, from the headers of its inputs alone: keys, programs, bytes, and what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint import (
    Destination,
    Template,
    TensorInfo,
    dtype_name,
    is_arithmetic,
    parse_dtype,
    stored_bytes,
    torch_dtype,
)
from mecha_exp.engine import checks
from mecha_exp.engine.adapting import adapt, as_stored
from mecha_exp.engine.converting import in_one_format
from mecha_exp.engine.extras import converted, find_extras, left_out, notices_of, problems_of
from mecha_exp.engine.fusion import FusedPass, choose_ways, how_run
from mecha_exp.engine.inputs import FiniteSource, Source, open_sources
from mecha_exp.engine.keys import ConvertedModel, KeyedGraph, Situation
from mecha_exp.engine.lazy import Lazy
from mecha_exp.engine.notices import Notice
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.parts import Parts
from mecha_exp.engine.program import Extent, LazyNode, Pass, Program, compile_program, expand
from mecha_exp.engine.sinks import Layout, Receiver
from mecha_exp.engine.statistics import statistics_of
from mecha_exp.engine.weights import INPUT, Binder, effective_values_of
from mecha_exp.errors import CheckpointError, MergeError, Problems, RecipeError, some
from mecha_exp.method import resolve_method
from mecha_exp.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.recipe.parameters import require_filled
from mecha_exp.weighting import BlockValue, ByKey

OMIT_NON_FINITE = "omit_non_finite"
"""The method whose model is read without the keys that are not finite there."""


@dataclass(frozen=True, eq=False)
class Job:
    """One model to be made.

    Attributes:
        recipe: its graph.
        output: a path (`*.safetensors` is a file, any other a folder like that of the first input), a
            dictionary to be filled, a function that is given each key and its tensor as soon as it is
            complete (by one thread at a time, in no particular order), or None where only the statistics
            are wanted.
        dtype: of the output, or one by key (see `parse_output_dtype`); None keeps the dtype that each key has
            in the first input.
        metadata: what the output file carries in its header.
        statistics: whether distances and cosines to the inputs are measured in the same pass.
        durable: whether the file is flushed to disk before it appears.
        shard_size: bytes of a file: a larger model is written to a folder, in shards.
        caches: by node what its method gets as `cache`, to live from merge to merge.
    """

    recipe: Node
    output: Path | dict[str, torch.Tensor] | Receiver | None = None
    dtype: torch.dtype | ByKey | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    statistics: bool = False
    durable: bool = True
    shard_size: int | None = None
    caches: Mapping[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.output, str):
            object.__setattr__(self, "output", Path(self.output))


@dataclass(frozen=True)
class Output:
    """What one job wants of one key: `root` is the index among the roots of the key's program."""

    job: int
    root: int
    dtype: str


@dataclass(frozen=True)
class KeyPlan:
    """What is done for one key.

    Attributes:
        key, shape: of the tensor.
        program: how it is computed; None where its bytes are copied (integers, booleans).
        outputs: where the roots of the program go.
        statistics: (job, input, root): the root is the `moments` of the job's result and the input.
        copies: (job, model) for keys whose bytes are copied.
    """

    key: str
    shape: tuple[int, ...]
    program: Program | None
    outputs: tuple[Output, ...]
    statistics: tuple[tuple[int, ModelNode, int], ...] = ()
    copies: tuple[tuple[int, ModelNode], ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Plan:
    """A checked merge, ready to run.

    Attributes:
        jobs: the models to be made.
        options: how.
        sources: the opened inputs.
        keys: what is done for each key, in the order of the first input's file.
        layouts: of each job the dtype and shape of every key of its output.
        warnings: what is odd and not wrong.
        ways: of each pass the loop that it is fused into, or why it runs eagerly.
    """

    jobs: tuple[Job, ...]
    options: EngineOptions
    sources: Mapping[ModelNode, Source]
    keys: tuple[KeyPlan, ...]
    layouts: tuple[Layout, ...]
    warnings: tuple[Notice, ...]
    ways: Mapping[Pass, FusedPass | str] = field(default_factory=dict, repr=False)

    @property
    def bytes_read(self) -> int:
        """How many bytes the passes read in all; an input that several passes need counts for each."""
        return sum(self.bytes_of(key) for key in self.keys)

    @property
    def bytes_written(self) -> int:
        """The size of the tensors of all outputs."""
        return sum(
            size_of(layout)
            for job, layout in zip(self.jobs, self.layouts, strict=True)
            if job.output is not None
        )

    def effective_values(self, job: int = 0) -> dict[str, list[BlockValue]]:
        """What a job's values by key come to, block by block, by `method.argument`."""
        return effective_values_of(self.jobs[job].recipe)

    @property
    def fused(self) -> dict[str, int]:
        """How the elements go through the passes: "fused", "eager: why" or "whole", and how many do."""
        counts: dict[str, int] = {}
        for key in self.keys:
            for how in how_run(key.program, self.ways) if key.program else ():
                counts[how] = counts.get(how, 0) + key.numel
        return counts

    @property
    def memory(self) -> int:
        """An estimate of the buffers in bytes: tiles of all workers, and whole tensors."""
        item = self.options.compute_dtype.itemsize
        tiles = max((_tile_values(k.program) for k in self.keys if k.program), default=1)
        return self.options.threads * self.options.tile_size * item * tiles + self.whole_bytes

    @property
    def whole_bytes(self) -> int:
        """The most that the whole tensors of one key take."""
        return max((self.whole_bytes_of(key) for key in self.keys), default=0)

    def whole_bytes_of(self, key: KeyPlan) -> int:
        """What the whole tensors of a key take in memory."""
        if key.program is None:
            return 0
        return key.program.whole_elements(key.shape) * self.options.compute_dtype.itemsize

    def destination(self, job: int) -> Destination | None:
        """Where a job's model is written to; None where it is not."""
        made = self.jobs[job]
        if not isinstance(made.output, Path):
            return None
        first = self.sources[models_of(made.recipe)[0]]
        template = Template.at(first.path, layout_of(as_stored(first)))
        return Destination(made.output, self.layouts[job], made.shard_size, template)

    def bytes_of(self, key: KeyPlan) -> int:
        """How many bytes are read for one key, if no sample was unlucky; see `Pass.is_full`."""
        if key.program is None:
            held = [source for source in self.sources.values() if key.key in source]
            return sum(source.info(key.key).nbytes for source in held) if key.copies else 0
        return sum(self.bytes_of_pass(key, trip) for trip in key.program.full_passes)

    def bytes_of_pass(self, key: KeyPlan, trip: Pass) -> int:
        """How many bytes of a key one pass reads."""
        return sum(self.sources[model].info(key.key).nbytes for model in trip.models)

    def bytes_written_of(self, key: KeyPlan) -> int:
        """How many bytes of all outputs a key makes up."""
        return sum(
            stored_bytes(*layout[key.key])
            for job, layout in zip(self.jobs, self.layouts, strict=True)
            if job.output is not None and key.key in layout
        )


@contextmanager
def plan(jobs: Sequence[Job], options: EngineOptions | None = None) -> Iterator[Plan]:
    """Open the inputs, check everything, and lay out the work. Nothing is written.

    Raises:
        CheckpointError: inputs that cannot be read or do not fit each other; all problems at once.
        RecipeError: recipes that cannot be run on these keys.
        MergeError: whole tensors that do not fit the memory budget.
    """
    options = options or EngineOptions()
    require_filled(job.recipe for job in jobs)
    recipes = [job.recipe for job in jobs]
    with open_sources(models_of(*recipes), options.model_dirs) as opened:
        sources, lines = in_one_format(recipes, opened)
        notes = [Notice(line) for line in lines]
        extra = _settle_extras(opened, sources, options, notes)
        looked_through = set(sources) if options.on_nonfinite == "skip" else _only_finite(recipes)
        finite = {model: FiniteSource(sources[model]) for model in looked_through}
        notes += [Notice(line) for line in _spoilt(finite.values())]
        sources |= finite
        sources = adapt(sources, options)
        yield _Planner(tuple(_bound(jobs, Binder(sources))), options, sources, notes, extra).plan()


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
        self._lazy = Lazy(options)
        self._graph = KeyedGraph([job.recipe for job in jobs], sources, self._lazy, caches)
        self._sources = self._graph.sources
        self._parts = Parts(self._sources)
        self._roots: dict[tuple[object, ...], _Roots] = {}
        self._programs: dict[tuple[Node, ...], Program] = {}
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
        plans = tuple(self._plan_key(key, situation) for key, situation in situations.items())
        elements: dict[Program, int] = {}
        for key in plans:
            if key.program:
                elements[key.program] = elements.get(key.program, 0) + key.numel
        ways = choose_ways(elements, self._options)
        layouts = self._layouts(plans)
        made = Plan(self._jobs, self._options, self._sources, plans, layouts, tuple(self._warnings), ways)
        self._check_room(made)
        return made

    def _check_recipes(self) -> None:
        problems = Problems()
        for job in self._jobs:
            if not models_of(job.recipe):
                problems.add(f"the recipe {job.recipe!r} reads no model, so there is nothing to merge")
        problems.raise_as(RecipeError)

    def _check_values(self, situations: Mapping[str, Situation]) -> None:
        """Values by key name keys that there are, and have one for every key."""
        problems = Problems()
        values = [atom for atom in self._graph.atoms(self._graph.roots) if isinstance(atom, LiteralNode)]
        by_key = [atom.value for atom in values if isinstance(atom.value, ByKey) and atom.config is None]
        by_key += [job.dtype for job in self._jobs if isinstance(job.dtype, ByKey)]
        problems.add_all(checks.unmatched_patterns(by_key, list(situations)))
        problems.add_all(checks.missing_values(situations))
        problems.raise_as(RecipeError)

    def _check_inputs(self, situations: Mapping[str, Situation]) -> None:
        """Keys, shapes and paths; everything that is wrong with any of them at once."""
        problems = Problems()
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
            problems.add_all(checks.different_shapes(models, self._sources))
            problems.add_all(checks.different_kinds(models, self._sources))
        outputs = [job.output for job in self._jobs if isinstance(job.output, Path)]
        problems.add_all(checks.clashing_outputs(outputs, self._sources))
        problems.raise_as(CheckpointError)

    def _models(self, number: int, situation: Situation) -> Sequence[ModelNode]:
        """The models that a job merges at a key; where one is missing, all that there are."""
        return situation.held[number] if situation.lacking[number] else situation.models[number]

    def _inputs(self, number: int, situation: Situation) -> list[ModelNode]:
        """The models that the result is compared with: those that are named in the recipe."""
        return [m for m in self._models(number, situation) if not isinstance(m, ConvertedModel)]

    def _root(self, number: int, situation: Situation) -> Node | None:
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

    def _plan_key(self, key: str, situation: Situation) -> KeyPlan:
        first = [self._first_leaf(self._root(n, situation)) for n in range(len(self._jobs))]
        infos = [self._lazy.info(leaf, key) if leaf else None for leaf in first]
        shape = next((i.shape for i in infos if i), ())
        copies = tuple((job, leaf) for job, leaf in enumerate(first) if isinstance(leaf, ModelNode))
        is_copied = any(info and not is_arithmetic(info.dtype) for info in infos)
        if is_copied and len(copies) == sum(leaf is not None for leaf in first):
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

    def _dtype_at(self, number: int, key: str, situation: Situation, info: TensorInfo | None) -> str | None:
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

    def _first_leaf(self, root: Node | None) -> ModelNode | LazyNode | None:
        """What the shape and the dtype of a result are those of: the first input."""
        leaves = (n for n in walk(root) if isinstance(n, ModelNode | LazyNode)) if root else iter(())
        return next(leaves, None)

    def _roots_at(self, situation: Situation, dtypes: tuple[str | None, ...]) -> _Roots:
        """The expanded graphs, and what becomes of each; the same for keys of one situation and dtypes."""
        kind = (situation, dtypes)
        if kind not in self._roots:
            self._roots[kind] = self._build_roots(situation, dtypes)
        return self._roots[kind]

    def _build_roots(self, situation: Situation, dtypes: tuple[str | None, ...]) -> _Roots:
        nodes: list[Node] = []
        outputs: list[Output] = []
        statistics: list[tuple[int, ModelNode, int]] = []
        for number, job in enumerate(self._jobs):
            root, stored = self._root(number, situation), dtypes[number]
            if root is None or stored is None:
                continue
            (root,) = self._expand([root])
            if job.output is not None:
                outputs.append(Output(number, len(nodes), stored))
                nodes.append(root)
            if job.statistics:
                for model, node in statistics_of(root, self._inputs(number, situation), stored).items():
                    statistics.append((number, model, len(nodes)))
                    nodes.append(node)
        return _Roots(self._expand(nodes), tuple(outputs), tuple(statistics))

    def _expand(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Composites become what they are composed of; a call keeps the cache that it was given."""
        expanded: dict[Node, Node] = {}
        roots = expand(nodes, expanded)
        caches = self._graph.caches
        caches.update({expanded[node]: cache for node, cache in caches.items() if node in expanded})
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
            for job, model in key.copies:
                layouts[job][key.key] = (self._sources[model].info(key.key).dtype, key.shape)
        return tuple(layouts)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.append(Notice(message))


@dataclass(frozen=True)
class _Roots:
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    statistics: tuple[tuple[int, ModelNode, int], ...]


def layout_of(source: Source) -> Layout:
    """The dtype and shape of every key of an input."""
    return {key: (source.info(key).dtype, source.info(key).shape) for key in source.keys()}


def _dtype_of_cast(root: Node) -> str | None:
    """The dtype that a recipe ends in, where it does: `recipe.to(dtype=...)`."""
    if not isinstance(root, MergeNode) or root.method is not resolve_method("cast"):
        return None
    dtype = dict(root.arguments).get("dtype")
    return dtype_name(parse_dtype(str(dtype.value))) if isinstance(dtype, LiteralNode) else None


def size_of(layout: Layout) -> int:
    """The bytes of the tensors of a layout."""
    return sum(stored_bytes(dtype, shape) for dtype, shape in layout.values())


def _tile_values(program: Program) -> int:
    """How many tiles of the widest pass may be alive at once."""
    return max((len(p.nodes) for stage in program.stages for p in stage.passes), default=1)
