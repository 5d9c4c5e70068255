"""The task vectors of a recipe, streamed key by key: sums of them, and inner products with a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mecha_exp.app.adaptive.optimiser import Floats
from mecha_exp.checkpoint.dtypes import torch_dtype
from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.source import Source


@dataclass(frozen=True)
class TaskVectors:
    """The task vectors d_i = expert_i - base of a recipe; a file of differences is one itself.

    At any time there is one key of one expert in memory, so memory does not grow with the number of experts.

    Attributes:
        base: the base, opened.
        experts: the experts, opened.
        are_differences: whether each expert is a file of differences.
        keys: what is merged: floating point, in all of them, of one shape.
        copied: the other keys of the base, which no weight changes.
    """

    base: Source
    experts: tuple[Source, ...]
    are_differences: tuple[bool, ...]
    keys: tuple[str, ...]
    copied: tuple[str, ...]

    @classmethod
    def of(
        cls, base: ModelNode, experts: Sequence[ModelNode], sources: Mapping[ModelNode, Source]
    ) -> TaskVectors:
        """The task vectors of opened models.

        Raises:
            ConfigError: an expert lacks a key, or has it in another shape.
        """
        opened = tuple(sources[expert] for expert in experts)
        infos = {key: sources[base].info(key) for key in sources[base].keys()}
        keys = tuple(key for key, info in infos.items() if torch_dtype(info.dtype).is_floating_point)
        for source in opened:
            if odd := [k for k in keys if k not in source or source.info(k).shape != infos[k].shape]:
                raise ConfigError(
                    f"sweep=gradient: {source.name} has no '{odd[0]}' of the base's shape, and weights are "
                    "learned for models of the same keys and shapes."
                )
        copied = tuple(key for key in infos if key not in keys)
        return cls(sources[base], opened, tuple(e.merge_space == "delta" for e in experts), keys, copied)

    def merged(self, weights: Mapping[str, Floats]) -> dict[str, Tensor]:
        """The model base + sum_i w_i d_i: float32, and the keys that are not floating point as they are.

        Args:
            weights: of each expert, float64 [experts], by key.
        """
        model = {key: self._sum(key, weights[key]) for key in self.keys}
        return model | {key: self.base.read(key) for key in self.copied}

    def products(self, gradient: Mapping[str, Tensor]) -> Floats:
        """The inner products of a gradient with each task vector, key by key, float64 [keys, experts].

        Args:
            gradient: float32, of the shape of each key; a key that is missing has none, so 0.
        """
        products = np.zeros((len(self.keys), len(self.experts)))
        for row, key in enumerate(self.keys):
            if key not in gradient:
                continue
            base, flat = self._read(self.base, key), gradient[key].double().flatten()
            for column in range(len(self.experts)):
                vector = self._vector(column, key, base).double().flatten()
                products[row, column] = torch.dot(flat, vector).item()
        return products

    def _sum(self, key: str, weights: Floats) -> Tensor:
        base = self._read(self.base, key)
        total = base.clone()
        for column, weight in enumerate(weights.tolist()):
            total.add_(self._vector(column, key, base), alpha=weight)
        return total

    def _vector(self, expert: int, key: str, base: Tensor) -> Tensor:
        values = self._read(self.experts[expert], key)
        return values if self.are_differences[expert] else values - base

    def _read(self, source: Source, key: str) -> Tensor:
        return source.read(key).float()
