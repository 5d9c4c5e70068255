"""The models whose weights are learned: what a point merges as base + sum of weight (task vector)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mecha_exp.app.adaptive.coefficients import Coefficients
from mecha_exp.app.adaptive.optimiser import Floats
from mecha_exp.app.adaptive.task_vectors import TaskVectors
from mecha_exp.app.point import Point
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.engine import Job, plan, run_plan
from mecha_exp.errors import ConfigError
from mecha_exp.graph.by_key import by_key
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, call

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.methods.tasks import elected_total  # type: ignore[import-not-found, unused-ignore]
from mecha_exp.sources.source import infos_of

PLAIN, ELECTED = "task_arithmetic", "elected_task_arithmetic"
METHODS = (PLAIN, ELECTED)
"""The methods that are linear in their weights: of task vectors, and of those that TIES would merge."""
VECTORS = "task_vectors"
"""The folder in that of the sweep for task vectors that have to be made; it is gone at the end."""


@dataclass(frozen=True)
class Experiment:
    """The models whose weights are learned.

    Attributes:
        point: a point of the sweep, with the engine's options.
        base: the base.
        experts: the experts, in the order of their weights.
        method: one of `METHODS`.
        settings: the other arguments of the method.
    """

    point: Point
    base: ModelNode
    experts: tuple[ModelNode, ...]
    method: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, point: Point) -> Experiment:
        """The models of a point.

        Raises:
            ConfigError: it is not base + sum_i w_i (expert_i - base) of files.
        """
        node = point.recipe
        arguments: Mapping[str, Any] = dict(node.arguments) if isinstance(node, MergeNode) else {}
        models = arguments.get("models", ())
        method = node.method.identifier if isinstance(node, MergeNode) else ""
        if method not in METHODS or not all(isinstance(m, ModelNode) for m in (arguments["base"], *models)):
            raise ConfigError(
                "sweep=gradient learns the weights of base + sum of weight (expert - base), of files. Use "
                "recipe=task_arithmetic, or recipe=elected_task_arithmetic (AdaMerging++), with models.base "
                "and models.experts."
            )
        own_arguments = ("base", "models", "weights", "scale")
        settings = {name: value for name, value in arguments.items() if name not in own_arguments}
        return cls(point, arguments["base"], tuple(models), method, settings)

    @property
    def names(self) -> list[str]:
        """The names of the experts."""
        return [self.point.names[expert] for expert in self.experts]

    def recipe(self, coefficients: Coefficients, values: Floats) -> Node:
        """The recipe with these weights, as a point has it."""
        weights = coefficients.weights(values)
        argument = weights if isinstance(weights, list) else by_key(weights)
        return call(self.method, self.base, *self.experts, weights=argument, scale=1.0, **self.settings)

    @property
    def identity(self) -> list[str]:
        """The texts that decide the merge beside the weights: method, settings, contents of the models."""
        contents = [self.point.contents[self.point.files[m]] for m in (self.base, *self.experts)]
        return [self.method, *(f"{k}={v!r}" for k, v in self.settings.items()), *contents]

    @contextmanager
    def opened(self, folder: Path) -> Iterator[TaskVectors]:
        """The task vectors, opened as the engine opens them.

        Those of which entries were chosen are made in one pass, as files of differences in float32.

        Args:
            folder: of the sweep.
        """
        if self.method == PLAIN:
            with plan([self.point.job({})], self.point.options) as planned:
                yield TaskVectors.of(self.base, self.experts, planned.sources)
            return
        vectors = folder / VECTORS
        try:
            task_vectors = self._made_vectors(vectors)
            recipe = call(PLAIN, self.base, *task_vectors, weights=[1.0] * len(task_vectors), scale=1.0)
            with plan([Job(recipe, {})], self.point.options) as planned:
                yield TaskVectors.of(self.base, task_vectors, planned.sources)
        finally:
            shutil.rmtree(vectors, ignore_errors=True)

    def _made_vectors(self, folder: Path) -> tuple[ModelNode, ...]:
        """Write the entries of each task vector that are merged; weights of 0 leave the other experts out."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{place}.safetensors" for place in range(len(self.experts))]
        jobs = []
        for place, path in enumerate(paths):
            alone = [float(other == place) for other in range(len(paths))]
            recipe = elected_total(self.base, *self.experts, weights=alone, **self.settings)
            jobs.append(Job(recipe, path, torch.float32, durable=False))
        with plan(jobs, self.point.options) as planned:
            run_plan(planned)
        return tuple(ModelNode(str(path.absolute()), "delta") for path in paths)

    def coefficients(self, kinds: Sequence[str]) -> dict[str, Coefficients]:
        """The coefficients of each kind of `sweep.by`; reads headers only."""
        with plan([self.point.job({})], self.point.options) as planned:
            vectors = TaskVectors.of(self.base, self.experts, planned.sources)
            anatomy = Anatomy.of(infos_of(vectors.base))
        name, count = self.point.names[self.base], len(self.experts)
        return {kind: Coefficients.of(kind, vectors.keys, anatomy, count, name) for kind in kinds}

    def check_merge(self, coefficients: Coefficients, vectors: TaskVectors) -> None:
        """Check that the engine merges what is learned: other weights for each part and expert, key by key.

        Raises:
            ConfigError: a key comes out otherwise, such as running statistics that are pooled.
        """
        values = _different_values(coefficients)
        merged: dict[str, torch.Tensor] = {}
        job = Job(self.recipe(coefficients, values), merged, torch.float32)
        with plan([job], self.point.options) as planned:
            run_plan(planned)
        expected = vectors.merged(coefficients.by_key(values))
        for key in vectors.keys:
            if not _alike(merged.get(key), expected[key]):
                raise ConfigError(
                    f"sweep=gradient: the engine does not merge '{key}' as base + sum of weight (expert - "
                    "base), so a gradient would be that of another model. For running statistics set "
                    "engine.running_stats=merge."
                )


def _different_values(coefficients: Coefficients) -> Floats:
    """Weights from 0.1 to 0.9 with three digits, of which neighbours differ."""
    parts, experts = coefficients.shape
    numbers = [round(0.1 + 0.8 * (i * 0.6180339887 % 1), 3) for i in range(parts * experts)]
    return np.array(numbers, dtype=np.float64).reshape(parts, experts)


def _alike(merged: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether a merged tensor is what the sum of task vectors gives, up to rounding."""
    if merged is None or merged.shape != expected.shape:
        return False
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((merged - expected).abs() <= 1e-4 * scale).all())
