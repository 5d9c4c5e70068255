"""Measures the statistics of a model on data, within a limit of memory, and goes on where it was stopped.

The sums that fit into the memory are found in one trip over the examples, the others in further trips. After
each chunk of examples the sums are written beside the output, so that the same command continues there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mecha_exp._version import __version__
from mecha_exp.architectures import Symmetry
from mecha_exp.calibration.activations import activation_collectors, keys_unseen, symmetries_of
from mecha_exp.calibration.collectors import Collector, GradientCollector, collectors_of, looking
from mecha_exp.calibration.progress import Partial
from mecha_exp.calibration.subject import Subject, example_named
from mecha_exp.checkpoint import StateDictSource, dtype_name
from mecha_exp.checkpoint.safetensors.writer import CheckpointWriter
from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common.networks import is_same
from mecha_exp.sources.statistics.header import (
    ACTIVATIONS,
    FISHER,
    GRADIENT,
    GRAM,
    MASK,
    StatisticsHeader,
    fingerprint,
)

Advance = Callable[[int], None]
"""Receives how many examples of how many trips were finished since the last call."""


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        kinds: of statistics: `fisher`, `gram`, `mean`, `norm`, `gradient`, `activations`.
        labels: whose gradients are measured; see `Subject.log_likelihoods`.
        seed: of sampled labels and positions.
        positions: of each call of a layer at most, whose activations are written.
        memory: bytes that the sums of one trip may take.
        chunk: examples after which the sums are written.
        model, model_sha256, data, data_sha256: for the header.
        settings: what else decides the numbers, for the header.
        code: a hash of the user's code that makes the subject, for the header.
    """

    kinds: tuple[str, ...]
    labels: str = "sampled"
    seed: int = 0
    positions: int = 16
    memory: int = 2 << 30
    chunk: int = 256
    model: str = ""
    model_sha256: str = ""
    data: str = ""
    data_sha256: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""


def calibrate(
    subject: Subject,
    stored: StateDictSource,
    request: Request,
    output: Path,
    advance: Advance = lambda examples: None,
) -> StatisticsHeader:
    """Measure statistics and write them.

    Args:
        subject: the network with the weights of `stored`, and the examples.
        stored: the model that the statistics are of.
        request: what is measured.
        output: a `.safetensors` file.
        advance: is told of progress.

    Returns:
        the header of the file.

    Raises:
        ConfigError: there are no examples or labels, nothing can be measured, the module does not have the
            weights of the model, the output is an input, or activations are of data without a name.
        EvaluationError: a gradient or an input is NaN or infinite, or an example fails.
    """
    subject.check(request.labels)
    check_output(output, (*stored.files, Path(request.data)))
    check_weights(subject, stored)
    symmetries = _symmetries(stored, request)
    candidates = collectors_of(subject, request.kinds)
    candidates += activation_collectors(subject, symmetries, request.positions, request.seed)
    collectors = [c for c in candidates if c.model_key in stored]
    for kind in request.kinds:
        if not any(c.kind == kind for c in collectors):
            raise ConfigError(
                f"kind={kind}: no layer of {type(subject.module).__name__} with a key of {stored.name} can "
                "be measured. Gram matrices, means, norms and activations are of linear and convolutional "
                "layers."
            )
    header = header_of(subject, stored, request, collectors, symmetries)
    identity = json.dumps([asdict(header), request.memory], sort_keys=True)
    with Partial(output, identity) as partial:
        for group, trip in enumerate(trips_of(collectors, request.memory)):
            if partial.has(group):
                advance(len(subject.examples))
                continue
            _measure(subject, group, trip, request, partial, advance)
            partial.finish(group, trip, len(subject.examples))
            for collector in trip:
                collector.free()
        reached = [c for c in collectors if partial.rows.get(c.name, 1)]  # some layers no example may reach
        header = header_of(subject, stored, request, reached, symmetries)
        header = replace(header, rows=partial.rows)
        write_statistics(partial, header, output)
    return header


def _symmetries(stored: StateDictSource, request: Request) -> tuple[Symmetry, ...]:
    """The units whose activations are asked for.

    Raises:
        ConfigError: there are none, or the data have no name by which those of another model are compared.
    """
    if ACTIVATIONS not in request.kinds:
        return ()
    if not (request.data or request.data_sha256):
        raise ConfigError(
            "kind=activations: those of two models are compared example by example. Name the data in the "
            "Request, data=..., so that a merge can tell that they are of the same."
        )
    if request.positions < 1:
        raise ConfigError(f"positions={request.positions}: expected 1 or more.")
    symmetries = symmetries_of(stored)
    if not symmetries:
        raise ConfigError(
            f"kind=activations: the model config of {stored.name} names no units that may change places. "
            "Write them into a config of your own under `symmetries`: see docs/model-configs.md."
        )
    return symmetries


