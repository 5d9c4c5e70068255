"""What is added up over the examples: squares and norms of gradients, products of the inputs of layers.

Everything is added in float64, in the order of the examples. A layer that is called several times for an
example adds all its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from mecha_exp.architectures import OUTPUTS
from mecha_exp.calibration.subject import Subject
from mecha_exp.errors import EvaluationError
from mecha_exp.sources.statistics.header import FISHER, GRADIENT, GRAM, INPUTS_FIRST, MEAN, NORM

Rows = Callable[[Tensor], Tensor]
"""(input of a layer) -> the rows that its weight is applied to, [rows, inputs]."""


class Collector(ABC):
    """One statistic at one key.

    Attributes:
        kind, key: which and where.
        total: the sum so far, in float64.
        rows: how much it is of.
    """

    kind: str

    def __init__(self, key: str, shape: Sequence[int]) -> None:
        self.key = key
        self.shape = tuple(shape)
        self.total = torch.empty(0, dtype=torch.float64)
        self.rows = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the sum."""
        return 8 * torch.Size(self.shape).numel()

    @property
    def model_key(self) -> str:
        """The key of the model."""
        return self.key.removesuffix(INPUTS_FIRST).removesuffix(OUTPUTS)

    @property
    def name(self) -> str:
        """The key in the file."""
        return f"{self.kind}/{self.key}"

    def start(self) -> None:
        """Begin with zeros."""
        self.total = torch.zeros(self.shape, dtype=torch.float64)
        self.rows = 0

    def so_far(self) -> Tensor:
        """The sum so far, to be kept for a later run."""
        return self.total

    @abstractmethod
    def result(self, examples: int) -> Tensor:
        """The statistic, in float32."""

    def free(self) -> None:
        """Let go of the sum."""
        self.total = torch.empty(0, dtype=torch.float64)


class GradientCollector(Collector):
    """A mean over examples of what the gradient of a parameter gives."""

    def __init__(self, key: str, shape: Sequence[int], parameter: nn.Parameter) -> None:
        super().__init__(key, shape)
        self.parameter = parameter

    @abstractmethod
    def of_gradient(self, gradient: Tensor) -> Tensor:
        """What a gradient in float64 adds."""

    def add(self, gradient: Tensor | None, weight: float, number: int) -> None:
        """Add the gradient of a log-likelihood of an example.

        Raises:
            EvaluationError: it is NaN or infinite.
        """
        if gradient is None:
            return
        added = self.of_gradient(gradient.detach().double())
        if not bool(added.isfinite().all()):
            raise EvaluationError(
                f"the gradient of '{self.key}' is NaN or infinite at example {number}. Leave the example "
                "out, or compute in float32: dtype=float32."
            )
        self.total += weight * added.cpu()

    def result(self, examples: int) -> Tensor:
        return (self.total / examples).float()


class FisherCollector(GradientCollector):
    """The diagonal Fisher information of a parameter: the mean over examples of its squared gradient."""

    kind = FISHER

    def of_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.square()


