"""What a process or an actor of evaluators is asked for: a measurement by an evaluator's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.isolation.shared_model import SharedModel
from mecha_exp.evaluation.measurement import Measurement, measured_by
from mecha_exp.evaluation.model import Model, load_state_dict
from mecha_exp.evaluation.registry import named_evaluator

if TYPE_CHECKING:
    from mecha_exp.evaluation.scoring import Evaluation


@dataclass(frozen=True, eq=False)
class Request:
    """A measurement of a model by an evaluator in another process.

    Attributes:
        evaluation: the evaluator with its parameters.
        model: in a file, or in memory.
        timeout: the most seconds that it may take; None is unlimited.
        context: what the evaluator may know of the point.
    """

    evaluation: Evaluation
    model: Model
    timeout: float | None
    context: Context | None = None

    @property
    def evaluator(self) -> str:
        """The name of the evaluator."""
        return self.evaluation.evaluator.name

    @property
    def arguments(self) -> tuple[str, dict[str, Any], Context | None]:
        """The arguments of `measure` beside the model, for another process."""
        context = self.context and self.context.without_report()
        return self.evaluator, dict(self.evaluation.parameters), context


def measure(
    name: str, parameters: dict[str, Any], context: Context | None, model: Model | SharedModel
) -> Measurement:
    """Measure a model by an evaluator that this process has loaded, found by its name.

    Raises:
        MechaError: no plugin defines it, or it failed; see `measured_by`.
    """
    evaluator = named_evaluator(name)
    if evaluator is None:
        raise EvaluationError(
            f"the evaluator '{name}' is defined in no plugin, so that a process of its own cannot find it. "
            "Name its file among the `plugins`, or leave evaluator.timeout and evaluator.workers out."
        )
    state_dict = load_state_dict(model.open() if isinstance(model, SharedModel) else model)
    return measured_by(evaluator, parameters, state_dict, context)