def check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Check that an output does not take the place of an input.

    Raises:
        ConfigError: it would.
    """
    if output.resolve() in [path.resolve() for path in inputs]:
        raise ConfigError(f"output={output} is an input, which would be destroyed. Write to another path.")


def check_weights(subject: Subject, stored: StateDictSource) -> None:
    """Check that the module has the weights of the model, since the header says that they are measured.

    Raises:
        ConfigError: a parameter is another, or has another shape.
    """
    for name, parameter in subject.module.named_parameters():
        key = subject.key_of(name)
        if key not in stored:
            continue
        weight = stored.read(key)
        if weight.shape != parameter.shape or not is_same(parameter, weight):
            raise ConfigError(
                f"the parameter '{name}' of {type(subject.module).__name__}, {list(parameter.shape)}, is not "
                f"the tensor '{key}' of {stored.name}, {list(weight.shape)}. Load the weights of the model, "
                "and give Subject the right keys={parameter: key}."
            )


def trips_of(collectors: Sequence[Collector], memory: int) -> list[list[Collector]]:
    """The collectors in groups whose sums fit into the memory; a larger one has a group of its own."""
    trips: list[list[Collector]] = []
    room = 0
    for collector in collectors:
        if not trips or collector.nbytes > room:
            trips.append([])
            room = memory
        trips[-1].append(collector)
        room -= collector.nbytes
    return trips


def _measure(
    subject: Subject,
    group: int,
    trip: Sequence[Collector],
    request: Request,
    partial: Partial,
    advance: Advance,
) -> None:
    """Add up one group over all examples, from where an earlier run has stopped."""
    of_parameters = [c for c in trip if isinstance(c, GradientCollector)]
    for parameter in subject.module.parameters():
        parameter.requires_grad_(False)
    for collector in of_parameters:
        collector.parameter.requires_grad_(True)
    done = partial.resume(group, trip)
    advance(done)
    with looking(trip):
        for number in range(done, len(subject.examples)):
            with example_named(number):
                if of_parameters:
                    _add_gradients(subject, of_parameters, request, number)
                else:
                    with torch.no_grad():
                        subject.logits(subject.examples[number])
            advance(1)
            if (number + 1) % request.chunk == 0:
                partial.save(group, trip, number + 1)


def _add_gradients(
    subject: Subject, collectors: Sequence[GradientCollector], request: Request, number: int
) -> None:
    parameters = [collector.parameter for collector in collectors]
    terms = subject.log_likelihoods(number, request.labels, request.seed)
    for place, (weight, value) in enumerate(terms):
        if not value.requires_grad:
            continue  # none of these parameters takes part
        gradients = torch.autograd.grad(
            value, parameters, retain_graph=place + 1 < len(terms), allow_unused=True
        )
        for collector, gradient in zip(collectors, gradients, strict=True):
            collector.add(gradient, weight, number)


def header_of(
    subject: Subject,
    stored: StateDictSource,
    request: Request,
    collectors: Sequence[Collector],
    symmetries: Sequence[Symmetry] = (),
) -> StatisticsHeader:
    """What is measured of which model on which data, for the header of the file."""
    lacking = {
        kind: {*stored.keys()} - {c.model_key for c in collectors if c.kind == kind}
        for kind in request.kinds
        if kind in (FISHER, GRAM, MASK)
    }
    own = dict(request.settings)
    if ACTIVATIONS in request.kinds:
        lacking[ACTIVATIONS] = keys_unseen(symmetries, {c.key for c in collectors if c.kind == ACTIVATIONS})
        own["positions"] = request.positions
    unmeasured = {
        kind: {
            key: (stored.info(key).dtype, list(stored.info(key).shape))
            for key in stored.keys()
            if key in keys
        }
        for kind, keys in lacking.items()
    }
    return StatisticsHeader(
        model=request.model or stored.name,
        model_sha256=request.model_sha256,
        fingerprint=fingerprint(stored),
        data=request.data,
        data_sha256=request.data_sha256,
        count=len(subject.examples),
        seed=request.seed,
        labels=request.labels if {FISHER, GRADIENT, MASK} & {*request.kinds} else "",
        kinds=tuple(request.kinds),
        unmeasured=unmeasured,
        settings={**subject.settings, **own},
        code=f"{code_version()} {request.code}".rstrip(),
    )


def code_version() -> str:
    """The version, and a hash of the modules that measure."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"


def write_statistics(partial: Partial, header: StatisticsHeader, output: Path) -> None:
    """Write the file key by key: it is complete, or does not exist."""
    float32 = dtype_name(torch.float32)
    laid_out = {name: (float32, shape) for name, (_, shape) in partial.places.items()}
    with CheckpointWriter(output, laid_out, header.metadata()) as writer:
        for name in laid_out:
            writer.write(name, 0, partial.read(name).flatten())
        writer.commit()
