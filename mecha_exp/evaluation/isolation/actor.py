"""Measure on an actor of Ray, so that slow evaluators run on other machines and GPUs than the merge.

A merged model goes through Ray's object store, whose one copy the actor maps if it is on the same machine. A
model in a file is opened by its path, which all machines see.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.checkpoint import dtype_name
from mecha_exp.cluster.actors import Actor
from mecha_exp.cluster.workers import LostWorker
from mecha_exp.errors import EvaluationError, MechaError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.isolation.process import LostProcessError
from mecha_exp.evaluation.isolation.request import Request, measure
from mecha_exp.evaluation.isolation.shared_model import tensor_in
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.plugins import load_plugins

Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each tensor."""


class EvaluationActor:
    """Measures models one after another on an actor, as `EvaluationProcess` does in a process.

    Progress is not shown: a share has no terminal.

    Args:
        plugins: the files that define its evaluators.
        actor: where they run; this object alone uses it.
    """

    def __init__(self, plugins: Sequence[str], actor: Actor) -> None:
        self._plugins, self._actor = tuple(plugins), actor

    def begin(self) -> None:
        """Nothing: the actor starts as soon as the cluster has room for it, with its first call."""

    def score(self, request: Request) -> Measurement:
        """Measure a model by an evaluator; returns its numbers by name, and its outcomes.

        Raises:
            LostProcessError: the evaluator exceeded its time, or its actor has ended.
            EvaluationError: the evaluator raised, or did not return numbers.
        """
        model = request.model
        where, arrays = (model.absolute(), {}) if isinstance(model, Path) else _as_bytes(model)
        try:
            if not self._actor.is_ready:  # which is not in the evaluator's time
                self._actor.call(_load, (self._plugins,), {})
            measured = self._actor.call(_measure, (*request.arguments, where), arrays, request.timeout)
        except TimeoutError:
            raise LostProcessError.of_time(request) from None
        except LostWorker as error:
            raise LostProcessError.of_end(request, str(error)) from None
        except MechaError as error:
            raise EvaluationError(str(error)) from None
        assert isinstance(measured, Measurement)
        return measured

    def interrupt(self) -> None:
        """End the actor in the middle of a measurement of another thread, which raises."""
        self._actor.close()

    def close(self) -> None:
        """End the actor."""
        self._actor.close()


def _as_bytes(model: Mapping[str, Tensor]) -> tuple[Headers, dict[str, Any]]:
    """The headers of tensors, and their bytes as NumPy arrays on the same memory."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.items()}
    headers = {key: (dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors.items()}
    return headers, {key: t.reshape(-1).view(torch.uint8).numpy() for key, t in tensors.items()}


def _load(plugins: Sequence[str], _: object) -> None:
    """Load the evaluators in the actor, unless it has them."""
    load_plugins(plugins)


def _measure(
    name: str,
    parameters: dict[str, Any],
    context: Context | None,
    where: Path | Headers,
    arrays: Mapping[str, Any],
) -> Measurement:
    """Measure in the actor: a model in a file, or the arrays as the tensors that they are the bytes of."""
    if isinstance(where, Path):
        return measure(name, parameters, context, where)
    with warnings.catch_warnings():  # of arrays that are not to be written to: `measured_by` checks that
        warnings.filterwarnings("ignore", message=".*not writable")
        model = {key: tensor_in(arrays[key], *header) for key, header in where.items()}
    return measure(name, parameters, context, model)
