"""Gram matrices of the inputs that the layers of a merge receive, block by block: for RegMean++.

RegMean measures each expert as it is. RegMean++ measures a block of an expert behind the merged blocks before
it: the examples run through what is merged so far, the block of each expert sees them on its own task's data,
and its layers are merged by what they received, before the next block is measured.
Source: RegMean++, Nguyen et al. 2025, arXiv:2508.03121.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.calibration.collectors import Collector, InputCollector, collectors_of, looking
from mecha_exp.calibration.measurement import (
    Advance,
    Request,
    check_output,
    check_weights,
    header_of,
    write_statistics,
)
from mecha_exp.calibration.progress import Partial
from mecha_exp.calibration.subject import Subject, example_named
from mecha_exp.checkpoint import StateDictSource
from mecha_exp.errors import ConfigError
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.sources.statistics.header import (
    ALPHA,
    GRAM,
    MERGED_FINGERPRINTS,
    StatisticsHeader,
    fingerprint,
)


@dataclass(frozen=True)
class Expert:
    """An expert of a merge by RegMean++.

    Attributes:
        subject: the network with the weights of `stored`, and examples of the expert's task.
        stored: the expert.
        request: what the header says of model and data.
        output: the file of its Gram matrices.
    """

    subject: Subject
    stored: StateDictSource
    request: Request
    output: Path

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """The expert's tensors in float32, read one at a time; float64 stays."""
        return _Weights(self.stored)


def calibrate_along_merge(
    experts: Sequence[Expert], alpha: float = 0.9, advance: Advance = lambda examples: None
) -> list[StatisticsHeader]:
    """Measure the Gram matrices of experts along their merge by RegMean++, and write a file for each.

    Blocks are the children of the outermost `nn.ModuleList`s with linear or convolutional layers, in the
    order in which they are called; in a network without such lists each layer is a block. What lies outside
    the blocks is the mean of the experts. `regmean_plus_plus` with the same alpha merges by the files.
    Each block of each expert takes a run of its examples as far as that block.

    Args:
        experts: of one network, in the order of the merge.
        alpha: what the off-diagonal entries of Gram matrices are multiplied by, 0 to 1.
        advance: is told of progress; each block takes all examples of all experts.

    Returns:
        the header of each file.

    Raises:
        ConfigError: there are no examples, the networks differ, a block is called more than once, a module
            does not have the weights of its expert, or an output is an input.
        EvaluationError: an input is NaN or infinite, or an example fails.
    """
    _check(experts)
    settings = {
        ALPHA: alpha,
        MERGED_FINGERPRINTS: [fingerprint(expert.stored) for expert in experts],
    }
    experts = [_with_settings(expert, settings) for expert in experts]
    blocks = blocks_of(experts[0].subject)
    collectors = [[_collectors(expert, block) for block in blocks] for expert in experts]
    headers = [
        header_of(e.subject, e.stored, e.request, [*chain(*by_block)])
        for e, by_block in zip(experts, collectors, strict=True)
    ]
    merge = _Merge(experts, alpha)
    with ExitStack() as stack:
        partials = [
            stack.enter_context(Partial(expert.output, json.dumps(asdict(header), sort_keys=True)))
            for expert, header in zip(experts, headers, strict=True)
        ]
        for group, block in enumerate(blocks):
            for expert, by_block, partial in zip(experts, collectors, partials, strict=True):
                if partial.has(group):
                    advance(len(expert.subject.examples))
                else:
                    merge.show(block, expert.weights)
                    _finish_block(expert, partial, group, block, by_block[group], advance)
            merge.merge(block, partials)
        headers = [
            replace(header, rows=partial.rows) for header, partial in zip(headers, partials, strict=True)
        ]
        for expert, header, partial in zip(experts, headers, partials, strict=True):
            write_statistics(partial, header, expert.output)
    return headers


