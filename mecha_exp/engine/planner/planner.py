"""Plans a merge from the headers of its inputs: keys, programs, bytes, and everything that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath

import torch

from mecha_exp.engine.compiler.fusion import choose_backends
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner import checks
from mecha_exp.engine.planner.batches import groups_of
from mecha_exp.engine.planner.by_key import Binder
from mecha_exp.engine.planner.elementwise import check_elementwise
from mecha_exp.engine.planner.inputs import Inputs, prepare_inputs
from mecha_exp.engine.planner.integers import different_integers
from mecha_exp.engine.planner.key_plans import KeyPlanner, dtype_of_cast
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Trip
from mecha_exp.engine.planner.keys.missing_keys import MissingKeys
from mecha_exp.engine.planner.keys.specialisation import KeyClass, PerKeyGraph
from mecha_exp.engine.planner.meaning import config_digests
from mecha_exp.engine.planner.plan import Job, Plan
from mecha_exp.engine.planner.precision import coarser_inputs, coarser_output
from mecha_exp.engine.report import Notice
from mecha_exp.engine.scaled_fp8 import prefix_of
from mecha_exp.errors import CheckpointError, MergeError, Problems, RecipeError, counted, some
from mecha_exp.families import TOKENIZER_FILES
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.paths import missing_paths
from mecha_exp.method_api.views import is_data
from mecha_exp.recipe.templates import require_filled
from mecha_exp.sources.inputs import open_sources
from mecha_exp.sources.quantised.view import require_plain
from mecha_exp.sources.readers import Prepared, readers_of
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
    recipes = [job.recipe for job in jobs]
    require_filled(recipes)
    with open_sources(models_of(*recipes), options.model_dirs) as stored:
        opened = require_plain(stored, options.on_quantised, options.memory_budget)
        _require_one_batch(recipes, opened, options)
        prepared = Prepared(tuple(recipes), opened)
        for reader in readers_of(opened.values()):
            prepared = reader.prepare(prepared, options.on_tied)
        inputs = prepare_inputs(prepared.recipes, prepared.sources, options)
        inputs = replace(inputs, notices=(*map(Notice, prepared.lines), *inputs.notices))
        binder = Binder(inputs.sources, inputs.configs)
        whole = [replace(job, recipe=new) for job, new in zip(jobs, prepared.recipes, strict=True)]
        yield _Planner(tuple(_bind(job, binder) for job in whole), options, inputs).plan()


def _require_one_batch(
    recipes: Sequence[Node], opened: Mapping[ModelNode, Source], options: EngineOptions
) -> None:
    if len(set(groups_of(recipes, opened, options))) > 1:
        raise MergeError(
            "these recipes read models that differ in their keys, or in the order or the shapes of these, so "
            "that they cannot be merged in one pass. Plan them one by one; merge_many does."
        )


def _bind(job: Job, binder: Binder) -> Job:
    """A job with every value by key bound to its model."""
    bound: dict[Node, Node] = {}
    (recipe,) = binder.bind([job.recipe], bound)
    caches = {bound.get(node, node): cache for node, cache in job.caches.items()}
    dtype = binder.bind_beside(job.dtype, [recipe]) if isinstance(job.dtype, ByKey) else job.dtype
    return replace(job, recipe=recipe, caches=caches, dtype=dtype)


def _foreign_cards(plan: Plan) -> Iterator[Notice]:
    """Say which cards are not written, since a README.md of another program is there."""
    destinations = filter(None, map(plan.destination, range(len(plan.jobs))))
    for file in filter(None, (destination.foreign_card for destination in destinations)):
        yield Notice(
            f"{file} was not written by mecha_exp and stays as it is. Delete it for a card of the new model."
        )


def _lacking_tokenizers(plan: Plan) -> Iterator[Notice]:
    """Say which folders get no tokenizer, since the first input has none, though another input has one."""
    for number, job in enumerate(plan.jobs):
        destination = plan.destination(number)
        template = destination.template if destination is not None and destination.is_folder else None
        if template is None or any(PurePath(name).name in TOKENIZER_FILES for name in template.small_files):
            continue
        paths = [plan.sources[model].path for model in models_of(job.recipe)]
        folders = [path if path.is_dir() else path.parent for path in paths if path is not None]
        if donor := next((f for f in folders if any((f / name).is_file() for name in TOKENIZER_FILES)), None):
            yield Notice(
                f"{template.folder} has no tokenizer, so the merged folder gets none. {donor} has one: copy "
                "it if both models have the same tokens."
            )


def _elements_of(plans: Sequence[KeyPlan], trips: Sequence[Trip]) -> dict[Program, int]:
    """How many elements go through each program; none through those of a sample, or of a last resort."""
    elements: dict[Program, int] = {}
    full = Counter(key.structure for key in (*plans, *(key for trip in trips for key in trip.keys)))
    again = {key.structure: 0 for trip in trips for key in (*trip.sample, *trip.again)}
    for structure, count in (*full.items(), *again.items()):
        if structure.program:
            elements[structure.program] = elements.get(structure.program, 0) + count * structure.numel
    return elements


class _Planner:
    """Checks bound jobs and builds their `Plan`."""

    def __init__(self, jobs: tuple[Job, ...], options: EngineOptions, inputs: Inputs) -> None:
        self._jobs = jobs
        self._options = options
        self._dropped = inputs.dropped
        self._decoded = inputs.decoded
        self._warnings = list(inputs.notices)
        caches = {node: cache for job in jobs for node, cache in job.caches.items()}
        recipes = [job.recipe for job in jobs]
        self._graph = PerKeyGraph(recipes, inputs.sources, inputs.configs, options, caches)
        self._sources = self._graph.sources
        self._missing_keys = MissingKeys(self._sources, self._graph.configs)

    def plan(self) -> Plan:
        """Check, then lay out every key."""
        self._check_recipes()
        recipes = self._graph.roots
        keys = (key for key in self._graph.candidates(recipes) if key not in self._dropped)
        classes = self._graph.classes(recipes, keys)
        self._check_values(classes)
        self._check_inputs(classes)
        self._note_inputs(classes)
        for notice in checks.repeated_models((job.recipe for job in self._jobs), self._sources):
            self._warn(notice)
        planner = KeyPlanner(self._jobs, self._graph, self._options, prefix_of(classes))
        plans = tuple(planner.plan(key, each) for key, each in classes.items())
        planner.check_stacks()
        for notice in (*planner.notices, *self._graph.lazy.notices):
            self._warn(notice)
        trips = planner.trips(plans)
        elements = _elements_of(plans, trips)
        check_elementwise(elements)
        backends = choose_backends(elements, self._options)
        self._note_quantised(plans)
        layouts, warnings = planner.layouts(plans), tuple(self._warnings)
        configs = config_digests(recipes, self._sources, self._graph.configs)
        work = (plans, layouts, warnings, backends, configs, trips)
        plan = Plan(self._jobs, self._options, self._sources, *work)
        self._check_space(plan)
        return replace(plan, warnings=(*plan.warnings, *_foreign_cards(plan), *_lacking_tokenizers(plan)))

    def _check_recipes(self) -> None:
        """Every recipe reads a model, and the model configs are those that methods declare."""
        problems = Problems()
        for job in self._jobs:
            if not models_of(job.recipe):
                values = [node.value for node in walk(job.recipe) if isinstance(node, LiteralNode)]
                plain = any(isinstance(value, torch.Tensor) for value in values)
                hint = ': a plain tensor is a model of one key, as in {"w": tensor}' if plain else ""
                problems.add(f"the recipe {job.recipe!r} reads no model, so there is nothing to merge{hint}")
        problems.add_all(checks.mismatched_configs(self._graph))
        problems.add_all(missing_paths(walk(*self._graph.roots)))
        problems.raise_as(RecipeError)

    def _check_values(self, classes: checks.Classes) -> None:
        """The selectors of values by key hold existing keys, and every key has a value."""
        problems = Problems()
        values = [atom for atom in self._graph.atoms(self._graph.roots) if isinstance(atom, LiteralNode)]
        by_key = [atom.value for atom in values if isinstance(atom.value, ByKey) and atom.config is None]
        by_key += [job.dtype for job in self._jobs if isinstance(job.dtype, ByKey)]
        problems.add_all(checks.unmatched_patterns(by_key, list(classes)))
        problems.add_all(checks.missing_values(classes))
        for message in checks.keys_outside_blocks(by_key, list(classes)):
            if self._options.strict:
                problems.add(message)
            else:
                self._warn(message)
        problems.raise_as(RecipeError)  # a misspelt selector may be all that a merge is for
        problems.add_all(checks.merges_of_no_key(job.recipe for job in self._jobs))
        problems.raise_as(RecipeError)

    def _check_inputs(self, classes: checks.Classes) -> None:
        """The inputs of each job fit each other, and no output is an input."""
        problems = Problems()
        checked: checks.MergedModels | None = None
        for job in range(len(self._jobs)):
            self._check_missing(job, classes, problems)
            merged = {
                each: tuple(model for model in each.specialised.merged(job) if not is_data(model))
                for each in {*classes.values()}
            }
            if merged != checked:  # most points of a sweep read the same models
                problems.add_all(checks.different_shapes(classes, merged, self._sources))
                problems.add_all(checks.different_kinds(classes, merged, self._sources))
                self._note_precision(job, classes, merged)
                if self._options.on_integers == "error":
                    problems.add_all(different_integers(classes, merged, self._sources, self._graph.configs))
            checked = merged
        outputs = [job.output for job in self._jobs if isinstance(job.output, Path)]
        problems.add_all(checks.clashing_outputs(outputs, self._sources))
        problems.raise_as(CheckpointError)

    def _note_precision(self, job: int, classes: checks.Classes, merged: checks.MergedModels) -> None:
        """Warn where the models of a job differ in their dtypes, and its output has the coarser one."""

        def stored_as(each: KeyClass) -> str | None:
            root = each.specialised.roots[job]
            first = next(iter(models_of(root)), None) if root and not dtype_of_cast(root) else None
            return each.stored[first].dtype if first and first in each.stored else None

        about = (classes, merged, self._sources, self._decoded)
        for notice in coarser_inputs(*about):
            self._warn(notice)
        if self._jobs[job].dtype is None and not self._jobs[job].quantize:
            for notice in coarser_output(*about, stored_as):
                self._warn(notice)

    def _check_missing(self, job: int, classes: checks.Classes, problems: Problems) -> None:
        """Keys that some inputs of a job lack: an error or a warning, as `on_missing` says."""
        specialised = {key: each.specialised for key, each in classes.items()}
        lacking = {key: s.lacking[job] for key, s in specialised.items() if s.lacking[job]}
        if not lacking:
            return
        of_keys = ("key is not in every input and is", "keys are not in every input and are")
        if self._options.on_missing == "skip":
            self._warn(f"{counted(len(lacking), *of_keys)} left out: {some(lacking)}")
            return
        notes, others = self._missing_keys.check(
            lacking, {key: specialised[key].held[job] for key in lacking}
        )
        for note in notes:
            self._warn(note)
        if others and self._options.on_missing == "base":
            self._warn(
                f"{counted(len(others), *of_keys)} taken from the first input that has such a key, without "
                f"what other inputs changed: {some(others)}"
            )
        elif others:
            total = sum(bool(s.held[job]) for s in specialised.values())
            problems.add_all(self._missing_keys.problems(others, total))

    def _note_inputs(self, keys: Collection[str]) -> None:
        """Warn of what inputs say of themselves; those of which the same is to be said share a sentence."""
        files: dict[str, list[str]] = {}
        for source in self._sources.values():
            for note in source.notes(keys):
                files.setdefault(note, []).append(source.name)
        for note, names in files.items():
            self._warn(f"{some(names, 1)}: {note}")

    def _note_quantised(self, plans: Sequence[KeyPlan]) -> None:
        """Say which keys are written as scaled fp8."""
        for job, quantising in enumerate(self._jobs):
            if quantising.quantize:
                keys = [plan.key for plan in plans if job in plan.structure.quantised_by]
                self._warn(
                    f"quantize={quantising.quantize} writes {len(keys)} of {counted(len(plans), 'key')}, the "
                    f"matrices of linear layers, as float8_e4m3fn with a scale each: {some(keys, 3)}. The "
                    "others keep their dtype."
                )

    def _check_space(self, plan: Plan) -> None:
        """Whole tensors fit the memory budget, and outputs fit on their disks."""
        for key in plan.all_keys:
            if key.structure.own_bytes > self._options.memory_budget:
                raise MergeError(
                    f"the key '{key.key}' needs {key.structure.own_bytes:,} bytes for whole tensors, more "
                    f"than memory_budget={self._options.memory_budget:,}. Raise engine.memory_budget, or use "
                    "a method that streams."
                )
        problems = Problems()
        problems.add_all(checks.unwritable_outputs(map(plan.destination, range(len(self._jobs)))))
        problems.raise_as(CheckpointError)

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.append(Notice(message))
