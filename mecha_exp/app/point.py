"""A grid point: a resolved configuration with its recipe, its inputs, its signature and its evaluators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mecha_exp.app.outputs.makers import OutputMaker
from mecha_exp.app.provenance import input_names
from mecha_exp.app.recipes.templates import brought_by
from mecha_exp.cards import Settings, card_of
from mecha_exp.checkpoint import dtype_word, is_file_name
from mecha_exp.checkpoint.remote import place_of
from mecha_exp.engine import EngineOptions, Job, Plan
from mecha_exp.engine.planner.by_key import output_dtype_words
from mecha_exp.engine.planner.meaning import meaning_of
from mecha_exp.engine.provenance import KEY, Origin, metadata_of
from mecha_exp.errors import CheckpointError, Problems, some
from mecha_exp.evaluation import Context, Scoring, read_scoring, wants_weight_stats
from mecha_exp.evaluation.declaration import DIRECTIONS
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import InMemory, ModelNode, Node, models_of
from mecha_exp.lab.content_hash import content_of, contents_of, keep_hash
from mecha_exp.lab.signature import Signature, signature_of
from mecha_exp.recipe.keys import main_call
from mecha_exp.sources.search import find_model

SECTIONS = (
    "models",
    "recipe",
    "blocks",
    "engine",
    "output",
    "evaluator",
    "tracking",
    "sweep",
    "experiment",
    "debug",
)
"""The groups of the configuration. All other top-level keys but `NAMES` are hyperparameters."""
NAMES = ("name", "plugins", "rerun", "store", "hub", "data")
_NOT_IN_THE_TENSORS = ("save", "path", "durable", "shard_size", "prune", "card")
"""Output settings that do not change the tensors, or do it in the recipe."""
UNMEASURED = Scoring((), None, DIRECTIONS[0], None, False)
"""The scoring of a point before `Workbench.sign` has looked up its evaluators."""


@dataclass(frozen=True, eq=False)
class Point:
    """A grid point, resolved: what the engine, the store and the evaluators need to know.

    Attributes:
        config: the resolved configuration.
        folder: the folder of its run.
        recipe: the graph.
        options: the engine's options.
        output: the model's file or folder; None if the model is not saved.
        adapter: the adapter that is written in its place; None for none.
        dtype: the output dtype; None keeps the dtype of each key.
        shard_size: bytes per file of the output; None writes one file.
        hashes_inputs: whether inputs are identified by content. Paths also tell points apart, at no cost.
        scoring: the evaluators; `Workbench.sign` sets them.
    """

    config: dict[str, Any]
    folder: Path
    recipe: Node
    options: EngineOptions
    output: Path | None
    dtype: torch.dtype | ByKey | None
    shard_size: int | None = None
    hashes_inputs: bool = True
    scoring: Scoring = UNMEASURED
    adapter: OutputMaker | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The top-level values outside the groups, and the block weights if there are any."""
        own = {k: v for k, v in self.config.items() if k not in (*SECTIONS, *NAMES) and v is not None}
        return {**own, **({"blocks": self.config["blocks"]} if self.config["blocks"] else {})}

    @property
    def expert_set(self) -> int | None:
        """The number of its set of experts in `models.sets`; None unless sets are replicates."""
        number = self.config["models"].get("set")
        return number if isinstance(number, int) else None

    @property
    def saved(self) -> Path | None:
        """Where its model or its adapter lies once it is made; None if none is saved."""
        return self.adapter.path if self.adapter else self.output

    @property
    def names_its_output(self) -> bool:
        """Whether the user chose the path of what is saved."""
        return self.saved is not None and bool(self.config["output"]["path"])

    @property
    def wants_statistics(self) -> bool:
        """Whether the merging pass compares the result with its inputs."""
        return wants_weight_stats(self.config["evaluator"])

    @cached_property
    def files(self) -> dict[ModelNode, Path]:
        """The file (or folder) of each model.

        Raises:
            CheckpointError: one or more of them do not exist.
        """
        files: dict[ModelNode, Path] = {}
        problems = Problems()
        for model in models_of(self.recipe):
            if isinstance(model.source, InMemory):
                continue
            with problems.collected(CheckpointError):
                files[model] = find_model(model.source, self.options.model_dirs)
        problems.raise_as(CheckpointError)
        return files

    @cached_property
    def names(self) -> dict[ModelNode, str]:
        """A short name for each input; see `input_names`."""
        return input_names(self.files)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters for the record: hyperparameters, method, inputs, dtypes."""
        method = getattr(getattr(main_call(self.recipe), "method", None), "identifier", "model")
        return {
            **self.hyperparameters,
            "method": method,
            **{f"input/{name}": place_of(self.files[model]) for model, name in self.names.items()},
            "compute_dtype": dtype_word(self.options.compute_dtype),
            "output_dtype": output_dtype_words(self.dtype),
            **({"output_quantize": self.quantize} if self.quantize else {}),
        }

    @cached_property
    def contents(self) -> Mapping[Path, str]:
        """The content of each of its files (see `content_of`), read only where the hash is not cached."""
        files = self.files.values()
        return contents_of(files) if self.hashes_inputs else {path: str(path) for path in files}

    @property
    def equal_inputs(self) -> Iterator[str]:
        """A line about each set of models that are copies of one another, under names of their own."""
        copies: dict[str, dict[Path, Path]] = {}
        for path, content in self.contents.items():
            copies.setdefault(content, {}).setdefault(path.resolve(), path)
        for paths in copies.values():
            if len(paths) > 1:
                names = some([place_of(path) for path in paths.values()])
                yield f"{names} have the same content: one model that is given {len(paths)} times"

    @cached_property
    def signature(self) -> Signature:
        """The signature of its result.

        Raises:
            CheckpointError: an input is missing or unreadable.
        """
        settings = self.output_settings
        meaning = meaning_of(self.recipe, self.dtype, self.files, self.options)
        settings |= {"dtype": meaning.dtype, "shard_size": self.shard_size}
        if self.adapter is not None and self.hashes_inputs:
            settings["base"] = content_of(self.adapter.base)
        output = {name: str(value) for name, value in settings.items() if value is not None}
        by_model = {model: self.contents[path] for model, path in self.files.items()}
        return signature_of(self.recipe, by_model, self.options, output, meaning)

    @cached_property
    def digest(self) -> str:
        """The hash of the signature."""
        return self.signature.digest

    @cached_property
    def origin(self) -> Origin:
        """The provenance for the header of the model's file."""
        return replace(
            Origin.of(self.recipe, self.options, self.dtype),
            inputs=self.signature.inputs,
            output=self.output_settings,
            methods=self.signature.methods,
        )

    @property
    def quantize(self) -> str | None:
        """The quantisation of the output; None writes numbers."""
        choice: str | None = self.config["output"].get("quantize")
        return choice

    @property
    def output_settings(self) -> dict[str, Any]:
        """The settings of the output that change its tensors."""
        settings = {k: v for k, v in self.config["output"].items() if k not in _NOT_IN_THE_TENSORS}
        return {k: v for k, v in settings.items() if k != "quantize" or v is not None}

    def job(
        self, output: Path | dict[str, torch.Tensor] | None, metadata: Mapping[str, str] | None = None
    ) -> Job:
        """The engine's job for this point; `metadata` goes into the header beside the recipe."""
        brought = brought_by(self.config, self.options.model_dirs)
        return Job(
            self.recipe,
            output,
            self.dtype,
            {**metadata_of(self.recipe, self.options, self.dtype, self.quantize), **(metadata or {})},
            statistics=self.wants_statistics,
            durable=bool(self.config["output"]["durable"]),
            shard_size=self.shard_size,
            quantize=self.quantize,
            small_files=brought.small_files if brought else {},
            card=self._card() if isinstance(output, Path) and self.has_card else None,
            hashed=keep_hash if isinstance(output, Path) else None,
        )

    @property
    def has_card(self) -> bool:
        """Whether its model is written with a model card."""
        is_folder = self.output is not None and (self.shard_size is not None or not is_file_name(self.output))
        return is_folder and bool(self.config["output"].get("card", True))

    def _card(self) -> Callable[[], bytes] | None:
        def settings() -> Settings:
            brought = brought_by(self.config, self.options.model_dirs)
            return Settings(self.options, self.dtype, brought.config if brought else None, self.contents)

        return card_of(self.recipe, settings)

    def signed_job(self) -> Job:
        """The job of a signed point. Each call makes a new state dict, because an attempt may fail."""
        in_memory: dict[str, torch.Tensor] | None = {} if self.scoring.evaluations or self.adapter else None
        output = in_memory if self.output is None else self.output
        return self.job(output, {KEY: self.origin.text()})

    def read_scoring(self, planned: Plan) -> Scoring:
        """The evaluators for the model of its plan.

        Raises:
            ConfigError: everything that is wrong with the `evaluator` part of the configuration.
        """
        plugins = self.config.get("plugins") or ()
        shapes = {key: shape for key, (_, shape) in planned.layouts[0].items()}
        return read_scoring(self.config["evaluator"], shapes, plugins, self.context)

    @property
    def context(self) -> Context:
        """What evaluators may know of it."""
        inputs = {name: self.files[node] for node, name in self.names.items()}
        seed, folder = self.config.get("seed"), self.folder.absolute()
        return Context(self.folder.name, self.hyperparameters, seed, folder, inputs, self.is_offline)

    @property
    def is_offline(self) -> bool:
        """Whether evaluators may download nothing."""
        return bool((self.config.get("hub") or {}).get("offline", True))