def blocks_of(subject: Subject) -> list[str]:
    """The names of the modules that are measured and merged one after another, as they are called.

    Raises:
        ConfigError: one of them is called more than once for an example, so it has no one place in the order.
    """
    layers = {id(c.module) for c in collectors_of(subject, (GRAM,)) if isinstance(c, InputCollector)}
    named = {name: module for name, module in subject.module.named_modules() if name}

    def is_measured(module: nn.Module) -> bool:
        return any(id(part) in layers for part in module.modules())

    lists = [
        name for name, module in named.items() if isinstance(module, nn.ModuleList) and is_measured(module)
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    children = [
        f"{name}.{child}"
        for name in outer
        for child, module in named[name].named_children()
        if is_measured(module)
    ]
    names = children or [name for name, module in named.items() if id(module) in layers]
    called: list[str] = []
    hooks = [
        named[name].register_forward_pre_hook(lambda *_, name=name: called.append(name)) for name in names
    ]
    try:
        with torch.no_grad():
            subject.logits(subject.examples[0])
    finally:
        for hook in hooks:
            hook.remove()
    for name in called:
        if called.count(name) > 1:
            raise ConfigError(
                f"RegMean++: the block '{name}' of {type(subject.module).__name__} is called "
                f"{called.count(name)} times for an example, so that no block lies before all its inputs. "
                "Merge by recipe=regmean."
            )
    return called


def _check(experts: Sequence[Expert]) -> None:
    """Check that all experts are of one network, with examples and the weights of their files."""
    shapes = [{name: p.shape for name, p in e.subject.module.named_parameters()} for e in experts]
    for expert, its_shapes in zip(experts, shapes, strict=True):
        expert.subject.check("sampled")
        check_output(expert.output, [*expert.stored.files, Path(expert.request.data)])
        check_weights(expert.subject, expert.stored)
        if its_shapes != shapes[0]:
            raise ConfigError(
                f"RegMean++: the networks of {experts[0].stored.name} and {expert.stored.name} have other "
                "parameters, and a merge needs one network."
            )


def _with_settings(expert: Expert, settings: Mapping[str, Any]) -> Expert:
    """An expert whose header says by which settings it was measured along the merge."""
    settings = {**expert.request.settings, **settings}
    return replace(expert, request=replace(expert.request, kinds=(GRAM,), labels="", settings=settings))


def _finish_block(
    expert: Expert,
    partial: Partial,
    group: int,
    block: str,
    collectors: Sequence[InputCollector],
    advance: Advance,
) -> None:
    """Measure a block of an expert, and write what was measured."""
    _measure(expert, expert.subject.module.get_submodule(block), collectors, advance)
    partial.finish(group, collectors, len(expert.subject.examples))
    for collector in collectors:
        collector.free()


def _collectors(expert: Expert, block: str) -> list[InputCollector]:
    """What adds up the Gram matrices of a block's layers that the expert's file has."""
    layers = set(expert.subject.module.get_submodule(block).modules())
    collectors = [c for c in collectors_of(expert.subject, (GRAM,)) if isinstance(c, InputCollector)]
    return [c for c in collectors if c.module in layers and c.model_key in expert.stored]


class _Merge:
    """The merged network, which all subjects share: they have one set of weights in memory.

    It begins as the mean of the experts. Each block is merged when its Gram matrices are known.
    """

    def __init__(self, experts: Sequence[Expert], alpha: float) -> None:
        self._experts = experts
        self._alpha = alpha
        self._regmean: Any = resolve_method("regmean").__wrapped__
        self._parameters = dict(experts[0].subject.module.named_parameters())
        for expert in experts:
            for name, parameter in expert.subject.module.named_parameters():
                parameter.data = self._parameters[name].data
        for name, key in self._keys(""):
            self._set(name, self._merged(key, []))
        for name, buffer in experts[0].subject.module.named_buffers():
            key = experts[0].subject.key_of(name)
            if buffer.is_floating_point() and key in experts[0].stored:
                mean = self._merged(key, [])
                for expert in experts:
                    expert.subject.module.get_buffer(name).copy_(mean)

    def show(self, block: str, weights: Mapping[str, Tensor]) -> None:
        """Give a block the weights of an expert."""
        for name, key in self._keys(f"{block}."):
            self._set(name, weights[key])

    def merge(self, block: str, partials: Sequence[Partial]) -> None:
        """Give a block the weights that RegMean finds by the finished Gram matrices."""
        parts = [_Grams(partial) for partial in partials]
        for name, key in self._keys(f"{block}."):
            self._set(name, self._merged(key, parts))

    def _keys(self, start: str) -> Iterator[tuple[str, str]]:
        """The parameters below a name that the experts have, with their keys."""
        for name in self._parameters:
            key = self._experts[0].subject.key_of(name)
            if name.startswith(start) and key in self._experts[0].stored:
                yield name, key

    def _merged(self, key: str, parts: Sequence[_Grams]) -> Tensor:
        models = [expert.weights for expert in self._experts]
        merged: Tensor = self._regmean(*models, statistics=_Files(parts), alpha=self._alpha, key=key)
        return merged

    def _set(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self._parameters[name].copy_(value)


class _Weights(Mapping[str, Tensor]):
    """The tensors of a model in the precision of a merge."""

    def __init__(self, stored: StateDictSource) -> None:
        self._stored = stored

    def __getitem__(self, key: str) -> Tensor:
        tensor = self._stored.read(key)
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.keys())

    def __len__(self) -> int:
        return len(self._stored.keys())


class _Grams(Mapping[str, Tensor]):
    """The finished Gram matrices of an expert, by the keys of its file."""

    def __init__(self, partial: Partial) -> None:
        self._partial = partial

    def __getitem__(self, key: str) -> Tensor:
        return self._partial.read(f"{GRAM}/{key}")

    def __contains__(self, key: object) -> bool:
        return f"{GRAM}/{key}" in self._partial.places

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(f"{GRAM}/") for name in self._partial.places)

    def __len__(self) -> int:
        return len(self._partial.places)


@dataclass(frozen=True)
class _Files:
    """Gram matrices of all experts, as a merge method receives them from `statistics(...)`."""

    parts: Sequence[_Grams]

    def __contains__(self, key: object) -> bool:
        return bool(self.parts) and all(key in part for part in self.parts)


class _ReachedError(Exception):
    """The run of an example has come to the end of the block that is measured."""


@contextmanager
def _ending_at(block: nn.Module) -> Iterator[None]:
    """Have runs end behind a block, by a `_ReachedError`."""

    def end(*_: object) -> None:
        raise _ReachedError

    hook = block.register_forward_hook(end)
    try:
        yield
    finally:
        hook.remove()


def _measure(expert: Expert, block: nn.Module, collectors: Sequence[Collector], advance: Advance) -> None:
    """Run all examples of an expert as far as a block, and add up what its layers receive."""
    for collector in collectors:
        collector.start()
    with looking(collectors), _ending_at(block), torch.no_grad():
        for number, example in enumerate(expert.subject.examples):
            with example_named(number), suppress(_ReachedError):
                expert.subject.logits(example)
            advance(1)