class GradientNormCollector(GradientCollector):
    """The mean over examples of the Euclidean norm of a parameter's gradient, [1]."""

    kind = GRADIENT

    def of_gradient(self, gradient: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm.reshape(1)


class InputCollector(Collector):
    """A statistic of the inputs of a layer."""

    def __init__(self, key: str, shape: Sequence[int], module: nn.Module, rows_of: Rows) -> None:
        super().__init__(key, shape)
        self.module = module
        self._rows_of = rows_of

    def watch(self) -> RemovableHandle:
        """See what the layer receives, until the handle is removed."""
        return self.module.register_forward_pre_hook(self.look)

    def look(self, module: nn.Module, arguments: Any) -> None:
        """Add the input of a call of the layer."""
        rows = self._rows_of(arguments[0].detach()).double().cpu()
        if not bool(rows.isfinite().all()):
            raise EvaluationError(
                f"an input of the layer of '{self.key}' is NaN or infinite. Compute in float32: "
                "dtype=float32."
            )
        self.add(rows)
        self.rows += len(rows)

    @abstractmethod
    def add(self, rows: Tensor) -> None:
        """Add rows of inputs, in float64."""

    def result(self, examples: int) -> Tensor:
        return (self.total / max(self.rows, 1)).float()


class GramCollector(InputCollector):
    """X^T X / rows of the inputs X of a layer."""

    kind = GRAM

    def add(self, rows: Tensor) -> None:
        self.total += rows.mT @ rows


class MeanCollector(InputCollector):
    """The mean of the inputs of a layer."""

    kind = MEAN

    def add(self, rows: Tensor) -> None:
        self.total += rows.sum(0)


class NormCollector(InputCollector):
    """The root mean square of each input of a layer."""

    kind = NORM

    def add(self, rows: Tensor) -> None:
        self.total += rows.square().sum(0)

    def result(self, examples: int) -> Tensor:
        return (self.total / max(self.rows, 1)).sqrt().float()


def collectors_of(subject: Subject, kinds: Sequence[str]) -> list[Collector]:
    """A collector for each statistic that is asked for and can be measured, in the order of the module.

    Parameters that several layers share have statistics of gradients, but none of inputs.
    """
    collectors: list[Collector] = []
    for name, parameter in subject.module.named_parameters():
        key, is_floating = subject.key_of(name), parameter.is_floating_point()
        if FISHER in kinds and is_floating:
            collectors.append(FisherCollector(key, parameter.shape, parameter))
        if GRADIENT in kinds and is_floating:
            collectors.append(GradientNormCollector(key, (1,), parameter))
    for key, module, rows_of in layers_of(subject):
        inputs = module.weight[0].numel()
        if is_turned(module):
            key, inputs = f"{key}{INPUTS_FIRST}", len(module.weight)
        for kind, collector, shape in (
            (GRAM, GramCollector, (inputs, inputs)),
            (MEAN, MeanCollector, (inputs,)),
            (NORM, NormCollector, (inputs,)),
        ):
            if kind in kinds:
                collectors.append(collector(key, shape, module, rows_of))
    return collectors


def layers_of(subject: Subject) -> Iterator[tuple[str, Any, Rows]]:
    """The linear and convolutional layers with a weight of their own: its key, the layer, and its rows."""
    uses: dict[int, int] = {}
    for module in subject.module.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, module in subject.module.named_modules():
        rows_of = _rows_of(module)
        if rows_of is not None and uses[id(module.weight)] == 1:
            yield subject.key_of(f"{name}.weight" if name else "weight"), module, rows_of


def is_turned(module: nn.Module) -> bool:
    """Whether a layer is linear with the inputs on the first axis of its weight: `Conv1D` of transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _rows_of(module: nn.Module) -> Rows | None:
    """How the rows of a layer's input are found; None for what is not a matrix of its inputs."""
    if type(module) is nn.Linear or is_turned(module):
        return lambda x: x.reshape(-1, x.shape[-1])
    if type(module) in (nn.Conv1d, nn.Conv2d) and module.groups == 1:
        return lambda x: _patches(module, x)
    return None


def _patches(module: Any, x: Tensor) -> Tensor:
    """The patches that the filters of a convolution see, [positions, channels * kernel]."""
    axes = len(module.kernel_size)
    batch = x if x.ndim == axes + 2 else x[None]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    batch = F.pad(batch, module._reversed_padding_repeated_twice, mode)
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    if axes == 1:
        batch, kernel, dilation, stride = batch[:, :, None], (1, *kernel), (1, *dilation), (1, *stride)
    columns = F.unfold(batch, kernel, dilation, stride=stride)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])


@contextmanager
def looking(collectors: Sequence[Collector]) -> Iterator[None]:
    """Have the collectors of inputs see what their layers receive."""
    hooks = [collector.watch() for collector in collectors if isinstance(collector, InputCollector)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
