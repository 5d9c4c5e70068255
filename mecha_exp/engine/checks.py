"""What can be wrong with a merge before data is read: each check gives its messages, none stops another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mecha_exp.checkpoint import Destination, is_arithmetic
from mecha_exp.engine.inputs import Source
from mecha_exp.errors import CheckpointError, some
from mecha_exp.nodes import ModelNode
from mecha_exp.weighting import ByKey

SHOWN_KEYS = 10

Sources = Mapping[ModelNode, Source]


def unmatched_patterns(values: Iterable[ByKey], keys: Sequence[str]) -> Iterator[str]:
    """Patterns of per-key values that no key matches."""
    for value in values:
        for pattern in value.unmatched(list(keys)):
            yield (
                f"the pattern '{pattern}' matches none of the {len(keys)} keys, which are "
                f"{some(keys, SHOWN_KEYS)}"
            )


def missing_keys(models: Sequence[ModelNode], sources: Sources, keys: Sequence[str]) -> Iterator[str]:
    """Inputs of one recipe that lack keys which the others have."""
    everything = [key for key in keys if any(key in sources[model] for model in models)]
    for model in models:
        missing = [key for key in everything if key not in sources[model]]
        if missing:
            yield (
                f"{sources[model].name} lacks {len(missing)} of the {len(everything)} keys that the other "
                f"inputs have: {some(missing, SHOWN_KEYS)}. Are these models of one architecture? "
                "on_missing=skip leaves such keys out, on_missing=base takes them from the first input that "
                "has them."
            )


def different_shapes(models: Sequence[ModelNode], sources: Sources, keys: Sequence[str]) -> Iterator[str]:
    """Keys whose shape is not the same in all inputs of one recipe."""

    def shape(model: ModelNode, key: str) -> str:
        return str(list(sources[model].info(key).shape))

    yield from _different(
        models, sources, keys, shape, "shapes that differ", "Only models of one architecture can be merged."
    )


def different_kinds(models: Sequence[ModelNode], sources: Sources, keys: Sequence[str]) -> Iterator[str]:
    """Keys that are floating point in one input of a recipe and not in another."""

    def kind(model: ModelNode, key: str) -> str:
        dtype = sources[model].info(key).dtype
        return "floating point" if is_arithmetic(dtype) else dtype

    yield from _different(
        models, sources, keys, kind, "kinds of numbers that differ", "Convert them to one dtype first."
    )


def clashing_outputs(outputs: Sequence[Path], sources: Sources) -> Iterator[str]:
    """Outputs that are an input, or another output."""
    inputs = {file.resolve(): file for source in sources.values() for file in source.files}
    folders = {folder: file for resolved, file in inputs.items() for folder in resolved.parents}
    seen: set[Path] = set()
    for output in outputs:
        target = output.resolve()
        if target in inputs:
            yield (
                f"the output {output} is the input {inputs[target]}, which would be destroyed. Write to "
                "another path."
            )
        inside = next((file for folder, file in folders.items() if target == folder), None)
        if inside is not None and target not in inputs:
            yield f"the output {output} is the folder of the input {inside}. Write to another folder."
        if target in seen:
            yield f"two outputs go to {output}. Give each its own path."
        seen.add(target)


def unwritable_outputs(destinations: Iterable[Destination | None]) -> Iterator[str]:
    """Outputs for which there is no permission or no room, or where other things are in the way."""
    for destination in destinations:
        try:
            if destination is not None:
                destination.check()
        except CheckpointError as error:
            yield str(error)


def _different(
    models: Sequence[ModelNode],
    sources: Sources,
    keys: Sequence[str],
    trait: Callable[[ModelNode, str], str],
    what: str,
    cure: str,
) -> Iterator[str]:
    """One message for all keys of which a trait differs between the inputs that have them."""
    lines = []
    for key in keys:
        found: dict[str, str] = {}
        for model in models:
            if key in sources[model]:
                found.setdefault(trait(model, key), sources[model].name)
        if len(found) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} in {name}" for value, name in found.items()))
    if lines:
        shown = "".join(f"\n    {line}" for line in lines[:SHOWN_KEYS])
        rest = f"\n    and {len(lines) - SHOWN_KEYS} more" if len(lines) > SHOWN_KEYS else ""
        yield f"{len(lines)} keys have {what} between the inputs:{shown}{rest}\n    {cure}"
