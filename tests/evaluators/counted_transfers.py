"""Copies to the simulated GPU that are counted."""

import torch

from mecha_exp.evaluation.transfers import Transfers


class Counting(Transfers):
    """Copies that are counted, made at once rather than by a thread: the simulation has none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies = 0

    def _copied(self, tensor, dtype):
        self.copies += 1
        return super()._copied(tensor, dtype)

    def expect(self, model):
        self.fetch({key: model[key] for key in self._dtypes if key in model})
