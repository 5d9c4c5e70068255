"""A planned merge: the jobs, and what is done for them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint import Destination, Template, stored_bytes, template_of_file
from mecha_exp.checkpoint.dtypes import Layout
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.shards import WRITTEN, is_file_name
from mecha_exp.checkpoint.sidecars import SmallFiles
from mecha_exp.checkpoint.transaction.running_hash import Hashed
from mecha_exp.engine.compiler.fusion import FusedPass, describe_backends
from mecha_exp.engine.ir.program import Pass, Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.by_key import choices_of, effective_values_of
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Output, Structure, Trip
from mecha_exp.engine.planner.vocabulary import rows_taken
from mecha_exp.engine.report import Notice
from mecha_exp.engine.scaled_fp8 import require_known
from mecha_exp.engine.sinks import Receiver
from mecha_exp.errors import ConfigError, MergeError
from mecha_exp.graph.by_key import BlockValue, ByKey
from mecha_exp.graph.nodes import ModelNode, Node, models_of, walk
from mecha_exp.method_api.paths import path_arguments
from mecha_exp.method_api.views import ModelView, opened_views
from mecha_exp.sources.source import Source, SourceView
from mecha_exp.sources.tokenizer import tokenizer_files, with_tokenizer
from mecha_exp.sources.vocabulary import as_stored, vocabulary_donor


@dataclass(frozen=True, eq=False)
class Job:
    """One model to be made.

    Attributes:
        recipe: its graph.
        output: a path (`*.safetensors` is a file, any other a folder like that of the first input), a
            dictionary to fill, a function that receives each key and its tensor as soon as it is complete (by
            one thread at a time, in no particular order), or None if only the statistics are needed.
        dtype: of the output, or one by key (see `parse_output_dtype`); None keeps the dtype that each key has
            in the first input.
        metadata: the metadata in the header of the output file; None: its provenance.
        statistics: whether distances and cosines to the inputs are measured in the same pass.
        durable: whether the file is flushed to disk before it appears.
        shard_size: the most bytes of a file: a larger model is written to a folder, in shards.
        small_files: files beside the weights of a folder in place of those of the first input, by name: a
            path, the content, or None to leave one out.
        card: makes the model card of a folder, README.md, when everything has been checked; None writes
            none. `merge` and the command line give one (`mecha_exp/cards.py`).
        quantize: `fp8_scaled` writes the matrices of linear layers as float8_e4m3fn with a scale each, in
            ComfyUI's layout, and all else in its dtype; None writes numbers.
        hashed: receives path, SHA-256 and identity of each file of weights once it is in its place; None
            computes no hashes. They are computed while the files are written.
        caches: by node the `cache` of its method, which lives from merge to merge.

    Raises:
        ConfigError: an unknown way of quantising, or one for a folder.
        MergeError: an output of another type.
    """

    recipe: Node
    output: Path | dict[str, torch.Tensor] | Receiver | None = None
    dtype: torch.dtype | ByKey | None = None
    metadata: Mapping[str, str] | None = None
    statistics: bool = False
    durable: bool = True
    shard_size: int | None = None
    quantize: str | None = None
    small_files: SmallFiles = field(default_factory=dict)
    card: Callable[[], bytes] | None = field(default=None, repr=False)
    hashed: Hashed | None = field(default=None, repr=False)
    caches: Mapping[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.output, str | os.PathLike):
            object.__setattr__(self, "output", Path(self.output))
        elif not (self.output is None or isinstance(self.output, dict) or callable(self.output)):
            raise MergeError(
                f"the output is of type {type(self.output).__name__}: expected a path, a dictionary, a "
                "function of a key and a tensor, or None."
            )
        check_quantize(self.quantize, self.output if isinstance(self.output, Path) else None, self.shard_size)


def check_quantize(choice: str | None, path: Path | None, shard_size: int | None) -> None:
    """Check that an output can be quantised in a way.

    Raises:
        ConfigError: the way is unknown, or the output is a folder.
    """
    require_known(choice)
    is_one_file = shard_size is None and (path is None or is_file_name(path))
    if choice and (not is_one_file or (path is not None and path.suffix in {*WRITTEN} - {SUFFIX})):
        raise ConfigError(
            f"quantize={choice} writes ComfyUI's layout, which is one file: name an output that ends in "
            ".safetensors, without shard_size."
        )


@dataclass(frozen=True)
class Plan:
    """A checked merge, ready to run.

    Attributes:
        jobs: the jobs, one for each output model.
        options: the options of the engine.
        sources: the opened inputs.
        keys: the plan of each key, in the order of the first input's file.
        layouts: for each job the dtype and shape of every key of its output.
        warnings: notices about what was changed or left out.
        backends: for each pass the loop that it is fused into, or why it runs eagerly.
        configs: the SHA-256 of the model configs that decide what is merged with what.
        trips: what is found of the whole model beforehand, in order.
    """

    jobs: tuple[Job, ...]
    options: EngineOptions
    sources: Mapping[ModelNode, Source]
    keys: tuple[KeyPlan, ...]
    layouts: tuple[Layout, ...]
    warnings: tuple[Notice, ...]
    backends: Mapping[Pass, FusedPass | str] = field(default_factory=dict, repr=False)
    configs: Mapping[str, str] = field(default_factory=dict, repr=False)
    trips: tuple[Trip, ...] = ()

    @property
    def all_keys(self) -> Iterator[KeyPlan]:
        """The plans of keys, those of the trips first."""
        for trip in self.trips:
            yield from (*trip.sample, *trip.keys)
        yield from self.keys

    @cached_property
    def structures(self) -> Mapping[Structure, int]:
        """How many keys have each structure, in the order of the keys."""
        return Counter(key.structure for key in self.keys)

    @property
    def inputs(self) -> Mapping[ModelNode, Source]:
        """The models that the recipes name, without the views of them in other formats."""
        return {m: source for m, source in self.sources.items() if not isinstance(m, ModelView)}

    @cached_property
    def _views(self) -> Mapping[Any, Source]:
        """The sources of the calls of views in the recipes."""
        return opened_views([job.recipe for job in self.jobs], self.inputs)

    @property
    def bytes_read(self) -> int:
        """How many bytes the passes read in all; an input that several passes need counts for each."""
        of_keys = sum(count * structure.bytes_read for structure, count in self.structures.items())
        return self.bytes_of_trips + of_keys

    @property
    def bytes_of_trips(self) -> int:
        """How many bytes are read beforehand for numbers of the whole model, unless a sample misleads."""
        return sum(self.bytes_of(key) for trip in self.trips for key in trip.keys)

    @property
    def bytes_written(self) -> int:
        """The size of the tensors of all outputs."""
        return sum(
            size_of(layout)
            for job, layout in zip(self.jobs, self.layouts, strict=True)
            if job.output is not None
        )

    def effective_values(self, job: int = 0) -> dict[str, list[BlockValue]]:
        """The effective values of a job's hyperparameters by key, block by block, by `method.argument`."""
        return effective_values_of(self.jobs[job].recipe)

    def choices(self, job: int = 0) -> dict[str, int]:
        """How many keys each recipe of a choice by key of a job has, by policy or method."""
        return choices_of(self.jobs[job].recipe)

    @property
    def fused(self) -> dict[str, int]:
        """The number of elements by backend: "fused", "fused but for rows", "eager: why" or "whole"."""
        elements: dict[str, int] = {}
        for structure, count in self.structures.items():
            for how in describe_backends(structure.program, self.backends) if structure.program else ():
                elements[how] = elements.get(how, 0) + count * structure.numel
        return elements

    @property
    def arithmetic(self) -> dict[torch.dtype, int]:
        """The number of keys that are computed in each dtype."""
        return dict(Counter(key.program.dtype for key in self.keys if key.program))

    @property
    def memory(self) -> int:
        """An estimate of the buffers in bytes: tiles of all workers, and whole tensors of as many keys."""
        programs = {key.program for key in self.all_keys}
        tiles = max((_tile_bytes(program) for program in programs if program), default=4)
        of_key = self.whole_bytes
        several = min(self.options.threads * of_key, self.options.memory_budget)
        whole = max(several, of_key)  # a key that exceeds the budget is made alone
        return self.options.threads * self.options.tile_elements * tiles + whole

    @property
    def whole_bytes(self) -> int:
        """The most bytes that the whole tensors of one key need."""
        return max((self.whole_bytes_of(key) for key in self.all_keys), default=0)

    def whole_bytes_of(self, key: KeyPlan) -> int:
        """The bytes that the whole tensors of a key, or of one of its experts, need in memory.

        Methods with `StateDict` parameters may hold all that they read.
        """
        structure = key.structure
        return structure.own_bytes + sum(
            node.owner.bytes_read_for(node.call, key.key) for node in structure.deferred_calls
        )

    def keeps(self, output: Output) -> bool:
        """Whether an output is delivered; otherwise only its statistics are."""
        return self.jobs[output.job].output is not None

    def destination(self, job: int) -> Destination | None:
        """The destination of a job's file or folder; None if the job writes none."""
        output, shard_size = self.jobs[job].output, self.jobs[job].shard_size
        if not isinstance(output, Path):
            return None
        first = self.sources[models_of(self.jobs[job].recipe)[0]]
        template = Template.at(first.path, lambda: layout_of(as_stored(first)))
        if template is not None:
            template = self._with_small_files(template, self.jobs[job], first)
        gguf = template_of_file(as_stored(first), keeps_codes=self.jobs[job].dtype is None)
        layout, card, hashed = self.layouts[job], self.jobs[job].card, self.jobs[job].hashed
        return Destination(output, layout, shard_size, template, gguf=gguf, card=card, hashed=hashed)

    def _with_small_files(self, template: Template, job: Job, first: Source) -> Template:
        """The template with the files and settings that a job and its recipe change.

        Args:
            first: the first input of the recipe, whose folder the template is.
        """
        if (donor := vocabulary_donor(first)) is not None:
            template = replace(template, replaced=tokenizer_files(template.folder, donor.path))
        if taken := rows_taken([job.recipe]):
            named = next((path for call in taken for _, path in path_arguments(call)), None)
            template = with_tokenizer(template, named)
        entries = dict(template.entries)
        views = [self._views[node] for node in walk(job.recipe) if node in self._views]
        for kind in dict.fromkeys(type(view) for view in views if isinstance(view, SourceView)):
            entries |= kind.changed_entries(template.folder, [view for view in views if type(view) is kind])
        return replace(template, replaced={**template.replaced, **job.small_files}, entries=entries)

    def bytes_of(self, key: KeyPlan) -> int:
        """How many bytes are read for one key, unless a sample misses its target; see `Pass.is_full`."""
        return key.structure.bytes_read

    def bytes_written_of(self, key: KeyPlan) -> int:
        """How many bytes a key has in all outputs."""
        return sum(
            stored_bytes(*layout[key.key])
            for job, layout in zip(self.jobs, self.layouts, strict=True)
            if job.output is not None and key.key in layout
        )


def layout_of(source: Source) -> Layout:
    """The dtype and shape of every key of an input."""
    return {key: (source.info(key).dtype, source.info(key).shape) for key in source.keys()}


def size_of(layout: Layout) -> int:
    """The bytes of the tensors of a layout."""
    return sum(stored_bytes(dtype, shape) for dtype, shape in layout.values())


def _tile_bytes(program: Program) -> int:
    """The bytes for each element of the tiles that may be alive at once in the widest pass."""
    values = max((p.size for stage in program.stages for p in stage.passes), default=1)
    return values * program.dtype.itemsize
