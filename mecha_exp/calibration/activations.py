"""Activations of units that may change places: what tells units of two models alike, example by example.

Rows of both models belong together only where they are of the same position of the same example. So positions
are drawn by the seed and by how many rows came before, which is the same in each model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mecha_exp.architectures import OUTPUTS, Symmetry, detect
from mecha_exp.calibration.collectors import Collector, InputCollector, is_turned, layers_of
from mecha_exp.calibration.subject import Subject, mixed
from mecha_exp.checkpoint import StateDictSource
from mecha_exp.sources.source import infos_of
from mecha_exp.sources.statistics.header import ACTIVATIONS


class ActivationCollector(InputCollector):
    """Rows of what a layer receives, or of what it gives: float32 [rows, units].

    Args:
        key: of the weight, with ` (outputs)` behind it for what the layer gives.
        units: the length of a row.
        module: the layer.
        positions: rows at most of each call of the layer, which are drawn.
        seed: of the draws.
        examples: how many there will be.
    """

    kind = ACTIVATIONS

    def __init__(
        self, key: str, units: int, module: nn.Module, positions: int, seed: int, examples: int
    ) -> None:
        channels = -3 if isinstance(module, nn.Conv2d) else -1
        super().__init__(key, (0, units), module, lambda x: x.movedim(channels, -1).reshape(-1, units))
        self._positions = positions
        self._seed = seed
        self._most_rows = positions * examples
        self._recent: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return 4 * self._most_rows * self.shape[1]

    def start(self) -> None:
        self.total, self.rows, self._recent = torch.zeros(self.shape), 0, []

    def watch(self) -> RemovableHandle:
        if self.key.endswith(OUTPUTS):
            return self.module.register_forward_hook(lambda module, _, output: self.look(module, (output,)))
        return super().watch()

    def add(self, rows: Tensor) -> None:
        generator = torch.Generator().manual_seed(mixed(self._seed, self.rows))
        chosen = torch.randperm(len(rows), generator=generator)[: self._positions].sort().values
        self._recent.append(rows[chosen].float())

    def so_far(self) -> Tensor:
        self.total, self._recent = torch.cat([self.total, *self._recent]), []
        return self.total

    def result(self, examples: int) -> Tensor:
        return self.so_far()


def activation_collectors(
    subject: Subject, symmetries: Iterable[Symmetry], positions: int, seed: int
) -> list[Collector]:
    """A collector for each layer at which units that may change places are seen."""
    names = {name for symmetry in symmetries for name, _ in symmetry.activations}
    collectors: list[Collector] = []
    for key, module, _ in layers_of(subject):
        if is_turned(module):
            continue
        outputs, inputs = module.weight.shape[:2]
        for name, units in ((key, inputs), (key + OUTPUTS, outputs)):
            if name in names:
                collector = ActivationCollector(name, units, module, positions, seed, len(subject.examples))
                collectors.append(collector)
    return collectors


def symmetries_of(stored: StateDictSource) -> tuple[Symmetry, ...]:
    """The units of a model that may change places, as its model config says."""
    return detect(infos_of(stored)).config.symmetries(stored.keys())


def keys_unseen(symmetries: Iterable[Symmetry], seen: Collection[str]) -> set[str]:
    """The keys of symmetries whose units are seen at none of the layers."""
    unseen = (s for s in symmetries if not any(name in seen for name, _ in s.activations))
    return {key for symmetry in unseen for key in symmetry.keys}
