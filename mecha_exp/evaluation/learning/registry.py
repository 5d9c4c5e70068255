"""The decorators that register what merged models can be learned by: logits of an evaluator, and losses.

@logits_of("mini8")
def mini8_logits(state_dict, *, split, examples=None):
    return {"digits": (logits, labels)}

@loss("hinge")
def hinge(state_dict, *, split, step=0, seed=0):
    return ...  # a scalar tensor
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from mecha_exp.errors import ConfigError

Logits = Callable[..., Mapping[str, tuple[Tensor, Tensor]]]
Loss = Callable[..., Tensor]
Function = TypeVar("Function", bound=Callable[..., object])

ENTROPY, CROSS_ENTROPY = "entropy", "cross_entropy"
OF_LOGITS = (ENTROPY, CROSS_ENTROPY)
"""The losses that every evaluator with logits has."""

_logits: dict[str, Logits] = {}
_losses: dict[str, Loss] = {}


def logits_of(evaluator: str) -> Callable[[Function], Function]:
    """Register the logits behind an evaluator, so that `sweep=gradient` can learn by their entropy.

    The function receives a state dict whose tensors (float32, on the CPU) may require gradients, and must
    use them as they are: no `detach`, no `torch.no_grad`. It returns for each task the logits, float
    [examples, classes], and the labels, int64 [examples]. Keywords that it declares are passed on:

    - `split`: the part of the data by which points are chosen, where the evaluator has splits.
    - `examples`: the positions of the examples to use, by task, in ascending order; None is all of them.
    - those of the evaluator's parameters that have the same names.

    Args:
        evaluator: the name of the evaluator.

    Raises:
        ConfigError: another module has registered logits of that evaluator.

    >>> @logits_of("my_score")
    ... def my_logits(state_dict, *, split="validation", examples=None):
    ...     return {"pets": (state_dict["head"], state_dict["head"].argmax(1))}
    """

    def register(function: Function) -> Function:
        _check_new(_logits, evaluator, function, f"logits of the evaluator '{evaluator}'")
        _logits[evaluator] = function  # type: ignore[assignment]
        return function

    return register


def loss(name: str) -> Callable[[Function], Function]:
    """Register a differentiable loss of a state dict, which `sweep=gradient sweep.loss=NAME` minimises.

    The function receives a state dict whose tensors (float32, on the CPU) require gradients, and returns a
    scalar tensor that was computed from them. Keywords that it declares are passed on: `split`, `step` (0 for
    the first), `seed`, and those of the evaluator's parameters that have the same names. With equal
    arguments it must return equal numbers: a batch is drawn from `seed` and `step`. Where the evaluator has
    splits, it must declare `split`, and must use that part of the data alone, which nothing checks.

    Args:
        name: in configurations.

    Raises:
        ConfigError: the name is that of a built-in loss, or of another module's.

    >>> @loss("norm")
    ... def norm(state_dict):
    ...     return sum(tensor.square().sum() for tensor in state_dict.values())
    """

    def register(function: Function) -> Function:
        if name in OF_LOGITS:
            raise ConfigError(f"the loss '{name}' is built in: give yours another name.")
        _check_new(_losses, name, function, f"a loss named '{name}'")
        _losses[name] = function  # type: ignore[assignment]
        return function

    return register


def find_logits(evaluator: str) -> Logits | None:
    """The logits of an evaluator; None if it has none."""
    return _logits.get(evaluator)


def find_own_loss(name: str) -> Loss | None:
    """A loss that was registered by `loss`; None if there is none of that name."""
    return _losses.get(name)


def known_losses() -> list[str]:
    """The names of all losses."""
    return [*OF_LOGITS, *sorted(_losses)]


def evaluators_with_logits() -> list[str]:
    """The names of the evaluators that are imported and have logits."""
    return sorted(_logits)


def _check_new(known: Mapping[str, Callable[..., object]], name: str, new: object, what: str) -> None:
    """Check that no other module has registered that name: the later one would win."""
    other = known.get(name)
    if other is not None and _module(other) != _module(new):
        raise ConfigError(
            f"two modules have {what}: {_module(other)} and {_module(new)}. Load one of them alone."
        )


def _module(function: object) -> str:
    return str(getattr(inspect.unwrap(function), "__module__", ""))  # type: ignore[arg-type]
