"""Finds the running statistics of a merged model's batch norms anew, by running data through it.

The statistics of the inputs are not those of the merge, whose activations vary less: Jordan et al., "REPAIR:
REnormalizing Permuted Activations for Interpolation Repair", 2022, arXiv:2211.08403.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mecha_exp.calibration.measurement import Advance, check_output, check_weights
from mecha_exp.calibration.subject import Subject, example_named
from mecha_exp.checkpoint import StateDictSource
from mecha_exp.checkpoint.dtypes import number_format
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.engine.provenance import KEY
from mecha_exp.errors import ConfigError, EvaluationError, counted
from mecha_exp.recipe.files import METADATA_KEY

METADATA = "mecha_exp.recalibrated"
"""The entry of the output's header that tells which model was recalibrated, and on which data."""

_OF_THE_MERGE = (METADATA_KEY, KEY)  # a recipe would promise other bytes
_COPIED = 1 << 24  # bytes at once


def recalibrate(
    subject: Subject,
    stored: StateDictSource,
    output: Path,
    provenance: Mapping[str, Any],
    advance: Advance = lambda examples: None,
) -> list[str]:
    """Write a model with the running means and variances that its batch norms have on the examples.

    A layer is measured when all layers before it have their new statistics, in a trip over the examples of
    its own. So the numbers are what its inputs have in evaluation, whatever a batch is, and memory is that
    of one example. Sums are float64; variances are unbiased, as torch's.

    Args:
        subject: the network with the weights of `stored`, and the examples.
        stored: the model.
        output: a `.safetensors` file. Its other tensors are those of the model, bit for bit.
        provenance: goes into its header as JSON, in place of the recipe: the output is not what that makes.
        advance: is told of progress; there are as many trips as layers.

    Returns:
        the names of the layers, in the order of the network.

    Raises:
        ConfigError: there are no examples, the module does not have the weights of the model, no batch norm
            of it has running statistics, or the output is an input.
        EvaluationError: a layer is applied twice, or is not met by the examples, or sees NaN or infinity, or
            a single value for each channel; or an example fails.
    """
    subject.check("sampled")
    check_output(output, stored.files)
    check_weights(subject, stored)
    layers = _layers(subject, stored)
    names = _order(subject, layers)
    changed: dict[str, Tensor] = {}
    for name in names:
        moments = _Moments()
        with _until(layers[name], moments.add):
            for number in range(len(subject.examples)):
                _run(subject, number)
                advance(1)
        layers[name].running_mean, layers[name].running_var = moments.result(name, layers[name])
        for each, module in subject.module.named_modules(remove_duplicate=False):
            if module is layers[name]:  # which the model may have under several names
                for buffer in ("running_mean", "running_var"):
                    changed[subject.key_of(_buffer(each, buffer))] = getattr(module, buffer)
    _write(stored, changed, output, {METADATA: json.dumps({**provenance, "layers": names})})
    return names


class _Reached(BaseException):
    """The layer that is measured has its input: what follows in the network is not needed."""


class _Moments:
    """The mean and the variance of each channel, in the order of the examples.

    Groups are joined as in Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, inputs: Tensor) -> None:
        """Add the inputs of a layer, [examples, channels, ...]; then the example ends."""
        values = inputs.detach().transpose(0, 1).flatten(1).double()
        count, mean = values.shape[1], values.mean(1)
        squares = (values - mean[:, None]).square().sum(1)
        total = self.count + count
        shift = mean - self.mean
        self.mean = self.mean + shift * (count / total)
        self.squares = self.squares + squares + shift.square() * (self.count * count / total)
        self.count = total
        raise _Reached

    def result(self, name: str, layer: _BatchNorm) -> tuple[Tensor, Tensor]:
        """The mean and the unbiased variance, in the layer's dtype."""
        if self.count < 2:
            raise EvaluationError(
                f"'{name}' sees {counted(self.count, 'value')} for each channel in all examples, and a "
                "variance takes two. Give more examples."
            )
        assert isinstance(self.mean, Tensor) and isinstance(self.squares, Tensor)
        assert layer.running_mean is not None
        variance = self.squares / (self.count - 1)
        if not bool((self.mean.isfinite() & variance.isfinite()).all()):
            raise EvaluationError(
                f"the inputs of '{name}' are NaN or infinite. Look for NaN in the data and in the model."
            )
        return self.mean.to(layer.running_mean.dtype), variance.to(layer.running_mean.dtype)


def _layers(subject: Subject, stored: StateDictSource) -> dict[str, _BatchNorm]:
    """The batch norms with running statistics, by name."""
    layers = {
        name: module
        for name, module in subject.module.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not layers:
        raise ConfigError(
            f"{type(subject.module).__name__} has no batch norm with running statistics: there is nothing "
            "to recalibrate."
        )
    for name in layers:
        if (key := subject.key_of(_buffer(name, "running_mean"))) not in stored:
            raise ConfigError(
                f"'{key}' is not a key of {stored.name}. Give Subject the keys of running statistics, too: "
                "keys={buffer: key}."
            )
    return layers


def _buffer(layer: str, buffer: str) -> str:
    """The name of a layer's buffer; the layer may be the whole module."""
    return f"{layer}.{buffer}" if layer else buffer


def _order(subject: Subject, layers: Mapping[str, _BatchNorm]) -> list[str]:
    """The layers in the order in which the first example meets them."""
    met: list[str] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, __, name=name: met.append(name))
        for name, layer in layers.items()
    ]
    try:
        _run(subject, 0)
    finally:
        for hook in hooks:
            hook.remove()
    repeated = [name for name in layers if met.count(name) != 1]
    if repeated:
        times = met.count(repeated[0])
        how = "never applied in the first example"
        if times:
            how = f"applied {times} times in one example: its statistics would depend on themselves"
        raise EvaluationError(f"'{repeated[0]}' is {how}.")
    return met


@contextmanager
def _until(layer: nn.Module, look: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, each example ends at a layer, whose input is looked at."""
    hook = layer.register_forward_pre_hook(lambda _, inputs: look(inputs[0]))
    try:
        yield
    finally:
        hook.remove()


def _run(subject: Subject, number: int) -> None:
    with example_named(number), suppress(_Reached), torch.no_grad():
        subject.logits(subject.examples[number])


def _write(
    stored: StateDictSource, changed: Mapping[str, Tensor], output: Path, header: Mapping[str, str]
) -> None:
    """Write the model with the changed tensors: the file is complete, or does not exist."""
    infos = {key: stored.info(key) for key in stored.keys()}
    kept = {name: text for name, text in stored.metadata.items() if name not in _OF_THE_MERGE}
    laid_out = {key: (info.dtype, info.shape) for key, info in infos.items()}
    with CheckpointWriter(output, laid_out, {**kept, **header}) as writer:
        for key, info in infos.items():
            if key in changed:
                writer.write(key, 0, _fitted(changed[key], key, info.dtype))
                continue
            for start in range(0, info.nbytes, _COPIED):
                part = memoryview(bytearray(min(_COPIED, info.nbytes - start)))
                stored.read_bytes_into(key, start, part)
                writer.write_bytes(key, start, part)
        writer.commit()


def _fitted(values: Tensor, key: str, dtype: str) -> Tensor:
    """The values in the dtype in which they are stored."""
    stored = values.cpu().to(number_format(dtype).torch)
    if not bool(stored.isfinite().all()):
        largest = float(values.abs().max())
        raise EvaluationError(
            f"'{key}' is up to {largest:.3g}, which {dtype} does not hold. Merge to float32."
        )
    return stored
